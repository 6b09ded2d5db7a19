#include "server/routes.h"

#include <stdio.h>
#include <strings.h>

#include "server/api.h"

/* A pattern's {id} is one path segment, {id*} the rest of the path (model names may hold slashes). */
static const struct route routes[] = {
	{HTTP_GET, "/", api_page, ROUTE_OPEN},
	{HTTP_GET, "/health", api_health_ready, ROUTE_OPEN},
	{HTTP_GET, "/health/live", api_health_live, ROUTE_OPEN},
	{HTTP_GET, "/health/ready", api_health_ready, ROUTE_OPEN},
	{HTTP_GET, "/metrics", api_metrics, 0},
	{HTTP_GET, "/v1/kv", api_kv, 0},
	{HTTP_GET, "/v1/models", api_models, 0},
	{HTTP_GET, "/v1/models/{id*}", api_model, 0},
	{HTTP_POST, "/v1/completions", api_completions, 0},
	{HTTP_POST, "/v1/chat/completions", api_chat, 0},
	{HTTP_POST, "/v1/chunk", api_chunk, 0},
	{HTTP_POST, "/v1/responses", api_responses, 0},
	{HTTP_GET, "/v1/responses", api_responses_plain_get, ROUTE_WEBSOCKET},
	{HTTP_POST, "/v1/responses/compact", api_responses_compact, 0},
	{HTTP_GET, "/v1/responses/{id}", api_response_get, 0},
	{HTTP_DELETE, "/v1/responses/{id}", api_response_delete, 0},
	{HTTP_GET, "/v1/responses/{id}/input_items", api_response_input, 0},
	{HTTP_POST, "/v1/tokenize", api_tokenize, 0},
	{HTTP_POST, "/v1/detokenize", api_detokenize, 0},
	{HTTP_GET, "/v1/tokenizer_info", api_tokenizer_info, 0},
	{HTTP_POST, "/v1/sessions", api_sessions_create, 0},
	{HTTP_GET, "/v1/sessions", api_sessions_list, 0},
	{HTTP_GET, "/v1/sessions/{id}", api_session_get, 0},
	{HTTP_DELETE, "/v1/sessions/{id}", api_session_delete, 0},
	{HTTP_POST, "/v1/sessions/{id}/heartbeat", api_session_heartbeat, 0},
	{HTTP_POST, "/v1/sessions/{id}/export", api_session_export, 0},
	{HTTP_POST, "/v1/sessions/{id}/import", api_session_import, ROUTE_STREAMED},
};

static const struct {
	enum http_method method;
	const char *name;
} methods[] = {{HTTP_GET, "GET"},
	       {HTTP_HEAD, "HEAD"},
	       {HTTP_POST, "POST"},
	       {HTTP_DELETE, "DELETE"},
	       {HTTP_OPTIONS, "OPTIONS"}};

/* ---- Lookup ---- */

struct match {
	const char *name; /* of the parameter, or NULL */
	size_t name_n;
	struct str value;
};

static bool match_pattern(const char *pattern, struct str path, struct match *m)
{
	*m = (struct match){0};
	while (*pattern) {
		if (*pattern != '{') {
			if (path.n == 0 || path.p[0] != *pattern)
				return false;
			pattern++;
			path.p++;
			path.n--;
			continue;
		}
		const char *close = strchr(pattern, '}');
		bool rest = close[-1] == '*';
		size_t n = 0;
		while (n < path.n && (rest || path.p[n] != '/'))
			n++;
		if (n == 0)
			return false;
		m->name = pattern + 1;
		m->name_n = (size_t)(close - pattern) - 1 - rest;
		m->value = (struct str){path.p, n};
		path.p += n;
		path.n -= n;
		pattern = close + 1;
	}
	return path.n == 0;
}

/* Base URLs are configured with and without /v1, and with a slash too many. */
static bool match_route(const struct route *r, struct str path, struct match *m)
{
	if (path.n > 1 && path.p[path.n - 1] == '/')
		path.n--;
	return match_pattern(r->pattern, path, m) ||
	       (str_starts(str_from(r->pattern), "/v1/") && match_pattern(r->pattern + 3, path, m));
}

/* ---- CORS ---- */

/* Whether the list "https://a.example, https://b.example" holds the origin. */
static bool is_listed(const char *list, struct str origin)
{
	while (*list) {
		list += strspn(list, ", ");
		size_t n = strcspn(list, ", ");
		if (n > 0 && origin.n == n && memcmp(origin.p, list, n) == 0)
			return true;
		list += n;
	}
	return false;
}

/*
 * On every answer, streams and errors included: a browser hides an answer that lacks it. The header can name one origin
 * only, so of several it is the one that asks.
 */
static void set_cors(struct http_exchange *x, const struct config *config)
{
	const char *allowed = config->cors_origin;
	struct str origin = http_header(x, "origin");
	char echo[256];
	if (!allowed || !allowed[0])
		return;
	if (strcmp(allowed, "*") != 0)
		http_set_header(x, "Vary", "Origin");
	if (!strchr(allowed, ',')) {
		http_set_header(x, "Access-Control-Allow-Origin", allowed);
	} else if (origin.p && origin.n < sizeof echo && is_listed(allowed, origin)) {
		snprintf(echo, sizeof echo, "%.*s", STR_ARG(origin));
		http_set_header(x, "Access-Control-Allow-Origin", echo);
	} else {
		return;
	}
	http_set_header(x, "Access-Control-Expose-Headers", "x-request-id, retry-after");
}

/*
 * Browsers open a WebSocket to anywhere, whatever page asks for it, and leave it to the server to look at the page's
 * origin (RFC 6455, 10.2). Pages of this server are welcome, those that may read its answers as well, and programs,
 * which send no origin.
 */
static bool may_open_websocket(struct http_exchange *x, const struct config *config)
{
	struct str origin = http_header(x, "origin"), host = http_header(x, "host");
	const char *allowed = config->cors_origin, *authority;
	if (!origin.p || (allowed && (strcmp(allowed, "*") == 0 || is_listed(allowed, origin))))
		return true;
	authority = memmem(origin.p, origin.n, "://", 3);
	size_t n = authority ? origin.n - (size_t)(authority + 3 - origin.p) : 0;
	return n > 0 && n == host.n && strncasecmp(authority + 3, host.p, n) == 0;
}

/* Names of headers, as they stand in a list; anything else is not sent back. */
static bool is_header_list(struct str s)
{
	for (size_t i = 0; i < s.n; i++) {
		char c = s.p[i];
		bool name = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
			    c == '_';
		if (!name && c != ',' && c != ' ')
			return false;
	}
	return s.n > 0;
}

static void reply_options(struct http_exchange *x, const struct config *config, const char *allow)
{
	struct str wanted = http_header(x, "access-control-request-headers");
	struct buf body = BUF_INIT;
	char headers[1024];

	http_set_header(x, "Allow", allow);
	if (config->cors_origin && config->cors_origin[0]) {
		/* SDKs send headers of their own (x-stainless-*): what is asked for is allowed. */
		if (wanted.p && wanted.n < sizeof headers && is_header_list(wanted))
			snprintf(headers, sizeof headers, "%.*s", STR_ARG(wanted));
		else
			snprintf(headers, sizeof headers, "Authorization, Content-Type, x-api-key, x-session-token");
		http_set_header(x, "Access-Control-Allow-Methods", allow);
		http_set_header(x, "Access-Control-Allow-Headers", headers);
		http_set_header(x, "Access-Control-Max-Age", "86400");
	}
	http_reply(x, 204, NULL, &body);
}

/* ---- Dispatch ---- */

/* Bodies are read as they are: one that is compressed would only be said to be no JSON. */
static bool takes_encoding(struct http_exchange *x)
{
	struct str encoding = http_header(x, "content-encoding");
	struct failure f;
	if (encoding.n == 0 || (encoding.n == 8 && strncasecmp(encoding.p, "identity", 8) == 0))
		return true;
	http_set_header(x, "Accept-Encoding", "identity");
	failure_set(&f, FAILURE_ENCODING, NULL,
	            "The Content-Encoding '%.*s' is not supported: the body must be sent as it is.",
	            (int)(encoding.n < 40 ? encoding.n : 40), encoding.p);
	reply_failure(x, &f);
	return false;
}

/* The methods of a path, "GET, HEAD, OPTIONS"; false when it has none. */
static bool allowed_methods(struct str path, char *out, size_t cap)
{
	unsigned set = 0;
	struct match m;
	for (size_t i = 0; i < sizeof routes / sizeof *routes; i++)
		if (match_route(&routes[i], path, &m))
			set |= 1u << routes[i].method;
	if (!set)
		return false;
	set |= 1u << HTTP_OPTIONS;
	if (set & (1u << HTTP_GET))
		set |= 1u << HTTP_HEAD;
	out[0] = '\0';
	for (size_t i = 0; i < sizeof methods / sizeof *methods; i++) {
		size_t n = strlen(out);
		if (set & (1u << methods[i].method))
			snprintf(out + n, cap - n, "%s%s", n ? ", " : "", methods[i].name);
	}
	return true;
}

const struct route *routes_dispatch(struct http_exchange *x, void *app)
{
	struct app *a = app;
	enum http_method method = http_method(x) == HTTP_HEAD ? HTTP_GET : http_method(x);
	struct str path = http_path(x);
	const struct route *found = NULL;
	struct match m = {0}, found_m = {0};
	struct failure f;
	char allow[64], name[32];

	set_cors(x, a->config);
	if (method == HTTP_OPTIONS && str_is(path, "*")) { /* the server as a whole (RFC 9110, 9.3.7) */
		reply_options(x, a->config, "GET, HEAD, POST, DELETE, OPTIONS");
		return NULL;
	}
	for (size_t i = 0; i < sizeof routes / sizeof *routes && !found; i++) {
		if (routes[i].method == method && match_route(&routes[i], path, &m)) {
			found = &routes[i];
			found_m = m;
		}
	}
	if (!found) {
		bool known = allowed_methods(path, allow, sizeof allow);
		if (known && method == HTTP_OPTIONS) {
			reply_options(x, a->config, allow);
		} else if (known) {
			http_set_header(x, "Allow", allow);
			failure_set(&f, FAILURE_METHOD, NULL, "%.*s does not take this method, only %s.",
				    (int)(path.n < 200 ? path.n : 200), path.p, allow);
			reply_failure(x, &f);
		} else {
			failure_set(&f, FAILURE_NO_ROUTE, NULL, "There is nothing at %.*s.",
				    (int)(path.n < 200 ? path.n : 200), path.p);
			reply_failure(x, &f);
		}
		return NULL;
	}
	if (!(found->flags & ROUTE_OPEN)) {
		int32_t tenant = auth_check(&a->auth, http_header(x, "authorization"), http_header(x, "x-api-key"));
		if (tenant == AUTH_REFUSED) {
			failure_set(&f, FAILURE_BAD_KEY, NULL, "The API key is missing or wrong.");
			reply_failure(x, &f);
			return NULL;
		}
		http_set_principal(x, tenant);
	}
	if (method == HTTP_POST && !takes_encoding(x))
		return NULL;
	if (found->flags & ROUTE_WEBSOCKET && http_header(x, "upgrade").p && !may_open_websocket(x, a->config)) {
		failure_set(&f, FAILURE_ORIGIN, NULL,
			    "Pages of this origin may not open a WebSocket here (--cors-origin).");
		reply_failure(x, &f);
		return NULL;
	}
	/*
	 * Refused before the upgrade, a WebSocket is tried elsewhere by whatever balances; afterwards it could only be
	 * closed.
	 */
	if (found->flags & ROUTE_WEBSOCKET && http_header(x, "upgrade").p && !app_accepts(a, &f)) {
		reply_failure(x, &f);
		return NULL;
	}
	if (found_m.name) {
		snprintf(name, sizeof name, "%.*s", (int)found_m.name_n, found_m.name);
		http_add_param(x, name, found_m.value);
	}
	return found;
}

bool routes_streams(void *app, enum http_method method, struct str target)
{
	struct match m;
	const char *query = memchr(target.p, '?', target.n);
	(void)app;
	if (query)
		target.n = (size_t)(query - target.p);
	for (size_t i = 0; i < sizeof routes / sizeof *routes; i++) {
		if (routes[i].flags & ROUTE_STREAMED && routes[i].method == method &&
		    match_route(&routes[i], target, &m))
			return true;
	}
	return false;
}
