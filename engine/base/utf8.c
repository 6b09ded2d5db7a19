#include "engine/base/utf8.h"

/* The length that a lead byte announces, and the bounds of the byte after it (RFC 3629 section 4); 0: not a lead. */
static size_t lead(unsigned char c, unsigned char *lo, unsigned char *hi)
{
	*lo = 0x80;
	*hi = 0xBF;
	if (c < 0x80)
		return 1;
	if (c >= 0xC2 && c <= 0xDF)
		return 2;
	if (c >= 0xE0 && c <= 0xEF) {
		if (c == 0xE0)
			*lo = 0xA0;
		if (c == 0xED)
			*hi = 0x9F;
		return 3;
	}
	if (c >= 0xF0 && c <= 0xF4) {
		if (c == 0xF0)
			*lo = 0x90;
		if (c == 0xF4)
			*hi = 0x8F;
		return 4;
	}
	return 0;
}

/* How many of the first bytes of s form a valid start of the code point there; *want is its announced length. */
static size_t match(const char *s, size_t n, size_t *want)
{
	unsigned char lo, hi;
	*want = n ? lead((unsigned char)s[0], &lo, &hi) : 0;
	if (*want == 0)
		return 0;
	size_t got = 1;
	while (got < *want && got < n) {
		unsigned char c = (unsigned char)s[got];
		if (c < lo || c > hi)
			break;
		lo = 0x80;
		hi = 0xBF;
		got++;
	}
	return got;
}

size_t utf8_decode(const char *s, size_t n, uint32_t *cp)
{
	size_t want;
	if (match(s, n, &want) != want || want == 0)
		return 0;
	uint32_t v = (unsigned char)s[0];
	if (want > 1)
		v &= 0x7Fu >> want;
	for (size_t i = 1; i < want; i++)
		v = v << 6 | ((unsigned char)s[i] & 0x3F);
	*cp = v;
	return want;
}

size_t utf8_encode(uint32_t cp, char out[4])
{
	if (cp < 0x80) {
		out[0] = (char)cp;
		return 1;
	}
	if (cp < 0x800) {
		out[0] = (char)(0xC0 | cp >> 6);
		out[1] = (char)(0x80 | (cp & 0x3F));
		return 2;
	}
	if (cp < 0x10000) {
		if (cp >= 0xD800 && cp <= 0xDFFF)
			return 0;
		out[0] = (char)(0xE0 | cp >> 12);
		out[1] = (char)(0x80 | (cp >> 6 & 0x3F));
		out[2] = (char)(0x80 | (cp & 0x3F));
		return 3;
	}
	if (cp > 0x10FFFF)
		return 0;
	out[0] = (char)(0xF0 | cp >> 18);
	out[1] = (char)(0x80 | (cp >> 12 & 0x3F));
	out[2] = (char)(0x80 | (cp >> 6 & 0x3F));
	out[3] = (char)(0x80 | (cp & 0x3F));
	return 4;
}

bool utf8_valid(const char *s, size_t n)
{
	for (size_t i = 0; i < n;) {
		uint32_t cp;
		size_t len = utf8_decode(s + i, n - i, &cp);
		if (len == 0)
			return false;
		i += len;
	}
	return true;
}

size_t utf8_incomplete_tail(const char *s, size_t n)
{
	for (size_t back = 1; back <= 3 && back <= n; back++) {
		if (((unsigned char)s[n - back] & 0xC0) == 0x80)
			continue;
		size_t want;
		size_t got = match(s + n - back, back, &want);
		return got == back && want > back ? back : 0;
	}
	return 0;
}
