/* GET /metrics, in Prometheus' text format. */
#include "server/api.h"

void api_metrics(struct http_exchange *x, void *app)
{
	struct app *a = app;
	struct buf body = BUF_INIT;
	struct failure f;
	struct engine_tenant_usage usage[ENGINE_MAX_TENANTS];
	const char *names[ENGINE_MAX_TENANTS];
	struct metrics_gauges g = {
		.model = app_model_id(a), .info = engine_info(a->engine), .ready = app_accepts(a, &f),
		.keys = usage,
		.key_names = names};

	if (engine_state(a->engine) == ENGINE_READY)
		engine_stats(a->engine, &g.stats);
	if (a->listener_figures)
		a->listener_figures(a->listener, &g.connections, &g.websockets);
	/* Only keys that see what belongs to others; when none is needed there is nothing to tell apart. */
	for (int32_t i = 0; i < a->auth.n && !a->auth.open && app_is_admin(a, http_principal(x)); i++) {
		const struct auth_key *k = auth_find(&a->auth, i);
		engine_tenant_usage(a->engine, i, &usage[g.n_keys]);
		if (k && usage[g.n_keys].id >= 0)
			names[g.n_keys++] = k->name;
	}
	struct mlflow_stats mlflow;
	if (a->mlflow) {
		mlflow_stats(a->mlflow, &mlflow);
		g.mlflow = &mlflow;
	}
	a->metrics.stored_responses = (uint64_t)a->store.n;
	a->metrics.stored_bytes = a->store.bytes;
	a->metrics.stored_evicted = a->store.evicted;
	metrics_write(&a->metrics, &g, &body);
	http_reply(x, 200, "text/plain; version=0.0.4; charset=utf-8", &body);
	buf_free(&body);
}
