#include "server/head.h"

#include <string.h>
#include <strings.h>

enum {
	SEEN_HOST = 1,
	SEEN_LENGTH = 2,
	SEEN_CODING = 4,
	SEEN_EXPECT = 8,
	SEEN_UPGRADE = 16,
	SEEN_WS_KEY = 32,
	SEEN_WS_VERSION = 64,
};

static bool is_digit(unsigned char c)
{
	return c >= '0' && c <= '9';
}

static bool is_alpha(unsigned char c)
{
	return (c | 0x20) >= 'a' && (c | 0x20) <= 'z';
}

/* tchar of RFC 9110, 5.6.2. */
static bool is_token_char(unsigned char c)
{
	return is_digit(c) || is_alpha(c) || (c && strchr("!#$%&'*+-.^_`|~", c));
}

/* What may stand in a field value or a chunk extension: everything but controls. */
static bool is_text_char(unsigned char c)
{
	return c == '\t' || (c >= 0x20 && c != 0x7f);
}

static int hex_value(unsigned char c)
{
	if (is_digit(c))
		return c - '0';
	c |= 0x20;
	return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static bool str_is_nocase(struct str s, const char *z)
{
	return s.n == strlen(z) && strncasecmp(s.p, z, s.n) == 0;
}

static struct str trim(struct str s)
{
	while (s.n && (s.p[0] == ' ' || s.p[0] == '\t')) {
		s.p++;
		s.n--;
	}
	while (s.n && (s.p[s.n - 1] == ' ' || s.p[s.n - 1] == '\t'))
		s.n--;
	return s;
}

static bool bad(struct head *h, int status, const char *code, const char *message)
{
	h->error = (struct head_error){status, code, message};
	return false;
}

static bool bad_request(struct head *h, const char *message)
{
	return bad(h, 400, "bad_request", message);
}

/* Counts n records of the request; false when they are too many. */
static bool count_fields(struct head *h, size_t n)
{
	if (n > HEAD_MAX_FIELDS - h->n_fields)
		return bad(h, 431, "too_many_fields", "The request has too many headers, query arguments or cookies.");
	h->n_fields += (uint32_t)n;
	return true;
}

static size_t count_bytes(struct str s, char c)
{
	size_t n = 0;
	for (size_t i = 0; i < s.n; i++)
		n += s.p[i] == c;
	return n;
}

void head_init(struct head *h)
{
	memset(h, 0, sizeof *h);
}

/* The next element of a comma-separated list; false at the end. */
static bool list_next(struct str *rest, struct str *item)
{
	while (rest->n) {
		const char *comma = memchr(rest->p, ',', rest->n);
		size_t n = comma ? (size_t)(comma - rest->p) : rest->n;
		*item = trim((struct str){rest->p, n});
		size_t skip = n + (comma ? 1 : 0);
		rest->p += skip;
		rest->n -= skip;
		if (item->n)
			return true;
	}
	return false;
}

static bool parse_method(struct head *h, struct str s)
{
	static const struct {
		const char *name;
		enum http_method method;
	} methods[] = {
		{"GET", HTTP_GET},     {"POST", HTTP_POST},	  {"DELETE", HTTP_DELETE}, {"PUT", HTTP_PUT},
		{"PATCH", HTTP_PATCH}, {"OPTIONS", HTTP_OPTIONS}, {"HEAD", HTTP_HEAD},
	};

	for (size_t i = 0; i < s.n; i++)
		if (!is_token_char((unsigned char)s.p[i]))
			return bad_request(h, "The request method holds a character that is not allowed.");
	for (size_t i = 0; i < sizeof methods / sizeof methods[0]; i++) {
		if (str_is(s, methods[i].name)) {
			h->method = methods[i].method;
			return true;
		}
	}
	return bad(h, 501, "method_not_implemented", "The request method is not implemented.");
}

static bool check_target(struct head *h, struct str t)
{
	for (size_t i = 0; i < t.n; i++) {
		unsigned char c = (unsigned char)t.p[i];
		if (c <= 0x20 || c >= 0x7f)
			return bad_request(h, "The request target holds a character that must be percent-encoded.");
		/* Handlers see paths as C strings: a NUL must not hide the rest of one. */
		if (c == '%' && t.n - i >= 3 && t.p[i + 1] == '0' && t.p[i + 2] == '0')
			return bad_request(h, "The request target holds an encoded NUL.");
	}
	if (!count_fields(h, count_bytes(t, '&')))
		return false;
	if (t.p[0] == '/')
		return true;
	if (str_is(t, "*") && h->method == HTTP_OPTIONS)
		return true;
	if ((t.n > 7 && strncasecmp(t.p, "http://", 7) == 0) || (t.n > 8 && strncasecmp(t.p, "https://", 8) == 0))
		return true;
	return bad_request(h, "The request target is not a path.");
}

static bool parse_request_line(struct head *h, struct str s)
{
	const char *sp = memchr(s.p, ' ', s.n);
	if (!sp || sp == s.p)
		return bad_request(h, "The request line is malformed.");
	if (!parse_method(h, (struct str){s.p, (size_t)(sp - s.p)})) {
		/* An HTTP/2 preface has a method of its own; say what is wrong with it. */
		if (str_is(s, "PRI * HTTP/2.0"))
			return bad(h, 505, "http_version_not_supported", "Only HTTP/1.1 and HTTP/1.0 are supported.");
		return false;
	}
	struct str rest = {sp + 1, s.n - (size_t)(sp + 1 - s.p)};
	sp = memchr(rest.p, ' ', rest.n);
	if (!sp || sp == rest.p)
		return bad_request(h, "The request line has no HTTP version.");
	struct str target = {rest.p, (size_t)(sp - rest.p)};
	struct str version = {sp + 1, rest.n - target.n - 1};
	if (version.n != 8 || !str_starts(version, "HTTP/") || !is_digit((unsigned char)version.p[5]) ||
	    version.p[6] != '.' || !is_digit((unsigned char)version.p[7]))
		return bad_request(h, "The request line is malformed.");
	if (version.p[5] != '1' || version.p[7] > '1')
		return bad(h, 505, "http_version_not_supported", "Only HTTP/1.1 and HTTP/1.0 are supported.");
	h->is_http11 = version.p[7] == '1';
	h->target_at = (size_t)(target.p - s.p); /* it is the first line */
	h->target_n = target.n;
	return check_target(h, target);
}

static bool parse_host(struct head *h, struct str v)
{
	for (size_t i = 0; i < v.n; i++) {
		unsigned char c = (unsigned char)v.p[i];
		if (!is_digit(c) && !is_alpha(c) && !(c && strchr("-._~:[]%!$&'()*+;=", c)))
			return bad_request(h, "The Host header is malformed.");
	}
	return true;
}

static bool parse_content_length(struct head *h, struct str v)
{
	uint64_t n = 0;
	if (v.n == 0)
		return bad_request(h, "The Content-Length header is empty.");
	for (size_t i = 0; i < v.n; i++) {
		unsigned char c = (unsigned char)v.p[i];
		if (!is_digit(c))
			return bad_request(h, "The Content-Length header is not a number.");
		if (n > (INT64_MAX - 9) / 10)
			return bad_request(h, "The Content-Length header is too large a number.");
		n = n * 10 + (c - '0');
	}
	h->content_length = n;
	return true;
}

static void parse_connection(struct head *h, struct str v)
{
	struct str item;
	while (list_next(&v, &item)) {
		h->conn_close |= str_is_nocase(item, "close");
		h->conn_keep_alive |= str_is_nocase(item, "keep-alive");
		h->conn_upgrade |= str_is_nocase(item, "upgrade");
	}
}

static void parse_ws_key(struct head *h, struct str v)
{
	if (v.n != HEAD_WS_KEY || v.p[22] != '=' || v.p[23] != '=')
		return;
	for (size_t i = 0; i < 22; i++) {
		unsigned char c = (unsigned char)v.p[i];
		if (!is_digit(c) && !is_alpha(c) && c != '+' && c != '/')
			return;
	}
	memcpy(h->ws_key, v.p, HEAD_WS_KEY);
	h->ws_key[HEAD_WS_KEY] = '\0';
}

/* Fields that decide about framing or routing may come once only. */
static const struct {
	const char *name;
	uint32_t bit;
	const char *twice;
} single_fields[] = {
	{"host", SEEN_HOST, "There is more than one Host header."},
	{"content-length", SEEN_LENGTH, "There is more than one Content-Length header."},
	{"transfer-encoding", SEEN_CODING, "There is more than one Transfer-Encoding header."},
	{"expect", SEEN_EXPECT, "There is more than one Expect header."},
	{"upgrade", SEEN_UPGRADE, NULL}, /* several offers: none is taken */
	{"sec-websocket-key", SEEN_WS_KEY, "There is more than one Sec-WebSocket-Key header."},
	{"sec-websocket-version", SEEN_WS_VERSION, "There is more than one Sec-WebSocket-Version header."},
};

static bool parse_field_value(struct head *h, uint32_t bit, struct str v)
{
	switch (bit) {
	case SEEN_HOST:
		return parse_host(h, v);
	case SEEN_LENGTH:
		return parse_content_length(h, v);
	case SEEN_CODING:
		if (!str_is_nocase(v, "chunked"))
			return bad(h, 501, "transfer_encoding_not_implemented",
				   "The only Transfer-Encoding that is supported is chunked.");
		return true;
	case SEEN_EXPECT:
		h->expects_continue = str_is_nocase(v, "100-continue");
		if (!h->expects_continue)
			return bad(h, 417, "expectation_failed",
				   "The only expectation that is supported is 100-continue.");
		return true;
	case SEEN_UPGRADE:
		h->wants_websocket = str_is_nocase(v, "websocket");
		return true;
	case SEEN_WS_KEY:
		parse_ws_key(h, v);
		return true;
	default:
		h->ws_version_ok = str_is(v, "13");
		return true;
	}
}

static bool parse_field(struct head *h, struct str s)
{
	if (s.p[0] == ' ' || s.p[0] == '\t')
		return bad_request(h, "A header line begins with white space.");
	size_t n = 0;
	while (n < s.n && is_token_char((unsigned char)s.p[n]))
		n++;
	if (n == 0)
		return bad_request(h, "A header has no name.");
	if (n == s.n || s.p[n] != ':')
		return bad_request(h, "A header name is not followed by a colon.");

	struct str name = {s.p, n}, value = trim((struct str){s.p + n + 1, s.n - n - 1});
	if (!count_fields(h, 1 + (str_is_nocase(name, "cookie") ? count_bytes(value, ';') : 0)))
		return false;
	if (str_is_nocase(name, "connection")) {
		parse_connection(h, value);
		return true;
	}
	for (size_t i = 0; i < sizeof single_fields / sizeof single_fields[0]; i++) {
		if (!str_is_nocase(name, single_fields[i].name))
			continue;
		uint32_t bit = single_fields[i].bit;
		if (h->seen & bit) {
			if (single_fields[i].twice)
				return bad_request(h, single_fields[i].twice);
			h->wants_websocket = false;
			return true;
		}
		h->seen |= bit;
		return parse_field_value(h, bit, value);
	}
	return true;
}

/* The empty line is there: what the fields mean together. */
static bool finish(struct head *h)
{
	if (h->is_http11 && !(h->seen & SEEN_HOST))
		return bad_request(h, "The Host header is missing.");
	if (h->seen & SEEN_CODING) {
		if (!h->is_http11)
			return bad_request(h, "Transfer-Encoding is not allowed in HTTP/1.0.");
		if (h->seen & SEEN_LENGTH)
			return bad_request(h, "There are both a Content-Length and a Transfer-Encoding header.");
		h->framing = HEAD_CHUNKED;
	} else if ((h->seen & SEEN_LENGTH) && h->content_length > 0) {
		h->framing = HEAD_SIZED;
	}
	h->keep_alive = h->is_http11 ? !h->conn_close : h->conn_keep_alive && !h->conn_close;
	h->expects_continue = h->expects_continue && h->is_http11 && h->framing != HEAD_NO_BODY;
	h->wants_websocket = h->wants_websocket && h->conn_upgrade && h->is_http11 && h->method == HTTP_GET &&
			     h->framing == HEAD_NO_BODY;
	return true;
}

static enum head_result fail(const struct head *h, struct head_error *err)
{
	*err = h->error;
	return HEAD_BAD;
}

enum head_result head_feed(struct head *h, const char *p, size_t n, size_t max, struct head_error *err)
{
	for (; h->at < n; h->at++) {
		unsigned char c = (unsigned char)p[h->at];
		if (h->at >= max) {
			bad(h, 431, "headers_too_large", "The request head is too large.");
			return fail(h, err);
		}
		bool after_cr = h->at > h->line && p[h->at - 1] == '\r';
		if (after_cr != (c == '\n')) {
			bad_request(h, after_cr ? "The request head holds a carriage return that ends no line."
						: "A line of the request head ends in a bare line feed.");
			return fail(h, err);
		}
		if (!after_cr) {
			if (c != '\r' && !is_text_char(c)) {
				bad_request(h, "The request head holds a control character.");
				return fail(h, err);
			}
			continue;
		}
		struct str line = {p + h->line, h->at - 1 - h->line};
		bool first = h->line == 0;
		h->line = h->at + 1;
		if (line.n == 0 && !first) {
			if (!finish(h))
				return fail(h, err);
			h->length = ++h->at;
			return HEAD_DONE;
		}
		if (!(first ? line.n ? parse_request_line(h, line) : bad_request(h, "The request line is empty.")
			    : parse_field(h, line)))
			return fail(h, err);
	}
	return HEAD_MORE;
}

enum body_state {
	BODY_SIZE,	/* digits of a chunk size */
	BODY_EXTENSION, /* after ';' */
	BODY_SIZE_LF,
	BODY_DATA,
	BODY_DATA_CR,
	BODY_DATA_LF,
	BODY_LINE,    /* at the start of a trailer line, or of the empty line that ends it all */
	BODY_TRAILER, /* inside a trailer line */
	BODY_TRAILER_LF,
	BODY_END_LF,
};

static enum head_result too_large(struct head_error *err)
{
	*err = (struct head_error){413, "request_too_large", "The request body is larger than this server accepts."};
	return HEAD_BAD;
}

enum head_result body_init(struct body *b, const struct head *h, uint64_t max, struct head_error *err)
{
	memset(b, 0, sizeof *b);
	b->framing = h->framing;
	b->max = max;
	if (h->framing == HEAD_NO_BODY)
		return HEAD_DONE;
	if (h->framing == HEAD_SIZED) {
		if (h->content_length > max)
			return too_large(err);
		b->left = b->total = h->content_length;
	}
	return HEAD_MORE;
}

static enum head_result bad_chunk(struct head_error *err, const char *message)
{
	*err = (struct head_error){400, "bad_chunk", message};
	return HEAD_BAD;
}

static enum head_result chunk_size_digit(struct body *b, unsigned char c, struct head_error *err)
{
	int v = hex_value(c);
	if (v >= 0) {
		/* 15 digits are 60 bits: enough for any size that is allowed, and no overflow. */
		if (++b->digits > 15)
			return too_large(err);
		b->left = b->left * 16 + (uint64_t)v;
		if (b->left > b->max - b->total)
			return too_large(err);
		return HEAD_MORE;
	}
	if (b->digits == 0 || (c != ';' && c != '\r'))
		return bad_chunk(err, "A chunk size is malformed.");
	b->state = c == ';' ? BODY_EXTENSION : BODY_SIZE_LF;
	return HEAD_MORE;
}

/* One byte of chunked framing, outside of chunk data. HEAD_DONE after the last. */
static enum head_result framing_byte(struct body *b, unsigned char c, struct head_error *err)
{
	switch ((enum body_state)b->state) {
	case BODY_SIZE:
		return chunk_size_digit(b, c, err);
	case BODY_EXTENSION:
	case BODY_TRAILER:
		if (++b->overhead > BODY_MAX_OVERHEAD)
			return bad_chunk(err, "Chunk extensions and trailers are too long.");
		if (c == '\r') {
			/* Else some would say that the string goes on behind the line, and others that it ends. */
			if (b->quoted)
				return bad_chunk(err, "A string in a chunk extension does not end.");
			if (b->state == BODY_TRAILER && !b->trailer_colon)
				return bad_chunk(err, "A trailer line is malformed.");
			b->state = b->state == BODY_TRAILER ? BODY_TRAILER_LF : BODY_SIZE_LF;
			return HEAD_MORE;
		}
		if (b->state == BODY_TRAILER && !b->trailer_colon) {
			b->trailer_colon = c == ':';
			if (!b->trailer_colon && !is_token_char(c))
				return bad_chunk(err, "A trailer line is malformed.");
		}
		if (b->state == BODY_EXTENSION) {
			b->quoted ^= c == '"' && !b->escaped;
			b->escaped = b->quoted && !b->escaped && c == '\\';
		}
		return is_text_char(c) ? HEAD_MORE : bad_chunk(err, "Chunk framing holds a control character.");
	case BODY_DATA_CR:
		b->state = BODY_DATA_LF;
		return c == '\r' ? HEAD_MORE : bad_chunk(err, "A chunk is longer than its size.");
	case BODY_LINE:
		b->trailer_colon = false;
		b->state = c == '\r' ? BODY_END_LF : BODY_TRAILER;
		return c == '\r' || is_token_char(c) ? HEAD_MORE : bad_chunk(err, "A trailer line is malformed.");
	case BODY_SIZE_LF:
	case BODY_DATA_LF:
	case BODY_TRAILER_LF:
	case BODY_END_LF:
		if (c != '\n')
			return bad_chunk(err, "A line of chunk framing does not end in CRLF.");
		if (b->state == BODY_END_LF)
			return HEAD_DONE;
		if (b->state == BODY_SIZE_LF) {
			b->total += b->left;
			b->state = b->left ? BODY_DATA : BODY_LINE;
		} else {
			b->state = b->state == BODY_DATA_LF ? BODY_SIZE : BODY_LINE;
		}
		b->digits = 0;
		return HEAD_MORE;
	case BODY_DATA:
		break;
	}
	return HEAD_MORE;
}

enum head_result body_feed(struct body *b, const char *p, size_t n, size_t *used, struct head_error *err)
{
	size_t i = 0;
	enum head_result r = b->framing == HEAD_NO_BODY ? HEAD_DONE : HEAD_MORE;

	while (i < n && r == HEAD_MORE) {
		if (b->framing == HEAD_SIZED || b->state == BODY_DATA) {
			size_t take = b->left < n - i ? (size_t)b->left : n - i;
			b->left -= take;
			i += take;
			if (b->left == 0) {
				if (b->framing == HEAD_SIZED)
					r = HEAD_DONE;
				b->state = BODY_DATA_CR;
			}
			continue;
		}
		r = framing_byte(b, (unsigned char)p[i], err);
		i++;
	}
	*used = i;
	return r;
}
