#include "engine/text/pretokenize.h"

#include <string.h>

#include "engine/text/unicode.h"

/* [^\s\p{L}\p{N}] */
enum { SYMBOL = UNICODE_PUNCT | UNICODE_REST };

/* The end of the run of runes of the classes in `mask` that begins at i. */
static size_t run_end(const char *s, size_t n, size_t i, unsigned mask)
{
	for (;;) {
		struct rune r = rune_at(s, n, i);
		if (!(r.class & mask))
			return i;
		i += r.n;
	}
}

/* As run_end, but at most `max` runes. */
static size_t run_end_max(const char *s, size_t n, size_t i, unsigned mask, size_t max)
{
	for (; max > 0; max--) {
		struct rune r = rune_at(s, n, i);
		if (!(r.class & mask))
			break;
		i += r.n;
	}
	return i;
}

static bool is_newline(char c)
{
	return c == '\r' || c == '\n';
}

/*
 * 's|'t|'re|'ve|'m|'ll|'d: the length of the one that begins the text, or 0. `fold` ignores case as Unicode does: the
 * long s (U+017F) is an s.
 */
static size_t contraction(const char *s, size_t n, bool fold)
{
	if (n < 2 || s[0] != '\'')
		return 0;
	if (fold && n >= 3 && s[1] == '\xC5' && s[2] == '\xBF')
		return 3;
	char a = s[1], b = n > 2 ? s[2] : '\0';
	if (fold) {
		a = a >= 'A' && a <= 'Z' ? (char)(a | 0x20) : a;
		b = b >= 'A' && b <= 'Z' ? (char)(b | 0x20) : b;
	}
	if (a == 's' || a == 't' || a == 'm' || a == 'd')
		return 2;
	if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l'))
		return 3;
	return 0;
}

/* \s+(?!\S)|\s+ on a text that begins with white space: all of it, or all but the last before something else. */
static size_t blanks(const char *s, size_t n)
{
	size_t last = 0, end = 0;
	for (;;) {
		struct rune r = rune_at(s, n, end);
		if (r.class != UNICODE_SPACE)
			break;
		last = end;
		end += r.n;
	}
	return end == n || last == 0 ? end : last;
}

/*
 * GPT-2 (openai/gpt-2, encoder.py):
 * 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
 */
static size_t scan_gpt2(const char *s, size_t n)
{
	size_t k = contraction(s, n, false);
	if (k)
		return k;
	size_t i = s[0] == ' ';
	struct rune r = rune_at(s, n, i);
	switch (r.class) {
	case UNICODE_LETTER:
	case UNICODE_NUMBER:
		return run_end(s, n, i + r.n, r.class);
	case UNICODE_PUNCT:
	case UNICODE_REST:
		return run_end(s, n, i + r.n, SYMBOL);
	default:
		return blanks(s, n);
	}
}

/*
 * Llama 3 and Qwen2 (their tokenizer.json), which differ in how many digits make a piece:
 * (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,max}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
 */
static size_t scan_words(const char *s, size_t n, size_t max_digits)
{
	size_t k = contraction(s, n, true);
	if (k)
		return k;
	struct rune r = rune_at(s, n, 0);
	if (r.class == UNICODE_LETTER)
		return run_end(s, n, r.n, UNICODE_LETTER);
	if (r.class == UNICODE_NUMBER)
		return run_end_max(s, n, r.n, UNICODE_NUMBER, max_digits - 1);
	struct rune second = rune_at(s, n, r.n);
	if (second.class == UNICODE_LETTER && !is_newline(s[0]))
		return run_end(s, n, r.n + second.n, UNICODE_LETTER);
	if (r.class & SYMBOL || (s[0] == ' ' && second.class & SYMBOL)) {
		size_t end = run_end(s, n, r.n, SYMBOL);
		while (end < n && is_newline(s[end]))
			end++;
		return end;
	}
	/* \s*[\r\n]+ reaches to the last line end within the white space. */
	size_t end = run_end(s, n, 0, UNICODE_SPACE);
	while (end > 0 && !is_newline(s[end - 1]))
		end--;
	return end ? end : blanks(s, n);
}

static size_t scan_llama3(const char *s, size_t n)
{
	return scan_words(s, n, 3);
}

static size_t scan_qwen2(const char *s, size_t n)
{
	return scan_words(s, n, 1);
}

/*
 * A stage that makes each match of an expression a piece of its own, and each gap between two matches another. `match`
 * is the length of the match at s[i], or 0.
 */
static size_t isolate(const char *s, size_t n, size_t (*match)(const char *s, size_t n, size_t i))
{
	size_t k = match(s, n, 0);
	if (k)
		return k;
	size_t i = 0;
	do
		i += rune_at(s, n, i).n;
	while (i < n && !match(s, n, i));
	return i;
}

/* \s?X+ for a class X. */
static size_t match_spaced(const char *s, size_t n, size_t i, unsigned mask)
{
	struct rune r = rune_at(s, n, i);
	size_t first = r.class == UNICODE_SPACE ? i + r.n : i;
	size_t end = run_end(s, n, first, mask);
	return end > first ? end - i : 0;
}

static size_t match_number(const char *s, size_t n, size_t i)
{
	struct rune r = rune_at(s, n, i);
	return r.class == UNICODE_NUMBER ? r.n : 0;
}

static size_t match_newline(const char *s, size_t n, size_t i)
{
	return i < n && is_newline(s[i]);
}

static size_t match_letters(const char *s, size_t n, size_t i)
{
	return match_spaced(s, n, i, UNICODE_LETTER);
}

static size_t match_punct(const char *s, size_t n, size_t i)
{
	return match_spaced(s, n, i, UNICODE_PUNCT);
}

/* [\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF]+ */
static size_t match_cjk(const char *s, size_t n, size_t i)
{
	size_t end = i;
	for (;;) {
		struct rune r = rune_at(s, n, end);
		if (r.n < 3 || !((r.cp >= 0x800 && r.cp <= 0x9FA5) || (r.cp >= 0xAC00 && r.cp <= 0xD7FF)))
			return end - i;
		end += r.n;
	}
}

/* SmolLM and StarCoder: Digits(individual_digits) before GPT-2's expression. */
static size_t scan_number(const char *s, size_t n)
{
	return isolate(s, n, match_number);
}

/* DeepSeek-Coder (its tokenizer.json): [\r\n] then \s?\p{L}+ then \s?\p{P}+ then the CJK ranges then single digits. */
static size_t scan_newline(const char *s, size_t n)
{
	return isolate(s, n, match_newline);
}

static size_t scan_letters(const char *s, size_t n)
{
	return isolate(s, n, match_letters);
}

static size_t scan_punct(const char *s, size_t n)
{
	return isolate(s, n, match_punct);
}

static size_t scan_cjk(const char *s, size_t n)
{
	return isolate(s, n, match_cjk);
}

/* clang-format off */
#define GPT2     {scan_gpt2}
#define LLAMA3   {scan_llama3}
#define QWEN2    {scan_qwen2}
#define SMOLLM   {scan_number, scan_gpt2}
#define DEEPSEEK {scan_newline, scan_letters, scan_punct, scan_cjk, scan_number}
/* clang-format on */

/* The names are those that llama.cpp's converter writes. */
static const struct pretokenizer pretokenizers[] = {
	{"default", GPT2, .nfc = false, .whole_first = false, .adds_bos = false},
	{"gpt-2", GPT2, .nfc = false, .whole_first = false, .adds_bos = false},
	{"gpt2", GPT2, .nfc = false, .whole_first = false, .adds_bos = false},
	{"phi-2", GPT2, .nfc = false, .whole_first = false, .adds_bos = false},
	{"llama-bpe", LLAMA3, .nfc = false, .whole_first = true, .adds_bos = true},
	{"llama3", LLAMA3, .nfc = false, .whole_first = true, .adds_bos = true},
	{"llama-v3", LLAMA3, .nfc = false, .whole_first = true, .adds_bos = true},
	{"smaug-bpe", LLAMA3, .nfc = false, .whole_first = false, .adds_bos = false},
	{"qwen2", QWEN2, .nfc = true, .whole_first = false, .adds_bos = false},
	/* Qwen's vocabulary in a tokenizer of DeepSeek's, which do not normalise. */
	{"deepseek-r1-qwen", QWEN2, .nfc = false, .whole_first = false, .adds_bos = false},
	{"smollm", SMOLLM, .nfc = false, .whole_first = false, .adds_bos = false},
	{"starcoder", SMOLLM, .nfc = false, .whole_first = false, .adds_bos = false},
	{"refact", SMOLLM, .nfc = false, .whole_first = false, .adds_bos = false},
	{"codeshell", SMOLLM, .nfc = false, .whole_first = false, .adds_bos = false},
	{"deepseek-coder", DEEPSEEK, .nfc = false, .whole_first = false, .adds_bos = false},
};

const struct pretokenizer *pretokenizer_find(struct str name)
{
	if (name.n == 0)
		return &pretokenizers[0];
	for (size_t i = 0; i < sizeof pretokenizers / sizeof *pretokenizers; i++) {
		if (str_is(name, pretokenizers[i].name))
			return &pretokenizers[i];
	}
	return NULL;
}

void pretoken_start(struct pretoken_iter *it, const struct pretokenizer *pre, const char *s, size_t n)
{
	memset(it, 0, sizeof *it);
	it->pre = pre;
	it->s = s;
	it->n = n;
}

bool pretoken_next(struct pretoken_iter *it, struct str *piece)
{
	if (it->pos == it->n)
		return false;
	size_t end = it->n;
	for (size_t k = 0; k < PRETOKEN_STAGES && it->pre->stage[k]; k++) {
		if (it->end[k] == it->pos)
			it->end[k] += it->pre->stage[k](it->s + it->pos, end - it->pos);
		end = it->end[k];
	}
	*piece = (struct str){it->s + it->pos, end - it->pos};
	it->pos = end;
	return true;
}
