#include "server/coherence.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A token of a text and how often it is there; those of a text are sorted. */
struct term {
	int32_t token, n;
};

struct terms {
	struct term *term;
	size_t n;
};

static int by_number(const void *a, const void *b)
{
	int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
	return (x > y) - (x < y);
}

static enum status count_terms(const struct coherence_text *text, struct terms *out)
{
	int32_t *sorted = malloc((text->n + 1) * sizeof *sorted);
	out->term = malloc((text->n + 1) * sizeof *out->term);
	out->n = 0;
	if (!sorted || !out->term) {
		free(sorted);
		return STATUS_NOMEM;
	}
	if (text->n)
		memcpy(sorted, text->tokens, text->n * sizeof *sorted);
	qsort(sorted, text->n, sizeof *sorted, by_number);
	for (size_t i = 0; i < text->n; i++) {
		if (i == 0 || sorted[i] != sorted[i - 1])
			out->term[out->n++] = (struct term){sorted[i], 0};
		out->term[out->n - 1].n++;
	}
	free(sorted);
	return STATUS_OK;
}

/* All tokens of all texts, sorted: one that df of them have is there df times. */
static int32_t *all_tokens(const struct terms *terms, size_t n, size_t *n_all)
{
	size_t total = 0, at = 0;
	for (size_t i = 0; i < n; i++)
		total += terms[i].n;
	int32_t *all = malloc((total + 1) * sizeof *all);
	for (size_t i = 0; all && i < n; i++)
		for (size_t k = 0; k < terms[i].n; k++)
			all[at++] = terms[i].term[k].token;
	if (all)
		qsort(all, at, sizeof *all, by_number);
	*n_all = at;
	return all;
}

static double weight(const int32_t *all, size_t n_all, size_t n_texts, int32_t token)
{
	size_t low = 0, high = n_all, df = 0;
	while (low < high) {
		size_t middle = low + (high - low) / 2;
		if (all[middle] < token)
			low = middle + 1;
		else
			high = middle;
	}
	while (low + df < n_all && all[low + df] == token)
		df++;
	return log(1 + (double)n_texts / (double)(df ? df : 1));
}

enum status coherence_of_neighbours(const struct coherence_text *text, size_t n, double *out)
{
	struct terms *terms = calloc(n ? n : 1, sizeof *terms);
	int32_t *all = NULL;
	size_t n_all = 0;
	enum status st = terms ? STATUS_OK : STATUS_NOMEM;
	for (size_t i = 0; i < n && st == STATUS_OK; i++)
		st = count_terms(&text[i], &terms[i]);
	if (st == STATUS_OK)
		all = all_tokens(terms, n, &n_all);
	if (st == STATUS_OK && !all)
		st = STATUS_NOMEM;
	for (size_t i = 0; i + 1 < n && st == STATUS_OK; i++) {
		const struct terms *a = &terms[i], *b = &terms[i + 1];
		double dot = 0, aa = 0, bb = 0;
		size_t k = 0;
		for (size_t j = 0; j < a->n; j++) {
			double w = weight(all, n_all, n, a->term[j].token), x = w * a->term[j].n;
			while (k < b->n && b->term[k].token < a->term[j].token)
				k++;
			if (k < b->n && b->term[k].token == a->term[j].token)
				dot += x * w * b->term[k].n;
			aa += x * x;
		}
		for (size_t j = 0; j < b->n; j++) {
			double x = weight(all, n_all, n, b->term[j].token) * b->term[j].n;
			bb += x * x;
		}
		out[i] = aa > 0 && bb > 0 ? fmin(dot / sqrt(aa * bb), 1) : NAN;
	}
	for (size_t i = 0; terms && i < n; i++)
		free(terms[i].term);
	free(terms);
	free(all);
	return st;
}
