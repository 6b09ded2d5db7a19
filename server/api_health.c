/*
 * GET /health/live: the process answers; restarting it would not help. GET /health/ready (and /health): it takes work
 * now. The three reasons not to are told apart by `status`. Also GET /, the chat page.
 */
#include "server/api.h"
#include "server/web/web.h"

static const char *status_word(const struct app *a)
{
	if (a->draining)
		return "draining";
	switch (engine_state(a->engine)) {
	case ENGINE_LOADING:
		return "loading";
	case ENGINE_FAILED:
		return "failed";
	case ENGINE_READY:
		break;
	}
	return "ok";
}

static void write_status(const struct app *a, struct buf *out)
{
	buf_printf(out, "\"status\":\"%s\",\"model\":", status_word(a));
	buf_json_string(out, app_model_id(a), strlen(app_model_id(a)));
	if (engine_state(a->engine) == ENGINE_READY) {
		struct engine_stats s;
		engine_stats(a->engine, &s);
		buf_printf(out,
			   ",\"running\":%d,\"waiting\":%d,\"sessions\":%d,\"kv_pages_free\":%d,\"kv_pages_total\":%d",
			   s.n_running, s.n_waiting, s.n_sessions, s.pages_free, s.pages_total);
	}
}

void api_health_live(struct http_exchange *x, void *app)
{
	struct buf body = BUF_INIT;
	(void)app;
	buf_puts(&body, "{\"status\":\"ok\"}");
	reply_json(x, 200, &body);
}

void api_health_ready(struct http_exchange *x, void *app)
{
	struct app *a = app;
	struct buf body = BUF_INIT;
	struct failure f;
	bool ready = app_accepts(a, &f);
	buf_putc(&body, '{');
	write_status(a, &body);
	if (!ready) {
		buf_puts(&body, ",\"error\":");
		failure_write(&body, &f);
		http_set_header(x, "Retry-After", "1");
	}
	buf_putc(&body, '}');
	reply_json(x, ready ? 200 : 503, &body);
}

void api_page(struct http_exchange *x, void *app)
{
	struct buf body = BUF_INIT;
	(void)app;
	buf_append(&body, web_index_html, web_index_html_len);
	http_set_header(x, "Cache-Control", "no-cache");
	http_set_header(x, "Content-Security-Policy", web_index_csp);
	http_set_header(x, "X-Content-Type-Options", "nosniff");
	http_set_header(x, "Referrer-Policy", "no-referrer");
	http_reply(x, 200, "text/html; charset=utf-8", &body);
	buf_free(&body);
}
