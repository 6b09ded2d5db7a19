/*
 * bench_model: tokens per second of a model over a backend, in the terms of llama-bench, for compare.py.
 *
 *   bench_model --model FILE [--device NAME] [--threads N] [--runs N] TEST ...
 *
 * A TEST is pN (prefill of N tokens), nN (N tokens one after the other), either with @D (on top of D tokens that are there already),
 * or bB:N (B sequences together, N tokens each). Prints one line per test: the test and the tokens per second of the fastest run.
 * The tokens are arbitrary: what is computed does not depend on them. Prefill goes in chunks of 512 rows, and only the last row's
 * logits are computed, as both programs do for a prompt.
 */
#include "tests/bench/model_steps.h"

static double run(struct model_steps *b, char kind, int32_t n_seqs, int32_t n, int32_t depth)
{
	model_prefill(b, n_seqs, 0, depth);
	double t = bench_now();
	if (kind == 'p')
		model_prefill(b, 1, depth, n);
	else
		for (int32_t i = 0; i < n; i++)
			model_step(b, n_seqs, depth + i, 1);
	return (double)n_seqs * n / (bench_now() - t);
}

struct test {
	char kind;
	int n_seqs, n, depth;
};

static bool parse_test(const char *s, struct test *t)
{
	*t = (struct test){.kind = s[0], .n_seqs = 1};
	if (s[0] == 'b')
		return sscanf(s, "b%d:%d", &t->n_seqs, &t->n) == 2 && t->n_seqs >= 1 && t->n_seqs <= STEPS_SEQS_MAX && t->n >= 1;
	return (s[0] == 'p' || s[0] == 'n') && sscanf(s + 1, "%d@%d", &t->n, &t->depth) >= 1 && t->n >= 1 && t->depth >= 0;
}

int main(int argc, char **argv)
{
	struct backend_options o = {.device = "cpu"};
	const char *path = NULL;
	int runs = 3, at = 1;
	for (; at + 1 < argc && strncmp(argv[at], "--", 2) == 0; at += 2) {
		if (strcmp(argv[at], "--model") == 0)
			path = argv[at + 1];
		else if (strcmp(argv[at], "--device") == 0)
			o.device = argv[at + 1];
		else if (strcmp(argv[at], "--threads") == 0)
			o.n_threads = atoi(argv[at + 1]);
		else if (strcmp(argv[at], "--runs") == 0)
			runs = atoi(argv[at + 1]);
		else
			bench_fail(argv[at], "unknown option");
	}
	if (!path || at == argc)
		bench_fail("usage", "bench_model --model FILE [--device NAME] [--threads N] [--runs N] pN|nN[@D]|bB:N ...");

	int32_t longest = 1, most_seqs = 1;
	for (int i = at; i < argc; i++) {
		struct test t;
		if (!parse_test(argv[i], &t))
			bench_fail(argv[i], "not a test");
		longest = t.n + t.depth > longest ? t.n + t.depth : longest;
		most_seqs = t.n_seqs > most_seqs ? t.n_seqs : most_seqs;
	}
	struct model_steps b;
	model_steps_open(&b, path, &o, most_seqs, longest);

	for (int i = at; i < argc; i++) {
		struct test t;
		double best = 0;
		parse_test(argv[i], &t);
		for (int k = 0; k < runs; k++) {
			double speed = run(&b, t.kind, t.n_seqs, t.n, t.depth);
			best = speed > best ? speed : best;
		}
		printf("%s %.2f\n", argv[i], best);
		fflush(stdout);
	}
	model_steps_close(&b);
	return 0;
}
