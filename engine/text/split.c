#include "engine/text/split.h"

#include <string.h>

#include "engine/base/utf8.h"

enum {
	BYTES_PER_TOKEN = 4, /* until something is known */
	/* to find out how far a number of tokens reaches; each halves what is in question, or better */
	TRIES = 12,
	QUOTES = 3,          /* closing quotes and brackets between a full stop and the space behind it */
};

const char *split_cut_name(enum split_cut cut)
{
	static const char *const names[] = {"token", "word", "sentence", "line", "paragraph", "heading", "end"};
	return names[cut];
}

/* ---- Boundaries ---- */

static bool is_space(char c)
{
	return c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\f' || c == '\v';
}

static bool is_continuation(char c)
{
	return ((unsigned char)c & 0xC0) == 0x80;
}

/* Whether [p - k, ...) holds a code point that begins before p and ends behind it. */
static bool inside_code_point(struct str t, size_t p)
{
	uint32_t cp;
	if (p == 0 || p >= t.n || !is_continuation(t.p[p]))
		return false;
	for (size_t k = 1; k <= 3 && k <= p; k++) {
		if (is_continuation(t.p[p - k]))
			continue;
		return utf8_decode(t.p + p - k, t.n - (p - k), &cp) > k;
	}
	return false;
}

/* The beginning of an atom that p lies within, or p. */
static size_t before_atom(const struct split *s, size_t p)
{
	struct str t = s->text;
	for (size_t i = 0; i < s->n_atoms; i++) {
		struct str a = s->atoms[i];
		size_t back = a.n - 1 < p ? a.n - 1 : p;
		for (size_t k = back; a.n > 1 && k >= 1; k--)
			if (p - k + a.n <= t.n && memcmp(t.p + p - k, a.p, a.n) == 0)
				return p - k;
	}
	return p;
}

/* The last place at or before p where a cut may be, by code points alone or by atoms as well. */
static size_t aligned(const struct split *s, size_t p, bool atoms)
{
	size_t q = p;
	while (inside_code_point(s->text, q))
		q--;
	/* What begins there may begin within another one. */
	for (p = q + 1; atoms && p != q;) {
		p = q;
		q = before_atom(s, p);
	}
	return q;
}

static size_t next_code_point(struct str t, size_t p)
{
	uint32_t cp;
	size_t n = utf8_decode(t.p + p, t.n - p, &cp);
	return p + (n ? n : 1);
}

/* Markdown: one to six #, a space, a text; or a text with a line of = or - below it. */
static bool begins_heading(struct str t, size_t p)
{
	size_t n = 0;
	while (p + n < t.n && t.p[p + n] == '#')
		n++;
	if (n >= 1 && n <= 6 && p + n < t.n && (t.p[p + n] == ' ' || t.p[p + n] == '\t'))
		return true;
	const char *line = memchr(t.p + p, '\n', t.n - p);
	if (!line || line == t.p + p || is_space(t.p[p]))
		return false;
	size_t below = (size_t)(line - t.p) + 1, run = 0;
	char c = below < t.n ? t.p[below] : '\0';
	while ((c == '=' || c == '-') && below + run < t.n && t.p[below + run] == c)
		run++;
	return run >= 3 && (below + run == t.n || t.p[below + run] == '\n' || t.p[below + run] == '\r');
}

/* Whether the line before the one that begins at p has nothing but spaces. */
static bool behind_empty_line(struct str t, size_t p)
{
	for (size_t i = p - 1; i > 0; i--) {
		if (t.p[i - 1] == '\n')
			return true;
		if (!is_space(t.p[i - 1]))
			return false;
	}
	return false;
}

/* U+3002, U+FF01, U+FF1F: full stops after which no space follows. */
static bool is_wide_stop(const char *p)
{
	return memcmp(p, "\xE3\x80\x82", 3) == 0 || memcmp(p, "\xEF\xBC\x81", 3) == 0 ||
	       memcmp(p, "\xEF\xBC\x9F", 3) == 0;
}

/*
 * p stands behind a space. A single capital letter before a full stop is an initial, and a small letter behind it goes
 * on.
 */
static bool ends_sentence(struct str t, size_t p)
{
	size_t i = p;
	while (i > 0 && is_space(t.p[i - 1]))
		i--;
	for (int k = 0; k < QUOTES && i > 0 && strchr("\"')]", t.p[i - 1]) && t.p[i - 1]; k++)
		i--;
	if (i >= 3 && (is_wide_stop(t.p + i - 3) || memcmp(t.p + i - 3, "\xE2\x80\xA6", 3) == 0))
		return true;
	if (i == 0 || !(t.p[i - 1] == '.' || t.p[i - 1] == '!' || t.p[i - 1] == '?'))
		return false;
	bool initial = i >= 2 && t.p[i - 1] == '.' && t.p[i - 2] >= 'A' && t.p[i - 2] <= 'Z' &&
	               (i == 2 || is_space(t.p[i - 3]) || t.p[i - 3] == '.');
	return !initial && !(t.p[p] >= 'a' && t.p[p] <= 'z');
}

/* What there is at p, 0 < p < t.n, where a cut may be. */
static enum split_cut cut_at(struct str t, size_t p)
{
	if (t.p[p - 1] == '\n') {
		if (begins_heading(t, p))
			return SPLIT_HEADING;
		if (behind_empty_line(t, p) && t.p[p] != '\n' && t.p[p] != '\r')
			return SPLIT_PARAGRAPH;
		return SPLIT_LINE;
	}
	if (p >= 3 && is_wide_stop(t.p + p - 3))
		return SPLIT_SENTENCE;
	if (!is_space(t.p[p - 1]) || is_space(t.p[p]))
		return SPLIT_TOKEN;
	return ends_sentence(t, p) ? SPLIT_SENTENCE : SPLIT_WORD;
}

/* The best boundary in [low, high]: the last of its kind, or with `first` the first; high where there is none. */
static size_t best_cut(const struct split *s, size_t low, size_t high, bool first, enum split_cut *kind)
{
	size_t best = high;
	*kind = SPLIT_TOKEN;
	for (size_t p = high; p >= low && p > 0; p--) {
		if (p >= s->text.n || inside_code_point(s->text, p))
			continue;
		enum split_cut here = cut_at(s->text, p);
		if ((here > *kind || (first && here == *kind && here > SPLIT_TOKEN)) && before_atom(s, p) == p) {
			best = p;
			*kind = here;
		}
	}
	return best;
}

/* ---- How far tokens reach ---- */

/* Tokens of the `n` bytes behind p, or before it. */
static int32_t count(struct split *s, size_t p, size_t n, bool backward)
{
	return s->count(s->arg, (struct str){s->text.p + (backward ? p - n : p), n});
}

/*
 * About as many bytes behind p (or before it), of at most `most`, as have no more than `budget` tokens; *n is what was
 * counted to fit, and may be 0. Counting is all that is relied on: more bytes may have fewer tokens.
 */
static enum status reach(struct split *s, size_t p, size_t most, int32_t budget, bool backward, size_t *n)
{
	size_t fits = 0, beyond = most + 1;
	double ratio = s->bytes_per_token > 0 ? s->bytes_per_token : BYTES_PER_TOKEN;
	size_t guess = (size_t)(ratio * budget) + 1;
	for (int i = 0; i < TRIES && beyond - fits > 1; i++) {
		guess = guess <= fits ? fits + 1 : guess >= beyond ? beyond - 1 : guess;
		int32_t c = count(s, p, guess, backward);
		if (c < 0)
			return STATUS_NOMEM;
		if (c <= budget)
			fits = guess;
		else
			beyond = guess;
		if (c > 0)
			s->bytes_per_token = (double)guess / c;
		/* Near enough: the end is moved to a boundary anyway. */
		if (fits > 0 && beyond - fits <= fits / 64)
			break;
		double next = c > 0 ? (double)guess * budget / c : (double)guess * 2;
		bool between = next > (double)fits && next < (double)beyond && i < TRIES / 2;
		guess = between ? (size_t)next : fits + (beyond - fits) / 2;
	}
	*n = fits;
	return STATUS_OK;
}

/* The end of the part that begins at s->start, and its tokens. */
static enum status find_end(struct split *s, struct split_chunk *out, struct error *err)
{
	struct str t = s->text;
	size_t start = s->start, fresh = s->at, n;
	enum status st = reach(s, start, t.n - start, s->max_tokens, false, &n);
	/* It has to bring something new. A repetition that leaves no room for that is given up. */
	for (size_t end = start + n; st == STATUS_OK;) {
		size_t high = end < t.n ? aligned(s, end, true) : end;
		enum split_cut kind = SPLIT_END;
		if (high <= fresh && start < fresh)
			return STATUS_LIMIT;
		/* An atom that is longer than a part, and then a character that is. */
		if (high <= fresh)
			high = aligned(s, end, false);
		if (high <= fresh)
			high = next_code_point(t, fresh);
		size_t least = fresh + (high - fresh) / 2 + 1;
		size_t cut = high < t.n ? best_cut(s, least, high, false, &kind) : high;
		int32_t c = count(s, start, cut - start, false);
		if (c < 0)
			st = STATUS_NOMEM;
		else if (c <= s->max_tokens) {
			*out = (struct split_chunk){start, fresh, cut, c, cut < t.n ? kind : SPLIT_END};
			return STATUS_OK;
		} else if (cut <= next_code_point(t, fresh))
			return start < fresh ? STATUS_LIMIT
			                     : error_set_param(err, STATUS_INVALID, "max_chunk_tokens",
			                                       "a part of %d tokens does not hold one character",
			                                       s->max_tokens);
		end = cut - 1;
	}
	return st == STATUS_NOMEM ? error_set(err, st, "no memory to cut a document") : st;
}

/* Where the next part begins: so far back that about the overlap is repeated, and at a boundary of its own. */
static enum status find_start(struct split *s, const struct split_chunk *last, struct error *err)
{
	size_t n, end = last->end, span = end - last->start;
	int32_t budget = (int32_t)((int64_t)s->max_tokens * s->overlap_permille / 1000);
	enum split_cut kind;
	s->at = s->start = end;
	if (budget < 1 || end == s->text.n)
		return STATUS_OK;
	if (reach(s, end, span, budget, true, &n) != STATUS_OK)
		return error_set(err, STATUS_NOMEM, "no memory to cut a document");
	/* The nearest to the wanted size of the best kind, in the further half of it. */
	size_t low = end - n;
	while (inside_code_point(s->text, low))
		low++;
	s->start = best_cut(s, low > 0 ? low : 1, end - n / 2, true, &kind);
	if (kind == SPLIT_TOKEN)
		s->start = aligned(s, low, true);
	if (s->start <= last->start)
		s->start = end;
	return STATUS_OK;
}

enum status split_next(struct split *s, struct split_chunk *out, bool *done, struct error *err)
{
	if (s->max_tokens < SPLIT_MIN_TOKENS)
		return error_set_param(err, STATUS_INVALID, "max_chunk_tokens", "a part has at least %d tokens, not %d",
		                       SPLIT_MIN_TOKENS, s->max_tokens);
	if (s->overlap_permille < 0 || s->overlap_permille > SPLIT_MAX_OVERLAP_PERMILLE)
		return error_set_param(err, STATUS_INVALID, "overlap", "parts repeat from 0 to 0.5 of their tokens");
	*done = s->at >= s->text.n;
	if (*done)
		return STATUS_OK;
	enum status st = find_end(s, out, err);
	if (st == STATUS_LIMIT) {
		s->start = s->at;
		st = find_end(s, out, err);
	}
	return st == STATUS_OK ? find_start(s, out, err) : st;
}
