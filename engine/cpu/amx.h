/*
 * Products by matrix tiles (AMX): tiles of 16 rows of bfloat16s, multiplied into tiles of 16 x 16 floats. Quantised
 * weights become bfloat16s as they are used, 32 inputs of 32 outputs at a time, once for all rows; a scale per 32
 * weights applied to sums instead would take the sums out of their tiles every time. Activations are rounded to
 * bfloat16, and every row goes through the same sums in the same order, however many there are.
 */
#pragma once

#include "engine/cpu/fast.h"

enum {
	AMX_ROWS = 16,     /* rows of a tile, and outputs of a strip */
	AMX_K = 32,        /* inputs of a tile */
	AMX_BLOCK = 2,     /* tiles of rows, and strips, that are multiplied with each other at once */
};

struct amx_job {
	const struct weight *weight; /* quantised, or BF16 */
	int64_t begin, end;          /* its tiles */
	int64_t n_rows;
	const uint16_t *x;           /* [n_rows rounded up to amx_rows()][stride], zeros behind the inputs */
	int64_t stride;              /* amx_stride() */
	float *y;                    /* [n_rows][outputs of the weight] */
	const float *bias;           /* of all outputs, or NULL */
	bool accumulate;
	void *scratch;               /* amx_scratch_bytes(), aligned to 64 */
};

struct amx_kernels {
	const char *name, *detail;
	void (*product)(const struct amx_job *j); /* NULL: the compiler knows no such instructions */
};

extern const struct amx_kernels amx_kernels;
/* The same source over tiles that are emulated, for tests on machines without them. */
extern const struct amx_kernels amx_kernels_emulated;

static inline int64_t amx_stride(int64_t n_in)
{
	return (n_in + AMX_K - 1) / AMX_K * AMX_K;
}

static inline int64_t amx_rows(int64_t n_rows)
{
	return (n_rows + AMX_BLOCK * AMX_ROWS - 1) / (AMX_BLOCK * AMX_ROWS) * (AMX_BLOCK * AMX_ROWS);
}

/* Two strips of weights, and a tile of sums. */
static inline size_t amx_scratch_bytes(int64_t n_in)
{
	return (size_t)amx_stride(n_in) * AMX_BLOCK * AMX_ROWS * sizeof(uint16_t) + AMX_ROWS * AMX_ROWS * sizeof(float);
}
