/* What Python's str knows about characters: classes, spaces and full case mapping, from utf8proc's tables. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 * The character at p[0..n), n > 0: its length in bytes. A character ends before the next byte that begins one; bytes
 * that are not UTF-8 read as U+FFFD.
 */
size_t char_next(const char *p, size_t n, uint32_t *cp);
/* The offset at which the last character of p[0..n) begins, n > 0. */
size_t char_prev(const char *p, size_t n);

bool char_is_space(uint32_t cp);
bool char_is_line_end(uint32_t cp); /* as splitlines() sees it; \r\n counts as one */
bool char_is_alpha(uint32_t cp);
bool char_is_decimal(uint32_t cp);
bool char_is_digit(uint32_t cp);
bool char_is_numeric(uint32_t cp);
bool char_is_alnum(uint32_t cp);
bool char_is_upper(uint32_t cp);
bool char_is_lower(uint32_t cp);
bool char_is_title(uint32_t cp);
bool char_is_printable(uint32_t cp);

enum char_case { CASE_UPPER, CASE_LOWER, CASE_TITLE, CASE_FOLD };

/* Maps one character to up to three; returns how many. */
int char_map(uint32_t cp, enum char_case to, uint32_t out[3]);
