/* What the tokenizers need of Unicode: character classes and Normalization Form C. Data from utf8proc. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/buf.h"

/* Every code point has exactly one of these, so that a set of classes is a mask. */
enum unicode_class {
	UNICODE_LETTER = 1, /* \p{L} */
	UNICODE_NUMBER = 2, /* \p{N} */
	UNICODE_SPACE = 4, /* \s: the property White_Space */
	UNICODE_PUNCT = 8, /* \p{P} */
	UNICODE_REST = 16, /* marks, symbols, controls, unassigned; a byte that is not UTF-8 */
};

/* A code point of a text, or one byte of it that is not UTF-8. */
struct rune {
	uint32_t cp; /* the byte itself when it is not UTF-8 */
	enum unicode_class class; /* 0 at the end of the text */
	size_t n; /* length in bytes; 0 at the end of the text */
};

/* The class of a code point; values above U+10FFFF are UNICODE_REST. */
enum unicode_class unicode_class(uint32_t cp);

/* The rune that begins at s[i]; i may be n or beyond. */
struct rune rune_at(const char *s, size_t n, size_t i);

/*
 * Appends s in Normalization Form C (UAX #15) to *out. Bytes that are not UTF-8 are copied as they are. Linear in n
 * whatever the order of combining marks. False when there is no memory.
 */
bool unicode_nfc(const char *s, size_t n, struct buf *out);

/* True when unicode_nfc() would certainly change nothing; cheap, and false for some texts in NFC. */
bool unicode_is_plain(const char *s, size_t n);
