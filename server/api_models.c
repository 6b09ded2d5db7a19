/* GET /v1/models and /v1/models/{id}. The context length stands under each name that clients look for. */
#include "server/api.h"

static void write_model(struct app *a, struct buf *out)
{
	const struct engine_info *info = engine_info(a->engine);
	const char *id = app_model_id(a);
	buf_puts(out, "{\"id\":");
	buf_json_string(out, id, strlen(id));
	buf_printf(out, ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"kvasir\"", (long long)a->started_unix_s);
	if (info) {
		/* max_model_len: vLLM; meta: llama.cpp; context_length: OpenRouter and LM Studio. */
		buf_printf(out,
			   ",\"max_model_len\":%d,\"context_length\":%d,\"meta\":{\"n_ctx\":%d,\"n_ctx_train\":%d,"
			   "\"n_vocab\":%d,\"n_embd\":%d,\"n_params\":%llu,\"size\":%llu,\"architecture\":",
			   info->n_ctx, info->n_ctx, info->n_ctx, info->n_ctx_train, info->n_vocab, info->n_embd,
			   (unsigned long long)info->n_params, (unsigned long long)info->file_bytes);
		buf_json_string(out, info->arch, strlen(info->arch));
		buf_printf(out,
			   ",\"rope\":{\"scaling\":\"%s\",\"factor\":%g,\"original_context_length\":%d,\"freq_base\":%."
			   "9g,\"overridden\":%s",
			   info->rope.scaling, (double)info->rope.factor, info->rope.original_ctx,
			   (double)info->rope.freq_base, info->rope.chosen ? "true" : "false");
		if (info->rope.chunk)
			buf_printf(out, ",\"chunk\":%d", info->rope.chunk);
		buf_putc(out, '}');
		if (info->n_windowed)
			buf_printf(out, ",\"sliding_window\":%d,\"sliding_window_layers\":%d", info->window,
			           info->n_windowed);
		buf_puts(out, ",\"name\":");
		buf_json_string(out, info->model_name, strlen(info->model_name));
		buf_puts(out, ",\"quantization\":");
		buf_json_string(out, info->quantization, strlen(info->quantization));
		buf_puts(out, ",\"backend\":");
		buf_json_string(out, info->backend, strlen(info->backend));
		buf_putc(out, '}');
	}
	buf_putc(out, '}');
}

void api_models(struct http_exchange *x, void *app)
{
	struct app *a = app;
	struct buf body = BUF_INIT;
	buf_puts(&body, "{\"object\":\"list\",\"data\":[");
	/* Before the model is loaded there is nothing to list. */
	if (engine_info(a->engine))
		write_model(a, &body);
	buf_puts(&body, "]}");
	reply_json(x, 200, &body);
}

void api_model(struct http_exchange *x, void *app)
{
	struct app *a = app;
	struct str id = http_param(x, "id");
	struct buf body = BUF_INIT;
	struct failure f;
	if (!engine_info(a->engine) || !str_is(id, app_model_id(a))) {
		failure_set(&f, FAILURE_NO_MODEL, "model", "The model '%.*s' does not exist; this server has '%s'.",
			    (int)(id.n < 200 ? id.n : 200), id.p, app_model_id(a));
		reply_failure(x, &f);
		return;
	}
	write_model(a, &body);
	reply_json(x, 200, &body);
}
