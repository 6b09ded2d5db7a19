/* UTF-8 as RFC 3629 defines it: no overlong forms, no surrogates, nothing above U+10FFFF. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Decodes the code point at s[0..n): its length in bytes (1-4) and value, or 0 when it is not valid or not whole. */
size_t utf8_decode(const char *s, size_t n, uint32_t *cp);

/* Encodes cp into out[4]: its length, or 0 for a surrogate or a value above U+10FFFF. */
size_t utf8_encode(uint32_t cp, char out[4]);

/* True when all of s is valid. */
bool utf8_valid(const char *s, size_t n);

/*
 * How many bytes at the end of s begin a code point that is not whole yet but could become valid (0-3): what a stream
 * must hold back.
 */
size_t utf8_incomplete_tail(const char *s, size_t n);
