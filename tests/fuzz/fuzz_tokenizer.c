/*
 * Any bytes as a text, under small vocabularies of each kind: all ids are in range, the text comes back, no control
 * token appears where it may not, and the detokenizer releases whole code points and everything. With the top bit of
 * the first byte set, the bytes describe a vocabulary instead: it is refused with a sentence, or works.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/utf8.h"
#include "engine/text/detok.h"
#include "engine/text/unicode.h"
#include "tests/support/vocab.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void expect(int holds)
{
	if (!holds)
		abort();
}

static const char *const pre_names[] = {"gpt-2", "llama-bpe", "qwen2", "smollm", "deepseek-coder"};
enum { N_BPE = 5, N_KINDS = 7 };
static struct vocab vocabs[N_KINDS];

static void make_bpe(struct vocab *v, const char *pre)
{
	static const char *const merges[][2] = {
		{"t", "h"},   {"i", "n"},   {" ", "t"}, {"th", "e"},  {" t", "h"},      {" th", "e"},
		{" ", " "},   {"  ", "  "}, {"a", "a"}, {"aa", "aa"}, {"\xC3", "\xA9"}, {"'", "s"},
		{"\r", "\n"}, {"\n", "\n"}, {"<", "|"}, {"|", ">"},   {"\xF0", "\x9F"}, {"1", "2"}};
	struct error err;
	vocab_begin(v, "gpt2", pre);
	vocab_add_bytes(v);
	for (size_t i = 0; i < sizeof merges / sizeof *merges; i++)
		vocab_merge(v, merges[i][0], merges[i][1]);
	vocab_add(v, "<|im_start|>", VOCAB_CONTROL, 0);
	vocab_add(v, "<|im_end|>", VOCAB_CONTROL, 0);
	vocab_add(v, "<|", VOCAB_CONTROL, 0);
	vocab_add(v, "<t>", VOCAB_USER, 0);
	expect(vocab_open(v, &err) == STATUS_OK);
}

static void make_spm(struct vocab *v, bool prefix)
{
	static const char *const pieces[] = {"\xE2\x96\x81",
	                                     "t",
	                                     "h",
	                                     "e",
	                                     "th",
	                                     "he",
	                                     "the",
	                                     "\xE2\x96\x81the",
	                                     "\xE2\x96\x81\xE2\x96\x81",
	                                     "a",
	                                     "aa",
	                                     "aaaa",
	                                     "\xC3\xA9",
	                                     "i",
	                                     "n",
	                                     "in",
	                                     "s",
	                                     "'s",
	                                     "<",
	                                     "s>"};
	struct error err;
	vocab_begin(v, "llama", NULL);
	image_add_bool(&v->image, "tokenizer.ggml.add_space_prefix", prefix);
	vocab_add_spm_base(v);
	for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++)
		vocab_add(v, pieces[i], VOCAB_NORMAL, -(float)(i * 7 % 5));
	vocab_add(v, "<t>", VOCAB_USER, 0);
	expect(vocab_open(v, &err) == STATUS_OK);
}

static void make_all(void)
{
	for (size_t i = 0; i < N_BPE; i++)
		make_bpe(&vocabs[i], pre_names[i]);
	make_spm(&vocabs[N_BPE], true);
	make_spm(&vocabs[N_BPE + 1], false);
}

/* What decoding makes of an encoded text: itself, except that SentencePiece does not tell U+2581 from a space. */
static void expect_back(size_t kind, struct str text, struct str back)
{
	if (kind < N_BPE) {
		expect(str_eq(text, back) ||
		       (strcmp(pre_names[kind], "qwen2") == 0 && !unicode_is_plain(text.p, text.n)));
		return;
	}
	size_t k = 0;
	for (size_t i = 0; i < text.n; i++, k++) {
		bool mark = text.n - i >= 3 && memcmp(text.p + i, "\xE2\x96\x81", 3) == 0;
		expect(k < back.n && back.p[k] == (mark ? ' ' : text.p[i]));
		i += mark ? 2 : 0;
	}
	expect(k == back.n);
}

static void stream(const struct tokenizer *t, const struct token_buf *ids, struct str stop)
{
	struct detok *d;
	struct buf out = BUF_INIT, none = BUF_INIT;
	expect(detok_create(t, &stop, 1, true, &d) == STATUS_OK);
	int hit = -1;
	for (size_t i = 0; i < ids->n && hit < 0; i++) {
		hit = detok_push(d, ids->ids[i], &out);
		expect(utf8_valid(buf_str(&out).p, out.len));
	}
	detok_finish(d, hit < 0 ? &out : &none);
	expect(none.len == 0 && utf8_valid(buf_str(&out).p, out.len));
	if (hit < 0 && stop.n == 0) {
		/* Without stops it is the text, if that is UTF-8 at all. */
		struct buf whole = BUF_INIT;
		for (size_t i = 0; i < ids->n; i++) {
			struct str s = tokenizer_piece(t, ids->ids[i], false);
			buf_append(&whole, s.p, s.n);
		}
		if (utf8_valid(buf_str(&whole).p, whole.len))
			expect(str_eq(buf_str(&whole), buf_str(&out)));
		buf_free(&whole);
	} else if (stop.n > 0 && utf8_valid(stop.p, stop.n)) {
		expect(out.len < stop.n || !memmem(out.data, out.len, stop.p, stop.n));
	}
	detok_destroy(d);
	buf_free(&out);
}

/* input: kind and flags, where data begins, how long it is, the length of a stop string, text */
static void try_text(const uint8_t *p, size_t n)
{
	if (n < 4)
		return;
	size_t kind = (p[0] & 0x0F) % N_KINDS;
	unsigned flags = p[0] >> 4 & 3;
	struct text_span span = {p[1], (size_t)p[1] + p[2]};
	struct str text = {(const char *)p + 4, n - 4};
	struct str stop = {text.p, p[3] % 8 < text.n ? p[3] % 8 : 0};
	const struct tokenizer *t = vocabs[kind].tokenizer;
	struct token_buf ids = {0};
	struct buf back = BUF_INIT;
	struct error err;

	expect(tokenizer_encode(t, text.p, text.n, &span, 1, flags & TOKENIZE_SPECIAL, &ids, &err) == STATUS_OK);
	size_t at = 0;
	for (size_t i = 0; i < ids.n; i++) {
		expect(ids.ids[i] >= 0 && ids.ids[i] < tokenizer_n_vocab(t));
		bool special = tokenizer_is_special(t, ids.ids[i]);
		expect(!special || flags & TOKENIZE_SPECIAL);
		/* In byte-level BPE positions are known: none of the data is in a control token. */
		size_t len = tokenizer_piece(t, ids.ids[i], false).n;
		if (special && kind < N_BPE && kind != 2)
			expect(at + len <= span.begin || at >= span.end || span.end <= span.begin);
		at += len;
	}
	tokenizer_decode(t, ids.ids, ids.n, true, &back);
	expect_back(kind, text, buf_str(&back));
	stream(t, &ids, stop);
	stream(t, &ids, (struct str){"", 0});
	buf_free(&back);
	token_buf_free(&ids);
}

/*
 * input: kind, then lines: a byte for the type (0xFF: a merge), the text of the token; the last line is a text to
 * encode
 */
static void try_vocabulary(const uint8_t *p, size_t n)
{
	static struct vocab v;
	struct error err = {0};
	struct token_buf ids = {0};
	const uint8_t *end = p + n, *line = p + 1, *last = p;
	vocab_begin(&v, p[0] & 1 ? "llama" : "gpt2", p[0] & 2 ? pre_names[p[0] >> 2 & 3] : NULL);
	if (p[0] & 0x10)
		vocab_add_bytes(&v);
	if (p[0] & 0x20)
		vocab_add_spm_base(&v);
	v.no_types = p[0] & 0x40;
	while (line < end && v.n < VOCAB_MAX && v.n_merges < VOCAB_MAX) {
		const uint8_t *stop = memchr(line, '\n', (size_t)(end - line));
		stop = stop ? stop : end;
		last = line;
		struct str text =
			vocab_copy((const char *)line + 1, (size_t)(stop - line) > 0 ? (size_t)(stop - line) - 1 : 0);
		if (line[0] == 0xFF)
			v.merges[v.n_merges++] = text;
		else
			vocab_add_n(&v, text, line[0] % 8, (float)(line[0] >> 3) - 16);
		line = stop + 1;
	}
	enum status status = vocab_open(&v, &err);
	if (status != STATUS_OK) {
		expect(err.status == status && err.message[0] != '\0');
	} else {
		expect(tokenizer_encode(v.tokenizer, (const char *)last, (size_t)(end - last), NULL, 0, p[0] >> 2 & 3,
		                        &ids, &err) == STATUS_OK);
		for (size_t i = 0; i < ids.n; i++)
			expect(ids.ids[i] >= 0 && ids.ids[i] < tokenizer_n_vocab(v.tokenizer));
	}
	token_buf_free(&ids);
	vocab_close(&v);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static bool made;
	if (!made)
		make_all();
	made = true;
	if (size > 0 && data[0] & 0x80)
		try_vocabulary(data, size);
	else
		try_text(data, size);
	return 0;
}
