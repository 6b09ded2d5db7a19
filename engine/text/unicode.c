#include "engine/text/unicode.h"

#include <stdlib.h>
#include <string.h>

#include <utf8proc.h>

#include "engine/base/utf8.h"

/* Below this every code point is in NFC and none combines with one before it (DerivedNormalizationProps.txt). */
enum { FIRST_COMBINING = 0x300 };

/* White_Space of PropList.txt. */
static bool is_space(uint32_t cp)
{
	switch (cp) {
	case 0x85:
	case 0xA0:
	case 0x1680:
	case 0x2028:
	case 0x2029:
	case 0x202F:
	case 0x205F:
	case 0x3000:
		return true;
	default:
		return cp == ' ' || (cp >= 0x09 && cp <= 0x0D) || (cp >= 0x2000 && cp <= 0x200A);
	}
}

enum unicode_class unicode_class(uint32_t cp)
{
	if (cp < 0x80) {
		if ((cp | 0x20) >= 'a' && (cp | 0x20) <= 'z')
			return UNICODE_LETTER;
		if (cp >= '0' && cp <= '9')
			return UNICODE_NUMBER;
	}
	if (is_space(cp))
		return UNICODE_SPACE;
	switch (utf8proc_category((utf8proc_int32_t)cp)) {
	case UTF8PROC_CATEGORY_LU:
	case UTF8PROC_CATEGORY_LL:
	case UTF8PROC_CATEGORY_LT:
	case UTF8PROC_CATEGORY_LM:
	case UTF8PROC_CATEGORY_LO:
		return UNICODE_LETTER;
	case UTF8PROC_CATEGORY_ND:
	case UTF8PROC_CATEGORY_NL:
	case UTF8PROC_CATEGORY_NO:
		return UNICODE_NUMBER;
	case UTF8PROC_CATEGORY_PC:
	case UTF8PROC_CATEGORY_PD:
	case UTF8PROC_CATEGORY_PS:
	case UTF8PROC_CATEGORY_PE:
	case UTF8PROC_CATEGORY_PI:
	case UTF8PROC_CATEGORY_PF:
	case UTF8PROC_CATEGORY_PO:
		return UNICODE_PUNCT;
	default:
		return UNICODE_REST;
	}
}

struct rune rune_at(const char *s, size_t n, size_t i)
{
	if (i >= n)
		return (struct rune){0};
	unsigned char c = (unsigned char)s[i];
	if (c < 0x80)
		return (struct rune){c, unicode_class(c), 1};
	uint32_t cp;
	size_t len = utf8_decode(s + i, n - i, &cp);
	if (len == 0)
		return (struct rune){c, UNICODE_REST, 1};
	return (struct rune){cp, unicode_class(cp), len};
}

bool unicode_is_plain(const char *s, size_t n)
{
	/* U+0300 and above begin with 0xCC or more; so do invalid bytes that normalisation leaves alone. */
	for (size_t i = 0; i < n; i++) {
		if ((unsigned char)s[i] >= 0xCC)
			return false;
	}
	return true;
}

/* The code points of one run that may need normalisation. */
struct run {
	utf8proc_int32_t *cp; /* [cap] */
	utf8proc_int32_t *tmp; /* [cap], for sorting */
	size_t n, cap;
};

static bool run_reserve(struct run *r, size_t extra)
{
	if (r->cap - r->n >= extra)
		return true;
	size_t cap = r->cap ? r->cap : 256;
	while (cap - r->n < extra)
		cap *= 2;
	utf8proc_int32_t *cp = realloc(r->cp, cap * sizeof *cp);
	if (cp)
		r->cp = cp;
	utf8proc_int32_t *tmp = realloc(r->tmp, cap * sizeof *tmp);
	if (tmp)
		r->tmp = tmp;
	if (!cp || !tmp)
		return false;
	r->cap = cap;
	return true;
}

/* Appends the full canonical decomposition of cp. */
static bool run_add(struct run *r, uint32_t cp)
{
	enum { LONGEST = 32 }; /* canonical decompositions have at most four code points */
	if (!run_reserve(r, LONGEST))
		return false;
	int last_class = 0;
	utf8proc_ssize_t got = utf8proc_decompose_char((utf8proc_int32_t)cp, r->cp + r->n, LONGEST,
	                                               UTF8PROC_DECOMPOSE | UTF8PROC_STABLE, &last_class);
	if (got <= 0 || got > LONGEST)
		r->cp[r->n++] = (utf8proc_int32_t)cp;
	else
		r->n += (size_t)got;
	return true;
}

static unsigned combining_class(utf8proc_int32_t cp)
{
	return (unsigned)utf8proc_get_property(cp)->combining_class & 0xFF;
}

/* Sorts n marks by combining class, keeping the order within a class. Counting keeps a megabyte of marks linear. */
static void sort_marks(utf8proc_int32_t *cp, utf8proc_int32_t *tmp, size_t n)
{
	if (n <= 8) {
		for (size_t i = 1; i < n; i++) {
			utf8proc_int32_t v = cp[i];
			size_t j = i;
			for (; j > 0 && combining_class(cp[j - 1]) > combining_class(v); j--)
				cp[j] = cp[j - 1];
			cp[j] = v;
		}
		return;
	}
	size_t start[257] = {0};
	for (size_t i = 0; i < n; i++)
		start[combining_class(cp[i]) + 1]++;
	for (size_t c = 1; c < 257; c++)
		start[c] += start[c - 1];
	for (size_t i = 0; i < n; i++)
		tmp[start[combining_class(cp[i])]++] = cp[i];
	memcpy(cp, tmp, n * sizeof *cp);
}

/* Puts the run into canonical order (Unicode 3.11, D109), composes it and appends it as UTF-8; then it is empty. */
static bool run_flush(struct run *r, struct buf *out)
{
	for (size_t i = 0; i < r->n;) {
		if (combining_class(r->cp[i]) == 0) {
			i++;
			continue;
		}
		size_t end = i + 1;
		while (end < r->n && combining_class(r->cp[end]) != 0)
			end++;
		sort_marks(r->cp + i, r->tmp, end - i);
		i = end;
	}
	if (r->n > 0) {
		utf8proc_ssize_t got =
			utf8proc_normalize_utf32(r->cp, (utf8proc_ssize_t)r->n, UTF8PROC_COMPOSE | UTF8PROC_STABLE);
		r->n = got > 0 ? (size_t)got : 0;
	}
	for (size_t i = 0; i < r->n; i++) {
		char c[4];
		buf_append(out, c, utf8_encode((uint32_t)r->cp[i], c));
	}
	r->n = 0;
	return !out->failed;
}

bool unicode_nfc(const char *s, size_t n, struct buf *out)
{
	struct run run = {0};
	bool ok = buf_reserve(out, n);
	/* A code point below FIRST_COMBINING starts afresh: it is held alone, to see whether marks follow. */
	for (size_t i = 0; i < n && ok;) {
		uint32_t cp;
		size_t len = utf8_decode(s + i, n - i, &cp);
		if (len == 0) {
			ok = run_flush(&run, out);
			buf_append(out, s + i, 1);
			i++;
			continue;
		}
		if (cp < FIRST_COMBINING) {
			ok = run_flush(&run, out);
			/* Followed by its like (0xCC begins U+0300), it is final. */
			if (i + len >= n || (unsigned char)s[i + len] < 0xCC) {
				buf_append(out, s + i, len);
				i += len;
				continue;
			}
		}
		ok = ok && run_add(&run, cp);
		i += len;
	}
	ok = ok && run_flush(&run, out);
	free(run.cp);
	free(run.tmp);
	return ok && !out->failed;
}
