#include "server/failure.h"

#include <stdio.h>

static const struct row {
	int http;
	const char *type, *code;
	int retry_after;
} rows[] = {
#define X(name, http, type, code, retry) [FAILURE_##name] = {http, type, code, retry},
	FAILURE_MAP(X)
#undef X
};

/* What a status from below means to a client. */
static const enum failure_kind of_status[] = {
	[STATUS_OK] = FAILURE_INTERNAL,		 [STATUS_NOMEM] = FAILURE_NOMEM,
	[STATUS_INVALID] = FAILURE_INVALID,	 [STATUS_CONTEXT_LENGTH] = FAILURE_CONTEXT_LENGTH,
	[STATUS_CORRUPT] = FAILURE_INTERNAL,	 [STATUS_UNSUPPORTED] = FAILURE_UNSUPPORTED,
	[STATUS_NOT_FOUND] = FAILURE_NO_SESSION, [STATUS_EXISTS] = FAILURE_EXISTS,
	[STATUS_IO] = FAILURE_INTERNAL,		 [STATUS_LIMIT] = FAILURE_LIMIT,
	[STATUS_BUSY] = FAILURE_LOADING,	 [STATUS_CANCELLED] = FAILURE_CANCELLED,
	[STATUS_TIMEOUT] = FAILURE_TIMEOUT,
	[STATUS_DEVICE] = FAILURE_INTERNAL,	 [STATUS_INTERNAL] = FAILURE_INTERNAL,
};

void failure_set(struct failure *f, enum failure_kind kind, const char *param, const char *fmt, ...)
{
	va_list args;
	f->kind = kind;
	snprintf(f->param, sizeof f->param, "%s", param ? param : "");
	va_start(args, fmt);
	vsnprintf(f->message, sizeof f->message, fmt, args);
	va_end(args);
}

void failure_from(struct failure *f, const struct error *err)
{
	failure_set(f, of_status[err->status], err->param, "%s",
		    err->message[0] ? err->message : status_text(err->status));
}

int failure_http(const struct failure *f)
{
	return rows[f->kind].http;
}

const char *failure_code(const struct failure *f)
{
	return rows[f->kind].code;
}

int failure_retry_after(const struct failure *f)
{
	return rows[f->kind].retry_after;
}

static void string_or_null(struct buf *out, const char *s)
{
	if (s && s[0])
		buf_json_string(out, s, strlen(s));
	else
		buf_puts(out, "null");
}

static void write_fields(struct buf *out, const char *message, const char *type, const char *param, const char *code)
{
	buf_puts(out, "{\"message\":");
	buf_json_string(out, message, strlen(message));
	buf_printf(out, ",\"type\":\"%s\",\"param\":", type);
	string_or_null(out, param);
	buf_puts(out, ",\"code\":");
	string_or_null(out, code);
	buf_putc(out, '}');
}

void failure_write(struct buf *out, const struct failure *f)
{
	write_fields(out, f->message, rows[f->kind].type, f->param, rows[f->kind].code);
}

void failure_write_body(struct buf *out, const struct failure *f)
{
	buf_puts(out, "{\"error\":");
	failure_write(out, f);
	buf_putc(out, '}');
}

void failure_write_plain(struct buf *out, int http, const char *code, const char *message)
{
	const char *type = http >= 500 ? "server_error" : http == 429 ? "rate_limit_error" : "invalid_request_error";
	buf_puts(out, "{\"error\":");
	write_fields(out, message, type, NULL, code);
	buf_putc(out, '}');
}
