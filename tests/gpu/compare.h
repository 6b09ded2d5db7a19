/*
 * What the comparison of two devices' operations is made of: random operands on both, results of both, and a table of
 * how far apart they are. It needs the engine and nothing else, so that it runs on a bare machine with a GPU.
 */
#pragma once

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/backend.h"

/* The device under test and the one it must agree with. */
struct pair {
	struct backend *device, *reference;
	/*
	 * Error of an activation within a product, of both devices together: relative to itself (rounded to a half:
	 * 2^-11), or to the largest of its 32 inputs (rounded to eight bits: 1/254).
	 */
	float element_error, group_error;
	uint64_t seed;
	bool large; /* sizes of real models, rather than what an emulated GPU does in seconds */
};

/* An array on both devices. */
struct operand {
	struct pair *p;
	float *host; /* as it was written */
	float *device, *reference;
	size_t n;
};

/* Says what went wrong and ends the program with status 1, the rows so far printed. */
_Noreturn void give_up(const char *format, ...) __attribute__((format(printf, 1, 2)));
void must(enum status s, const char *what);

uint64_t random_bits(struct pair *p);
int32_t random_int(struct pair *p, int32_t from, int32_t to);
float random_normal(struct pair *p);
/* A matrix of any format: random bits, with scales that give elements of ordinary size. free() it. */
void *random_matrix(struct pair *p, const struct quant_format *f, int64_t n_in, int64_t n_out);

struct operand operand_new(struct pair *p, size_t n, float scale); /* normal numbers times scale */
struct operand operand_copy(struct pair *p, const float *values, size_t n);
void operand_free(struct operand *o);
/* What the devices have in an operand now; free() both. */
void operand_results(const struct operand *o, float **got, float **want);

/* A batch of one sequence of n_rows <= 64 rows from position 0, whose tokens are all 0; static. */
struct batch *plain_batch(int32_t n_rows);

/* ---- the table: one row per operation (and format) */

void row_begin(const char *name);
/* One result: off by `error`, where `bound` is allowed. A larger error, or one that is no number, ends the program. */
void row_result(double error, double bound, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* The results of both devices must differ by at most tolerance * (1 + |want|). */
void row_results(const struct operand *o, double tolerance, const char *where);
void row_end(void);
int rows_passed(void);

/* The 16-bit types of KV elements that both devices had before choose_other_elements(). */
struct own_elements {
	enum quant_type type[2];
};

/*
 * Both devices keep KV in the other 16-bit type from now on, until choose_own_elements(): what a row's name says of
 * that (", bf16"). NULL, and nothing is changed, where one of them has no choice.
 */
const char *choose_other_elements(struct pair *p, struct own_elements *own);
void choose_own_elements(struct pair *p, const struct own_elements *own);

/* Comparisons, in compare_*.c. */
void compare_products(struct pair *p);
void compare_rows(struct pair *p);
void compare_attention(struct pair *p);
void compare_choice(struct pair *p);
void compare_chunks(struct pair *p);
void compare_far(struct pair *p);
void compare_mass(struct pair *p);
void compare_merge(struct pair *p);
void compare_plus(struct pair *p);
void compare_probe(struct pair *p);
