/* Texts of a megabyte that find what is not linear in a tokenizer, and the time each may take. */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Sanitizers and debug builds are slower, but not by the square of a million. */
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define ADVERSARIAL_SLOW_BUILD 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__OPTIMIZE__)
#define ADVERSARIAL_SLOW_BUILD 1
#endif
#ifdef ADVERSARIAL_SLOW_BUILD
enum { ADVERSARIAL_SECONDS = 20 };
#else
enum { ADVERSARIAL_SECONDS = 1 };
#endif

enum { ADVERSARIAL_BYTES = 1 << 20 };

static const struct adversarial {
	const char *name;
	const char *unit; /* repeated; NULL: random, from `alphabet` */
	const char *alphabet; /* "": all bytes */
} adversarial_texts[] = {
	{"one letter", "a", NULL},
	{"two letters", "ab", NULL},
	{"spaces", " ", NULL},
	{"line ends", "\n", NULL},
	{"spaces and line ends", " \n", NULL},
	{"one word", "hello", NULL},
	{"words", " hello", NULL},
	{"one digit", "7", NULL},
	{"NUL-free controls", "\x01", NULL},
	{"emoji", "\xF0\x9F\x98\x80", NULL},
	{"combining marks out of order", "\xCC\x81\xCC\x96", NULL},
	{"almost a control token", "<|im_start|", NULL},
	{"contractions", "' 1a\t's", NULL},
	{"invalid bytes", "\xFF", NULL},
	{"cut code points", "\xE2\x82", NULL},
	{"random letters in one word", NULL, "abcdefghijklmnopqrstuvwxyz"},
	{"random words", NULL, "  etaoinshrdlu"},
	{"random code", NULL, " \n\t(){};=+_0123456789abcdefxyz'\""},
	{"random bytes", NULL, ""},
};

enum { N_ADVERSARIAL = sizeof adversarial_texts / sizeof *adversarial_texts };

static inline void adversarial_fill(const struct adversarial *a, char s[ADVERSARIAL_BYTES])
{
	uint64_t state = 88172645463325252ull; /* xorshift64 */
	size_t n = strlen(a->unit ? a->unit : a->alphabet);
	for (size_t i = 0; i < ADVERSARIAL_BYTES; i++) {
		state ^= state << 13;
		state ^= state >> 7;
		state ^= state << 17;
		if (a->unit)
			s[i] = a->unit[i % n];
		else
			s[i] = n ? a->alphabet[(state >> 32) % n] : (char)(state >> 32);
	}
}
