/*
 * compare-model: a whole model on two devices.
 *
 *   compare-model [--kv FORM] [--rope-scaling CHOICE] FILE DEVICE [REFERENCE] [PROMPT] [NEW]
 *
 * Prefill of PROMPT tokens in two chunks and NEW tokens one after the other, chosen greedily by the reference (default:
 * cpu-reference, 70, 12) and given to both. At each position the logits' difference, relative to their norm, must be
 * what rounding explains; and the token that the device would choose must be the reference's, unless the reference
 * itself has the two within that difference. Then the same prompt must give the same bits whether the device computes
 * it alone and at once or beside others and in pieces. --kv: over narrow KV on both (int8, fp8_e4m3); --rope-scaling:
 * as the daemon's. Exits with 0, 1, or 77 without such a device; the last line is "N passed, N failed, 0 skipped".
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/whole.h"

/* Rounding to halves, or to eight bits on the fast CPU backends, over all layers. */
static const double half_tolerance = 0.02, byte_tolerance = 0.06;
/*
 * With narrow KV: codes are the next ones where activations differ a little. A model of narrow weights may be further
 * off, on any backend.
 */
static const double int8_tolerance = 0.03, fp8_tolerance = 0.08;

struct tally {
	double worst, tolerance;
	int n, chosen; /* positions, and those where both choose the same */
};

static int32_t best(const float *x, int32_t n)
{
	int32_t b = 0;
	for (int32_t i = 1; i < n; i++)
		b = x[i] > x[b] ? i : b;
	return b;
}

/* False when the position is wrong; says why. */
static bool compare(struct tally *t, const float *got, const float *want, int32_t n, int32_t position)
{
	double off = 0, size = 0;
	for (int32_t i = 0; i < n; i++) {
		off += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
		size += (double)want[i] * want[i];
	}
	double error = sqrt(off / size), spread = sqrt(size / n);
	int32_t a = best(got, n), b = best(want, n);
	t->n++;
	t->chosen += a == b;
	t->worst = error > t->worst ? error : t->worst;
	if (!(error <= t->tolerance)) {
		printf("position %d: logits are off by %.4f of their norm, %.4f is allowed\n", position, error,
		       t->tolerance);
		return false;
	}
	/* Five standard deviations of two logits' errors. */
	if (want[b] - want[a] > 7 * t->tolerance * spread) {
		printf("position %d: token %d is chosen instead of %d, which is %.3f better\n", position, a, b,
		       want[b] - want[a]);
		return false;
	}
	return true;
}

static bool run(struct whole *d, struct whole *r, struct tally *t, int32_t n_prompt, int32_t n_new)
{
	int32_t n_vocab = model_params(r->model)->n_vocab, first = n_prompt * 2 / 3, at = 0, token[512];
	float *got, *want;
	bool right = true;
	for (int32_t i = 0; i < n_prompt; i++)
		token[i] = (int32_t)((int64_t)(i + 3) * 7919 % n_vocab);
	for (int k = 0; right && k < 2 + n_new; k++) {
		int32_t n = k == 0 ? first : k == 1 ? n_prompt - first : 1;
		enum status s = whole_step(r, 1, at, n, token + at, true, &want),
			    s2 = whole_step(d, 1, at, n, token + at, true, &got);
		if (s != STATUS_OK || s2 != STATUS_OK) {
			printf("a step of %d rows at %d: %s; the reference: %s\n", n, at, status_text(s2),
			       status_text(s));
			return false;
		}
		for (int32_t i = 0; right && i < n; i++)
			right = compare(t, got + (size_t)i * (size_t)n_vocab, want + (size_t)i * (size_t)n_vocab,
			                n_vocab, at + i);
		if (k >= 1)
			token[at + n] = best(want + (size_t)(n - 1) * (size_t)n_vocab, n_vocab);
		at += n;
	}
	return right;
}

/* ---- alone and beside others */

enum { COMPANY = 4 };

/*
 * A step of parts of several sequences, from their tokens: n[s] rows of sequence s from at[s] on. *logits: of all rows.
 */
static enum status mixed_step(struct whole *d, const int32_t *token, const int32_t *at, const int32_t *n,
                              float **logits)
{
	struct batch_seq seq[COMPANY];
	int32_t output[512];
	struct batch batch = {0, d->token, d->position, 0, seq, 0, output};
	for (int32_t s = 0; s < COMPANY; s++) {
		if (n[s] == 0)
			continue;
		seq[batch.n_seqs++] =
			(struct batch_seq){batch.n_rows, n[s], at[s], d->table + s * d->n_pages, d->n_pages};
		for (int32_t i = 0; i < n[s]; i++, batch.n_rows++) {
			d->position[batch.n_rows] = at[s] + i;
			d->token[batch.n_rows] = token[at[s] + i];
			output[batch.n_rows] = batch.n_rows;
		}
	}
	batch.n_outputs = batch.n_rows;
	return model_forward(d->model, &batch, d->kv, logits);
}

/*
 * Four conversations have the same tokens: the first is computed in one step, alone; the others beside each other, cut
 * into chunks and single rows by chance. Every position must have the same bits in all of them.
 */
static bool independent(struct whole *d, const int32_t *token, int32_t n_tokens)
{
	const int32_t n_vocab = model_params(d->model)->n_vocab;
	const size_t row_bytes = (size_t)n_vocab * sizeof(float);
	int32_t at[COMPANY] = {0}, n[COMPANY] = {n_tokens};
	float *alone = malloc((size_t)n_tokens * row_bytes), *logits;
	uint64_t seed = 88172645463325252u; /* xorshift64 (Marsaglia) */
	bool right = false;
	if (!alone || mixed_step(d, token, at, n, &logits) != STATUS_OK) {
		printf("no memory, or a step failed\n");
		goto out;
	}
	memcpy(alone, logits, (size_t)n_tokens * row_bytes);
	while (at[1] < n_tokens || at[2] < n_tokens || at[3] < n_tokens) {
		int32_t n_rows = 0, row = 0;
		n[0] = 0;
		for (int32_t s = 1; s < COMPANY; s++) {
			seed ^= seed << 13;
			seed ^= seed >> 7;
			seed ^= seed << 17;
			/* single rows, short chunks, long ones */
			int32_t most = seed >> 60 < 9 ? 1 : seed >> 60 < 13 ? 12 : 90, left = n_tokens - at[s];
			n[s] = 1 + (int32_t)(seed >> 20 & 0xffff) % most;
			n[s] = n[s] < left ? n[s] : left;
			n[s] = n_rows + n[s] <= d->max_rows ? n[s] : 0;
			n_rows += n[s];
		}
		if (mixed_step(d, token, at, n, &logits) != STATUS_OK) {
			printf("a step of %d rows failed\n", n_rows);
			goto out;
		}
		for (int32_t s = 1; s < COMPANY; s++)
			for (int32_t i = 0; i < n[s]; i++, row++) {
				if (memcmp(logits + (size_t)row * (size_t)n_vocab,
				           alone + (size_t)(at[s] + i) * (size_t)n_vocab, row_bytes) == 0)
					continue;
				printf("position %d: other bits beside others, in a step of %d rows of which %d are "
				       "its own, than alone\n",
				       at[s] + i, n_rows, n[s]);
				goto out;
			}
		for (int32_t s = 1; s < COMPANY; s++)
			at[s] += n[s];
	}
	right = true;
out:
	free(alone);
	return right;
}

int main(int argc, char **argv)
{
	enum kv_form form = KV_FORM_F16;
	const char *rope = NULL;
	for (; argc > 2 && argv[1][0] == '-'; argc -= 2, argv += 2) {
		if (strcmp(argv[1], "--rope-scaling") == 0)
			rope = argv[2];
		else if (strcmp(argv[1], "--kv") != 0 || !kv_form_find(argv[2], &form))
			break;
	}
	if (argc < 3 || argv[1][0] == '-') {
		fprintf(stderr, "usage: compare-model [--kv FORM] [--rope-scaling CHOICE] FILE DEVICE"
				" [REFERENCE] [PROMPT] [NEW]\n");
		return 2;
	}
	const char *device = argv[2], *reference = argc > 3 ? argv[3] : "cpu-reference";
	int32_t n_prompt = argc > 4 ? (int32_t)strtol(argv[4], NULL, 10) : 70,
		n_new = argc > 5 ? (int32_t)strtol(argv[5], NULL, 10) : 12;
	if (n_prompt < 2 || n_prompt > 400 || n_new < 0 || n_new > 100) {
		fprintf(stderr, "compare-model: 2 to 400 tokens of prompt, 0 to 100 new ones\n");
		return 2;
	}
	bool bytes = strcmp(reference, "cpu-reference") != 0 || strncmp(device, "cpu-avx", 7) == 0 ||
	             strcmp(device, "cpu") == 0;
	struct tally t = {.tolerance = bytes ? byte_tolerance : half_tolerance};
	struct whole d, r;
	const double narrow = form == KV_FORM_INT8 ? int8_tolerance : form == KV_FORM_FP8_E4M3 ? fp8_tolerance : 0;
	t.tolerance = narrow > t.tolerance ? narrow : t.tolerance;
	whole_open(&d, device, 0, argv[1], n_prompt, form, rope);
	whole_open(&r, reference, 0, argv[1], n_prompt, form, rope);
	if (!whole_pages(&d, 1, n_prompt + n_new + 1) || !whole_pages(&r, 1, n_prompt + n_new + 1)) {
		printf("no memory for pages\n");
		return 1;
	}
	bool right = run(&d, &r, &t, n_prompt, n_new);
	int32_t token[512];
	for (int32_t i = 0; i < n_prompt; i++)
		token[i] = (int32_t)((int64_t)(i + 3) * 7919 % model_params(d.model)->n_vocab);
	right = right && whole_pages(&d, COMPANY, n_prompt) && independent(&d, token, n_prompt);
	printf("%s, KV in %s, %s against %s: %d positions, the same choice at %d, logits off by at most %.4f\n%d "
	       "passed, %d failed, 0 skipped\n",
	       argv[1], kv_form_name(form), device, reference, t.n, t.chosen, t.worst, right, !right);
	whole_close(&d);
	whole_close(&r);
	return right ? 0 : 1;
}
