/*
 * The tokenizer as a filter, for tests/golden/test_tokenizer.py: reads requests from standard input until it ends and
 * answers each on standard output. All numbers are 32 bits, little-endian.
 *
 * request: flags (enum tokenize_flags), length, text
 * answer:  number of ids, ids, length of the decoded text (special tokens kept), decoded text
 *
 * With --speed it encodes megabytes of hard texts instead, prints the processor time of each, and fails when one is
 * over the limit.
 */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "engine/model/gguf.h"
#include "engine/text/tokenizer.h"
#include "tests/support/adversarial.h"

enum { LONGEST_TEXT = 1 << 28 };

static bool get_u32(uint32_t *v)
{
	unsigned char b[4];
	if (fread(b, 1, 4, stdin) != 4)
		return false;
	*v = (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
	return true;
}

static void put_u32(uint32_t v)
{
	unsigned char b[4] = {(unsigned char)v, (unsigned char)(v >> 8), (unsigned char)(v >> 16),
	                      (unsigned char)(v >> 24)};
	fwrite(b, 1, 4, stdout);
}

/* Answers one request; false when it is not whole or cannot be answered. */
static bool answer(const struct tokenizer *t, uint32_t flags)
{
	uint32_t n;
	if (!get_u32(&n) || n > LONGEST_TEXT)
		return false;
	char *text = malloc((size_t)n + 1);
	struct token_buf ids = {0};
	struct buf back = BUF_INIT;
	struct error err;
	bool ok = text && fread(text, 1, n, stdin) == n;
	if (ok && tokenizer_encode(t, text, n, NULL, 0, flags, &ids, &err)) {
		fprintf(stderr, "%s\n", err.message);
		ok = false;
	}
	if (ok) {
		tokenizer_decode(t, ids.ids, ids.n, true, &back);
		put_u32((uint32_t)ids.n);
		for (size_t i = 0; i < ids.n; i++)
			put_u32((uint32_t)ids.ids[i]);
		put_u32((uint32_t)back.len);
		fwrite(buf_str(&back).p, 1, back.len, stdout);
		fflush(stdout);
		ok = !back.failed && !ferror(stdout);
	}
	free(text);
	token_buf_free(&ids);
	buf_free(&back);
	return ok;
}

static bool filter(const struct tokenizer *t)
{
	uint32_t flags;
	while (get_u32(&flags)) {
		if (!answer(t, flags))
			return false;
	}
	return true;
}

static bool measure(const struct tokenizer *t)
{
	bool ok = true;
	char *text = malloc(ADVERSARIAL_BYTES);
	for (size_t k = 0; text && k < N_ADVERSARIAL; k++) {
		struct token_buf ids = {0};
		adversarial_fill(&adversarial_texts[k], text);
		clock_t began = clock();
		enum status status =
			tokenizer_encode(t, text, ADVERSARIAL_BYTES, NULL, 0, TOKENIZE_SPECIAL, &ids, NULL);
		double seconds = (double)(clock() - began) / CLOCKS_PER_SEC;
		bool fine = status == STATUS_OK && seconds <= ADVERSARIAL_SECONDS;
		printf("%-4s %6.0f ms %8zu tokens  %s\n", fine ? "ok" : "SLOW", seconds * 1e3, ids.n,
		       adversarial_texts[k].name);
		ok = ok && fine;
		token_buf_free(&ids);
	}
	free(text);
	return ok && text;
}

int main(int argc, char **argv)
{
	bool speed = argc == 3 && strcmp(argv[1], "--speed") == 0;
	if (argc != 2 && !speed) {
		fprintf(stderr, "usage: %s [--speed] FILE.gguf\n", argv[0]);
		return 2;
	}
	const char *path = argv[argc - 1];
	struct gguf *g = NULL;
	struct tokenizer *t = NULL;
	struct error err;
	bool ok = false;
	if (gguf_open(path, &g, &err) || tokenizer_create(g, &t, &err))
		fprintf(stderr, "%s: %s\n", path, err.message);
	else
		ok = speed ? measure(t) : filter(t);
	tokenizer_destroy(t);
	gguf_close(g);
	return ok ? 0 : 1;
}
