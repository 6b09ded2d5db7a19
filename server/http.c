/* The exchange: one request and its answer. See http.h. */
#include "server/http.h"

#include <inttypes.h>
#include <microhttpd.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>

#include "engine/base/clock.h"
#include "engine/base/hash.h"
#include "server/http_mhd.h"

enum { MAX_PARAMS = 8, MAX_REQUEST_ID = 63 };

/* ---- The request ---- */

/* The client's id may be logged and sent back, so only harmless ones are taken. */
static bool request_id_is_sane(struct str id)
{
	if (id.n == 0 || id.n > MAX_REQUEST_ID)
		return false;
	for (size_t i = 0; i < id.n; i++) {
		unsigned char c = (unsigned char)id.p[i];
		bool alnum = (c >= '0' && c <= '9') || ((c | 0x20) >= 'a' && (c | 0x20) <= 'z');
		if (!alnum && c != '-' && c != '_' && c != '.' && c != ':')
			return false;
	}
	return true;
}

static void make_request_id(struct http_exchange *x)
{
	struct str given = http_header(x, "x-request-id");
	if (request_id_is_sane(given)) {
		memcpy(x->request_id, given.p, given.n);
		x->request_id[given.n] = '\0';
		return;
	}
	/* Distinct, also from those of other processes; not secret. */
	static uint64_t seed, count;
	if (!seed && getrandom(&seed, sizeof seed, GRND_NONBLOCK) != (ssize_t)sizeof seed)
		seed = (uint64_t)(uintptr_t)x ^ (uint64_t)clock_now_ns(clock_system());
	count++;
	snprintf(x->request_id, sizeof x->request_id, "req_%016" PRIx64 "%016" PRIx64, seed,
		 hash64(&count, sizeof count, seed));
}

/* The path of a target in absolute form (http://host/path), which HTTP/1.1 servers must accept. */
static struct str path_of(const char *url)
{
	for (int i = 0; i < 2; i++) {
		const char *scheme = i ? "https://" : "http://";
		if (strncasecmp(url, scheme, strlen(scheme)) == 0) {
			const char *slash = strchr(url + strlen(scheme), '/');
			return str_from(slash ? slash : "/");
		}
	}
	return str_from(url);
}

struct http_exchange *http_exchange_create(struct http_link *l, enum http_method method, const char *url)
{
	struct http_exchange *x = calloc(1, sizeof *x);
	if (!x)
		return NULL;
	x->link = l;
	x->mhd = l->mhd;
	x->method = method;
	l->principal = 0;
	x->path = path_of(url);
	stream_init(&x->out, 0, 0);
	make_request_id(x);
	return x;
}

void http_exchange_measure(struct http_exchange *x)
{
	meter_set(http_server_meter(x->link->server), &x->metered, x->body.cap + x->out.pending + x->reply_bytes);
}

static void free_pairs(struct http_pair *p)
{
	while (p) {
		struct http_pair *next = p->next;
		free(p);
		p = next;
	}
}

void http_exchange_free(struct http_exchange *x)
{
	if (!x)
		return;
	http_exchange_close(x);
	http_response_free(x->response, x->link->server);
	stream_clear(&x->out);
	buf_free(&x->body);
	meter_set(http_server_meter(x->link->server), &x->metered, 0);
	free_pairs(x->params);
	free_pairs(x->headers);
	free(x);
}

void http_exchange_close(struct http_exchange *x)
{
	if (x->closed)
		return;
	x->gone = x->closed = true;
	if (x->on_close)
		x->on_close(x, x->on_close_arg);
}

enum http_method http_method(const struct http_exchange *x)
{
	return x->method;
}

struct str http_path(const struct http_exchange *x)
{
	return x->path;
}

static struct str lookup(const struct http_exchange *x, enum MHD_ValueKind kind, const char *name)
{
	const char *value = NULL;
	size_t n = 0;
	if (MHD_lookup_connection_value_n(x->mhd, kind, name, strlen(name), &value, &n) != MHD_YES)
		return (struct str){NULL, 0};
	return value ? (struct str){value, n} : (struct str){"", 0};
}

struct str http_header(const struct http_exchange *x, const char *name)
{
	return lookup(x, MHD_HEADER_KIND, name);
}

struct str http_query(const struct http_exchange *x, const char *name)
{
	return lookup(x, MHD_GET_ARGUMENT_KIND, name);
}

static struct http_pair *pair_create(const char *name, const char *value, size_t n)
{
	size_t n_name = strlen(name) + 1;
	struct http_pair *p = malloc(sizeof *p + n_name + n + 1);
	if (!p)
		return NULL;
	memcpy(p->text, name, n_name);
	p->value = p->text + n_name;
	if (n)
		memcpy(p->value, value, n);
	p->value[n] = '\0';
	p->next = NULL;
	return p;
}

void http_add_param(struct http_exchange *x, const char *name, struct str value)
{
	struct http_pair *p = x->n_params < MAX_PARAMS ? pair_create(name, value.p, value.n) : NULL;
	if (!p) {
		x->starved = true;
		return;
	}
	p->next = x->params;
	x->params = p;
	x->n_params++;
}

struct str http_param(const struct http_exchange *x, const char *name)
{
	for (const struct http_pair *p = x->params; p; p = p->next)
		if (strcmp(p->text, name) == 0)
			return str_from(p->value);
	return (struct str){NULL, 0};
}

struct str http_body(const struct http_exchange *x)
{
	return buf_str(&x->body);
}

const char *http_peer(const struct http_exchange *x)
{
	return x->link->peer;
}

const char *http_request_id(const struct http_exchange *x)
{
	return x->request_id;
}

void http_set_principal(struct http_exchange *x, int32_t principal)
{
	x->link->principal = principal;
}

int32_t http_principal(const struct http_exchange *x)
{
	return x->link->principal;
}

void http_set_user(struct http_exchange *x, void *user)
{
	x->user = user;
}

void *http_user(const struct http_exchange *x)
{
	return x->user;
}

void http_on_close(struct http_exchange *x, void (*cb)(struct http_exchange *x, void *arg), void *arg)
{
	x->on_close = cb;
	x->on_close_arg = arg;
}

void http_on_body(struct http_exchange *x, bool (*body)(struct http_exchange *x, const char *data, size_t n, void *arg),
                  void *arg)
{
	x->on_body = body;
	x->on_body_arg = arg;
}

void http_body_resume(struct http_exchange *x)
{
	http_exchange_wake(x);
}

/* ---- The answer ---- */

void http_set_header(struct http_exchange *x, const char *name, const char *value)
{
	struct http_pair *p = pair_create(name, value, strlen(value));
	if (!p) {
		x->starved = true;
		return;
	}
	struct http_pair **end = &x->headers;
	while (*end)
		end = &(*end)->next;
	*end = p;
}

static bool add_headers(struct http_exchange *x, const char *content_type, struct MHD_Response *r)
{
	bool ok = !content_type || MHD_add_response_header(r, "Content-Type", content_type) == MHD_YES;
	ok = ok && MHD_add_response_header(r, "x-request-id", x->request_id) == MHD_YES;
	for (const struct http_pair *p = x->headers; ok && p; p = p->next)
		ok = MHD_add_response_header(r, p->text, p->value) == MHD_YES;
	if (ok && http_server_draining(x->link->server))
		ok = MHD_add_response_header(r, "Connection", "close") == MHD_YES;
	return ok;
}

/*
 * Takes the response, or NULL for want of memory, and lets it be sent. Without all of its headers it would be another
 * answer: then the client gets the one that was made beforehand, and this returns false.
 */
static bool begin(struct http_exchange *x, int status, const char *content_type, struct MHD_Response *r)
{
	bool whole = r && !x->starved && add_headers(x, content_type, r);
	if (r && !whole)
		MHD_destroy_response(r);
	x->response = whole ? r : http_server_out_of_memory(x->link->server);
	x->status = whole ? status : 503;
	x->answered = true;
	http_exchange_wake(x);
	return whole;
}

void http_reply(struct http_exchange *x, int status, const char *content_type, struct buf *body)
{
	if (x->answered || x->gone) {
		buf_free(body);
		return;
	}
	size_t n = 0;
	bool failed = body->failed;
	char *data = buf_take(body, &n);
	struct MHD_Response *r = NULL;
	if (data)
		r = MHD_create_response_from_buffer(n, data, MHD_RESPMEM_MUST_FREE);
	else if (!failed)
		r = MHD_create_response_from_buffer(0, (void *)"", MHD_RESPMEM_PERSISTENT);
	if (!r)
		free(data);
	x->reply_bytes = r ? n : 0;
	http_exchange_measure(x);
	begin(x, status, n || data ? content_type : NULL, r);
}

void http_exchange_refuse(struct http_exchange *x, int status, const char *code, const char *message)
{
	struct buf body = BUF_INIT;
	const struct http_app *app = http_server_app(x->link->server);
	const char *type = app->error_body(&body, status, code, message);
	http_reply(x, status, type, &body);
}

/*
 * libmicrohttpd asks for output. It gets one piece at a time, so that what was written together becomes one chunk; when
 * there is none, the connection sleeps until the next write.
 */
static ssize_t read_stream(void *cls, uint64_t pos, char *out, size_t max)
{
	struct http_exchange *x = cls;
	(void)pos;
	if (x->gone)
		return MHD_CONTENT_READER_END_WITH_ERROR;
	size_t n = stream_take(&x->out, out, max);
	http_exchange_measure(x);
	if (n)
		return (ssize_t)n;
	if (x->ended)
		return MHD_CONTENT_READER_END_OF_STREAM;
	void (*drained)(struct http_exchange *x, void *arg) = x->on_drained;
	x->on_drained = NULL;
	if (drained)
		drained(x, x->on_drained_arg);
	x->suspended = true;
	MHD_suspend_connection(x->mhd);
	return 0;
}

enum status http_stream_begin(struct http_exchange *x, int status, const char *content_type)
{
	if (x->answered || x->gone)
		return STATUS_INVALID;
	struct MHD_Response *r;
	if (x->method == HTTP_HEAD) {
		/* libmicrohttpd 0.9.75 answers HEAD on a callback response with a chunk. */
		r = MHD_create_response_from_buffer(0, (void *)"", MHD_RESPMEM_PERSISTENT);
	} else {
		stream_init(&x->out, (size_t)x->config->stream_buffer, 0);
		r = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 16384, read_stream, x, NULL);
	}
	x->streaming = begin(x, status, content_type, r);
	return x->streaming ? STATUS_OK : STATUS_NOMEM;
}

enum status http_stream_write(struct http_exchange *x, const void *data, size_t n)
{
	if (!x->streaming || x->ended)
		return STATUS_INVALID;
	if (x->gone)
		return STATUS_CANCELLED;
	if (x->method == HTTP_HEAD)
		return STATUS_OK;
	enum status status = stream_push(&x->out, data, n);
	http_exchange_measure(x);
	if (status == STATUS_LIMIT) {
		x->gone = true;
		http_link_post(x->link, LINK_SLOW);
	} else if (status == STATUS_OK) {
		http_exchange_wake(x);
	}
	return status;
}

void http_stream_finish(struct http_exchange *x, const void *data, size_t n)
{
	if (http_stream_write(x, data, n) != STATUS_NOMEM) {
		http_stream_end(x);
		return;
	}
	x->gone = true;
	http_link_post(x->link, LINK_FAILED);
}

void http_stream_end(struct http_exchange *x)
{
	if (!x->streaming || x->ended)
		return;
	x->ended = true;
	http_exchange_wake(x);
}

void http_on_drained(struct http_exchange *x, void (*drained)(struct http_exchange *x, void *arg), void *arg)
{
	x->on_drained = drained;
	x->on_drained_arg = arg;
	http_exchange_wake(x);
}

void http_stream_abort(struct http_exchange *x)
{
	if (!x->streaming || x->ended || x->gone)
		return;
	x->gone = true;
	http_link_post(x->link, LINK_FAILED);
	http_exchange_wake(x);
}

size_t http_stream_pending(const struct http_exchange *x)
{
	return x->out.pending;
}
