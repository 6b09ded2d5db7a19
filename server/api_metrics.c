/* GET /metrics, in Prometheus' text format. */
#include "server/api.h"

void api_metrics(struct http_exchange *x, void *app)
{
	struct app *a = app;
	struct buf body = BUF_INIT;
	struct failure f;
	struct metrics_gauges g = {
		.model = app_model_id(a), .info = engine_info(a->engine), .ready = app_accepts(a, &f)};

	if (engine_state(a->engine) == ENGINE_READY)
		engine_stats(a->engine, &g.stats);
	if (a->listener_figures)
		a->listener_figures(a->listener, &g.connections, &g.websockets);
	metrics_write(&a->metrics, &g, &body);
	http_reply(x, 200, "text/plain; version=0.0.4; charset=utf-8", &body);
	buf_free(&body);
}
