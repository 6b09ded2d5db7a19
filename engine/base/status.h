/*
 * Status codes and error details shared by every layer.
 *
 * A function that can fail returns an enum status and hands results out through pointers. Where a person will read the
 * failure, it also takes a `struct error *` (may be NULL) and fills it with one sentence that names what was wrong.
 */
#pragma once

#include <stdarg.h>
#include <stdbool.h>

/* One row per status: name, text. The server maps each to an HTTP status in one table of its own. */
#define STATUS_MAP(X)                                                                                                  \
	X(OK, "ok")                                                                                                    \
	X(NOMEM, "out of memory")                                                                                      \
	X(INVALID, "invalid argument")                                                                                 \
	X(CONTEXT_LENGTH, "context length exceeded")                                                                   \
	X(CORRUPT, "damaged data")                                                                                     \
	X(UNSUPPORTED, "not supported")                                                                                \
	X(NOT_FOUND, "not found")                                                                                      \
	X(EXISTS, "already exists")                                                                                    \
	X(IO, "input/output error")                                                                                    \
	X(LIMIT, "limit reached")                                                                                      \
	X(BUSY, "busy")                                                                                                \
	X(CANCELLED, "cancelled")                                                                                      \
	X(TIMEOUT, "took too long")                                                                                    \
	X(DEVICE, "device error")                                                                                      \
	X(INTERNAL, "internal error")

enum status {
#define X(name, text) STATUS_##name,
	STATUS_MAP(X)
#undef X
};

/*
 * What went wrong, for a person: one line without a trailing newline. `param` names the offending parameter or is "".
 */
struct error {
	enum status status;
	char param[64];
	char message[512];
};

/* The fixed English text of a status; never NULL. */
const char *status_text(enum status status);

/*
 * Fills *err (if not NULL) and returns `status`, so that a caller can write `return error_set(err, STATUS_INVALID,
 * ...)`.
 */
enum status error_set(struct error *err, enum status status, const char *fmt, ...)
        __attribute__((format(printf, 3, 4)));

/* As error_set, naming the parameter at fault. */
enum status error_set_param(struct error *err, enum status status, const char *param, const char *fmt, ...)
        __attribute__((format(printf, 4, 5)));
