/*
 * Failures as clients see them: one table from what went wrong to the HTTP status, `type` and `code` of the error body
 *
 *     {"error":{"message":"...","type":"...","param":null,"code":"..."}}
 *
 * which always has these four keys, on every path.
 */
#pragma once

#include "engine/base/buf.h"
#include "engine/base/status.h"

/* One row per failure: name, HTTP status, type, code, Retry-After in seconds (0: none). */
#define FAILURE_MAP(X)                                                                                                 \
	X(INVALID, 400, "invalid_request_error", "invalid_value", 0)                                                   \
	X(CONTEXT_LENGTH, 400, "invalid_request_error", "context_length_exceeded", 0)                                  \
	X(UNSUPPORTED, 400, "invalid_request_error", "unsupported_value", 0)                                           \
	X(BAD_KEY, 401, "invalid_request_error", "invalid_api_key", 0)                                                 \
	X(ORIGIN, 403, "invalid_request_error", "origin_not_allowed", 0)                                               \
	X(NO_ROUTE, 404, "invalid_request_error", "unknown_url", 0)                                                    \
	X(METHOD, 405, "invalid_request_error", "method_not_allowed", 0)                                               \
	X(NO_MODEL, 404, "invalid_request_error", "model_not_found", 0)                                                \
	X(NO_SESSION, 404, "invalid_request_error", "session_not_found", 0)                                            \
	X(SESSION_ENDED, 404, "invalid_request_error", "session_expired", 0)                                           \
	X(NO_RESPONSE, 404, "invalid_request_error", "response_not_found", 0)                                          \
	X(NO_PREVIOUS, 400, "invalid_request_error", "previous_response_not_found", 0)                                 \
	X(STREAM_ID, 400, "invalid_request_error", "invalid_stream_id", 0)                                             \
	X(STREAM_LIMIT, 400, "invalid_request_error", "websocket_stream_limit_reached", 0)                             \
	X(ENCODING, 415, "invalid_request_error", "unsupported_content_encoding", 0)                                   \
	X(EXISTS, 409, "invalid_request_error", "already_exists", 0)                                                   \
	X(LIMIT, 429, "rate_limit_error", "rate_limit_exceeded", 1)                                                    \
	X(INTERNAL, 500, "server_error", "internal_error", 0)                                                          \
	X(NOMEM, 503, "server_error", "out_of_memory", 1)                                                              \
	X(LOADING, 503, "server_error", "model_loading", 2)                                                            \
	X(LOAD_FAILED, 503, "server_error", "model_load_failed", 0)                                                    \
	X(DRAINING, 503, "server_error", "server_draining", 1)                                                         \
	X(CANCELLED, 503, "server_error", "cancelled", 1)                                                              \
	X(TIMEOUT, 504, "server_error", "request_timeout", 0)

enum failure_kind {
#define X(name, http, type, code, retry) FAILURE_##name,
	FAILURE_MAP(X)
#undef X
};

struct failure {
	enum failure_kind kind;
	char param[64]; /* "": null */
	char message[512];
};

void failure_set(struct failure *f, enum failure_kind kind, const char *param, const char *fmt, ...)
	__attribute__((format(printf, 4, 5)));
/* The failure of an error from below. The only things the engine does not find are sessions. */
void failure_from(struct failure *f, const struct error *err);

int failure_http(const struct failure *f);
const char *failure_code(const struct failure *f);
int failure_retry_after(const struct failure *f);

/* Appends {"message":...,"type":...,"param":...,"code":...}. */
void failure_write(struct buf *out, const struct failure *f);
/* Appends the whole body, {"error":{...}}. */
void failure_write_body(struct buf *out, const struct failure *f);
/* The same for a refusal that is in no table: type follows from the status. code may be NULL. */
void failure_write_plain(struct buf *out, int http, const char *code, const char *message);
