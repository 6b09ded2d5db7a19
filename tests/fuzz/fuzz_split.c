/*
 * Any bytes as a document: the parts without what they repeat are the document, none has more tokens than it may, no
 * cut is inside a code point or the name of a control token (unless it, or several that run into each other, are longer
 * than a part), and it ends.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/utf8.h"
#include "engine/text/split.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void expect(int holds)
{
	if (!holds)
		abort();
}

/* Ways to count: bytes; runs of letters; code points, oddly; many tokens a byte. */
static int32_t count(void *arg, struct str text)
{
	int32_t n = 0;
	uint32_t cp;
	switch (*(const int *)arg) {
	case 0:
		return (int32_t)text.n;
	case 1:
		for (size_t i = 0; i < text.n; i++)
			n += i == 0 || (text.p[i] | 32) < 'a' || (text.p[i] | 32) > 'z' || text.p[i - 1] == ' ';
		return n;
	case 2:
		for (size_t i = 0, k; i < text.n; i += k ? k : 1, n++)
			k = utf8_decode(text.p + i, text.n - i, &cp);
		return n + (text.n % 5 == 2 ? 6 : 0);
	default:
		return 3 * (int32_t)text.n + 1;
	}
}

/* Whether p is where a code point, or a byte of none, begins. */
static bool is_boundary(struct str t, const bool *begins, size_t p)
{
	return p == t.n || begins[p];
}

/* The bytes of the atoms that p lies within, and of those that run into these; 0: it lies within none. */
static size_t atoms_around(const bool *within, size_t n, size_t p)
{
	size_t from = p, to = p;
	if (p >= n || !within[p])
		return 0;
	while (from > 0 && within[from])
		from--;
	while (to < n && within[to])
		to++;
	return to - from;
}

/* input: way of counting, most tokens, overlap, text */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static const struct str atoms[] = {{"<|im_end|>", 10}, {"<s>", 3}, {"|><|", 4}};
	if (size < 3 || size > 4096)
		return 0;
	int way = data[0] % 4;
	struct str text = {(const char *)data + 3, size - 3};
	struct split s = {.text = text,
	                  .max_tokens = SPLIT_MIN_TOKENS + data[1],
	                  .overlap_permille = data[2] * 2 % (SPLIT_MAX_OVERLAP_PERMILLE + 1),
	                  .count = count,
	                  .arg = &way,
	                  .atoms = atoms,
	                  .n_atoms = way == 0 ? 3 : 0};
	struct split_chunk c, before = {0};
	struct error err;
	bool done = false, *begins = calloc(text.n + 1, sizeof *begins), *within = calloc(text.n + 1, sizeof *within);
	uint32_t cp;
	size_t at = 0;
	expect(begins && within);
	for (size_t a = 0; a < s.n_atoms; a++)
		for (size_t i = 0; i + atoms[a].n <= text.n; i++)
			for (size_t k = 1; memcmp(text.p + i, atoms[a].p, atoms[a].n) == 0 && k < atoms[a].n; k++)
				within[i + k] = true;
	for (size_t i = 0, k; i < text.n; i += k ? k : 1) {
		k = utf8_decode(text.p + i, text.n - i, &cp);
		begins[i] = true;
	}
	for (size_t n = 0;; n++) {
		expect(split_next(&s, &c, &done, &err) == STATUS_OK);
		if (done)
			break;
		expect(c.fresh == at && c.start <= c.fresh && c.end > c.fresh && c.end <= text.n && n < text.n);
		expect(n == 0 ? c.start == 0 : c.start > before.start);
		expect(c.n_tokens == count(&way, (struct str){text.p + c.start, c.end - c.start}) &&
		       c.n_tokens <= s.max_tokens);
		expect(is_boundary(text, begins, c.start) && is_boundary(text, begins, c.end));
		expect((c.cut == SPLIT_END) == (c.end == text.n) && split_cut_name(c.cut) != NULL);
		size_t around = atoms_around(within, text.n, c.end);
		expect(around == 0 || around > (size_t)s.max_tokens);
		at = c.end;
		before = c;
	}
	expect(at == text.n);
	free(begins);
	free(within);
	return 0;
}
