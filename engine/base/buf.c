#include "engine/base/buf.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/utf8.h"

bool buf_reserve(struct buf *b, size_t extra)
{
	if (b->failed)
		return false;
	if (b->data && extra < b->cap - b->len)
		return true;
	if (extra > SIZE_MAX / 2 - b->len - 1) {
		b->failed = true;
		return false;
	}
	size_t need = b->len + extra + 1;
	size_t cap = b->cap ? b->cap : 64;
	while (cap < need)
		cap = cap > SIZE_MAX / 4 ? need : cap * 2;
	char *data = realloc(b->data, cap);
	if (!data) {
		b->failed = true;
		return false;
	}
	if (!b->data)
		data[0] = '\0';
	b->data = data;
	b->cap = cap;
	return true;
}

void buf_append(struct buf *b, const void *data, size_t n)
{
	if (n == 0 || !buf_reserve(b, n))
		return;
	memcpy(b->data + b->len, data, n);
	b->len += n;
	b->data[b->len] = '\0';
}

void buf_puts(struct buf *b, const char *z)
{
	buf_append(b, z, strlen(z));
}

void buf_putc(struct buf *b, char c)
{
	buf_append(b, &c, 1);
}

void buf_vprintf(struct buf *b, const char *fmt, va_list args)
{
	va_list again;
	va_copy(again, args);
	int n = vsnprintf(NULL, 0, fmt, args);
	if (n > 0 && buf_reserve(b, (size_t)n)) {
		vsnprintf(b->data + b->len, (size_t)n + 1, fmt, again);
		b->len += (size_t)n;
	}
	va_end(again);
}

void buf_printf(struct buf *b, const char *fmt, ...)
{
	va_list args;
	va_start(args, fmt);
	buf_vprintf(b, fmt, args);
	va_end(args);
}

void buf_json_string(struct buf *b, const char *s, size_t n)
{
	static const char hex[] = "0123456789abcdef";
	buf_putc(b, '"');
	for (size_t i = 0; i < n;) {
		unsigned char c = (unsigned char)s[i];
		if (c >= 0x80) {
			uint32_t cp;
			size_t len = utf8_decode(s + i, n - i, &cp);
			if (len == 0) {
				buf_puts(b, "\xEF\xBF\xBD");
				i++;
			} else if (cp < 0xa0 || cp == 0x2028 || cp == 0x2029) {
				buf_printf(b, "\\u%04x", (unsigned)cp);
				i += len;
			} else {
				buf_append(b, s + i, len);
				i += len;
			}
			continue;
		}
		i++;
		switch (c) {
		case '"':
			buf_puts(b, "\\\"");
			break;
		case '\\':
			buf_puts(b, "\\\\");
			break;
		case '\n':
			buf_puts(b, "\\n");
			break;
		case '\r':
			buf_puts(b, "\\r");
			break;
		case '\t':
			buf_puts(b, "\\t");
			break;
		case '\b':
			buf_puts(b, "\\b");
			break;
		case '\f':
			buf_puts(b, "\\f");
			break;
		default:
			if (c < 0x20 || c == 0x7f) {
				char esc[6] = {'\\', 'u', '0', '0', hex[c >> 4], hex[c & 15]};
				buf_append(b, esc, sizeof esc);
			} else {
				buf_putc(b, (char)c);
			}
		}
	}
	buf_putc(b, '"');
}

void buf_append_buf(struct buf *b, const struct buf *other)
{
	buf_append(b, other->data, other->len);
	b->failed = b->failed || other->failed;
}

void buf_json_buf(struct buf *b, const struct buf *other)
{
	buf_json_string(b, other->data, other->len);
	b->failed = b->failed || other->failed;
}

void buf_json_number(struct buf *b, double x)
{
	if (!isfinite(x)) {
		buf_puts(b, "null");
		return;
	}
	char text[40];
	for (int digits = 6; digits <= 17; digits++) {
		snprintf(text, sizeof text, "%.*g", digits, x);
		if (strtod(text, NULL) == x)
			break;
	}
	buf_puts(b, text);
}

void buf_clear(struct buf *b)
{
	b->len = 0;
	b->failed = false;
	if (b->data)
		b->data[0] = '\0';
}

void buf_free(struct buf *b)
{
	free(b->data);
	*b = BUF_INIT;
}

char *buf_take(struct buf *b, size_t *len)
{
	if (b->failed) {
		buf_free(b);
		return NULL;
	}
	char *data = b->data;
	if (len)
		*len = b->len;
	*b = BUF_INIT;
	return data;
}
