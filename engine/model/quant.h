/*
 * Tensor element types of GGUF and their block formats: one table row each.
 *
 * A row of a tensor is a whole number of blocks. The layouts are those of the GGUF/ggml type numbers below; each
 * dequantiser's comment in quant.c gives the formula.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

/* The numbers are those stored in GGUF files. */
enum quant_type {
	QUANT_F32 = 0,
	QUANT_F16 = 1,
	QUANT_Q4_0 = 2,
	QUANT_Q4_1 = 3,
	QUANT_Q5_0 = 6,
	QUANT_Q5_1 = 7,
	QUANT_Q8_0 = 8,
	QUANT_Q2_K = 10,
	QUANT_Q3_K = 11,
	QUANT_Q4_K = 12,
	QUANT_Q5_K = 13,
	QUANT_Q6_K = 14,
	QUANT_BF16 = 30,
};

struct quant_format {
	enum quant_type type;
	const char *name;      /* "Q4_K" */
	uint32_t block_elems;  /* elements a block holds */
	uint32_t block_bytes;  /* bytes a block takes */
	/* Writes n floats (a multiple of block_elems) to dst[n]; src need not be aligned. */
	void (*dequantize)(const void *src, float *dst, size_t n);
};

/* The row for a type number read from a file, or NULL when it is not supported. */
const struct quant_format *quant_format(uint32_t type);
/* The i-th row, for loops over all formats; NULL past the end. */
const struct quant_format *quant_format_at(size_t i);

/*
 * IEEE 754 half and bfloat16 conversions; narrowing rounds to nearest even, overflow becomes infinity, a NaN stays one.
 */
float quant_half_to_float(uint16_t h);
uint16_t quant_float_to_half(float f);
float quant_bf16_to_float(uint16_t h);
uint16_t quant_float_to_bf16(float f);

/*
 * The nearest E4M3 (ties to even; beyond 448 the largest), and its value: OCP's 8-bit floating point specification
 * (OFP8, 2023), 4 bits of exponent with bias 7, 3 of mantissa, no infinity; 0x7F and 0xFF are NaN.
 */
uint8_t quant_fp8_from_float(float x);
float quant_fp8_to_float(uint8_t c);
