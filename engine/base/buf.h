/*
 * A growable byte buffer. An allocation failure is sticky: the buffer keeps its content, ignores further appends and
 * reports it through `failed`, so that a writer checks once, at the end.
 */
#pragma once

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>

#include "engine/base/str.h"

struct buf {
	char *data;  /* [cap], data[len] == '\0' whenever data != NULL */
	size_t len;
	size_t cap;
	bool failed;
};

#define BUF_INIT ((struct buf){NULL, 0, 0, false})

/* Makes room for `extra` more bytes; false (and failed) when there is no memory. */
bool buf_reserve(struct buf *b, size_t extra);
void buf_append(struct buf *b, const void *data, size_t n);
void buf_puts(struct buf *b, const char *z);
void buf_putc(struct buf *b, char c);
void buf_printf(struct buf *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void buf_vprintf(struct buf *b, const char *fmt, va_list args);

/*
 * Appends `s` as a JSON string with its quotes (RFC 8259): the two-character escapes, \uXXXX for other control
 * characters (DEL, U+0080 to U+009F and the separators U+2028 and U+2029, which some readers take for line ends, among
 * them); every other byte unchanged. Bytes that are not UTF-8 become U+FFFD.
 */
void buf_json_string(struct buf *b, const char *s, size_t n);

/* Append another buffer, as it is or as a JSON string; one that has failed makes this one fail. */
void buf_append_buf(struct buf *b, const struct buf *other);
void buf_json_buf(struct buf *b, const struct buf *other);

/* Appends a number that reads back as the same double; NaN and infinities become null. */
void buf_json_number(struct buf *b, double x);

/* Empties the buffer, keeping its memory and clearing `failed`. */
void buf_clear(struct buf *b);
/* Frees the memory; the buffer is then empty and usable. */
void buf_free(struct buf *b);
/* Hands the memory to the caller (free() it); NULL when empty or failed. The buffer is then empty. */
char *buf_take(struct buf *b, size_t *len);

static inline struct str buf_str(const struct buf *b)
{
	return (struct str){b->data ? b->data : "", b->len};
}
