/*
 * POST /tokenize {"content" | "prompt" | "messages", "add_special"?, "parse_special"?} -> {"tokens", "count",
 * "max_model_len"}, POST /detokenize {"tokens"} -> {"content", "prompt"}, GET /tokenizer_info.
 *
 * Names are llama.cpp's and vLLM's. Control tokens in the text are text unless parse_special says otherwise.
 */
#include <stdlib.h>

#include "server/api.h"
#include "server/messages.h"
#include "server/tools.h"

static void reply_tokens(struct app *a, struct http_exchange *x, const struct engine_event *ev)
{
	struct buf body = BUF_INIT;
	buf_puts(&body, "{\"tokens\":[");
	for (size_t i = 0; i < ev->n_tokens; i++)
		buf_printf(&body, i ? ",%d" : "%d", ev->tokens[i]);
	buf_printf(&body, "],\"count\":%zu,\"max_model_len\":%d", ev->n_tokens, engine_info(a->engine)->n_ctx);
	if (ev->text.len) {
		buf_puts(&body, ",\"prompt\":");
		buf_json_string(&body, ev->text.data, ev->text.len);
	}
	buf_putc(&body, '}');
	reply_json(x, 200, &body);
}

static void reply_text(struct app *a, struct http_exchange *x, const struct engine_event *ev)
{
	struct buf body = BUF_INIT;
	(void)a;
	buf_puts(&body, "{\"content\":");
	buf_json_string(&body, buf_str(&ev->text).p, ev->text.len);
	buf_puts(&body, ",\"prompt\":");
	buf_json_string(&body, buf_str(&ev->text).p, ev->text.len);
	buf_putc(&body, '}');
	reply_json(x, 200, &body);
}

static enum status tokenize_chat(struct app *a, struct http_exchange *x, const struct json *root, struct error *err)
{
	struct json messages = json_get(root, "messages"), tools = json_get(root, "tools");
	struct json extra = json_get(root, "chat_template_kwargs"), generate = json_get(root, "add_generation_prompt");
	struct chat_request chat = {.messages = &messages,
				    .tools = &tools,
				    .extra = &extra,
				    .tools_as_text = tools_as_text(engine_info(a->engine)),
				    .add_generation_prompt = true,
				    .text_n = http_body(x).n};
	struct arena *arena;
	struct value *vars;
	uint64_t id;
	enum status status = json_read_bool(&generate, &chat.add_generation_prompt, err);
	if (status == STATUS_OK)
		status = chat_build(&chat, &arena, &vars, err);
	if (status != STATUS_OK)
		return status;
	id = call_start(a, x, reply_tokens);
	if (id)
		engine_tokenize_chat(a->engine, id, arena, vars);
	else
		arena_destroy(arena);
	return STATUS_OK;
}

static enum status tokenize_text(struct app *a, struct http_exchange *x, const struct json *root, struct error *err)
{
	struct json content = json_get(root, "content"), prompt = json_get(root, "prompt");
	struct json add = json_get(root, "add_special"), add_vllm = json_get(root, "add_special_tokens");
	struct json parse = json_get(root, "parse_special");
	const struct json *text = json_has(&content) || !json_has(&prompt) ? &content : &prompt;
	struct str s = json_text(text);
	bool add_special = false, parse_special = false;
	uint64_t id;
	enum status status;

	if (!s.p)
		return json_fail(text, STATUS_INVALID, err, "must be a string.");
	status = json_read_bool(&add_vllm, &add_special, err);
	if (status == STATUS_OK)
		status = json_read_bool(&add, &add_special, err);
	if (status == STATUS_OK)
		status = json_read_bool(&parse, &parse_special, err);
	if (status != STATUS_OK)
		return status;
	id = call_start(a, x, reply_tokens);
	if (id)
		engine_tokenize(a->engine, id, s.p, s.n, add_special, parse_special);
	return STATUS_OK;
}

static enum status detokenize(struct app *a, struct http_exchange *x, const struct json *root, struct error *err)
{
	struct json tokens = json_get(root, "tokens");
	size_t n = json_len(&tokens);
	int32_t *ids;
	uint64_t id;

	if (json_kind(&tokens) != JSON_LIST)
		return json_fail(&tokens, STATUS_INVALID, err, "must be an array of token ids.");
	ids = malloc((n ? n : 1) * sizeof *ids);
	if (!ids)
		return error_set(err, STATUS_NOMEM, "There is no memory for the request.");
	for (size_t i = 0; i < n; i++) {
		struct json item = json_at(&tokens, i);
		int64_t v = -1;
		enum status status = json_read_int(&item, 0, INT32_MAX, &v, err);
		if (status == STATUS_OK && v < 0)
			status = json_fail(&item, STATUS_INVALID, err, "must be a token id.");
		if (status != STATUS_OK) {
			free(ids);
			return status;
		}
		ids[i] = (int32_t)v;
	}
	id = call_start(a, x, reply_text);
	if (id)
		engine_detokenize(a->engine, id, ids, n);
	free(ids);
	return STATUS_OK;
}

static void handle(struct app *a, struct http_exchange *x,
		   enum status (*run)(struct app *a, struct http_exchange *x, const struct json *root,
				      struct error *err))
{
	struct json_doc *doc;
	struct json root;
	struct failure f;
	struct error err = {0};
	if (engine_state(a->engine) != ENGINE_READY && !app_accepts(a, &f)) {
		reply_failure(x, &f);
		return;
	}
	if (!read_body(x, false, &doc, &root))
		return;
	if (run(a, x, &root, &err) != STATUS_OK)
		reply_error(x, &err);
	json_doc_free(doc);
}

static enum status tokenize(struct app *a, struct http_exchange *x, const struct json *root, struct error *err)
{
	struct json messages = json_get(root, "messages");
	return json_has(&messages) ? tokenize_chat(a, x, root, err) : tokenize_text(a, x, root, err);
}

void api_tokenize(struct http_exchange *x, void *app)
{
	handle(app, x, tokenize);
}

void api_detokenize(struct http_exchange *x, void *app)
{
	handle(app, x, detokenize);
}

/* What vLLM's endpoint of that name tells, as far as there is such a thing here. */
void api_tokenizer_info(struct http_exchange *x, void *app)
{
	struct app *a = app;
	const struct engine_info *info = engine_info(a->engine);
	struct buf body = BUF_INIT;
	struct failure f;
	if (!info) {
		app_accepts(a, &f);
		reply_failure(x, &f);
		return;
	}
	const struct {
		const char *name;
		int32_t token;
	} rows[] = {
		{"bos_token", info->bos_token}, {"eos_token", info->eos_token}, {"pad_token", -1}, {"unk_token", -1}};
	buf_printf(&body, "{\"tokenizer_class\":\"GGUF\",\"model_max_length\":%d,\"vocab_size\":%d", info->n_ctx,
	           info->n_vocab);
	for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
		struct str piece =
			rows[i].token >= 0 ? engine_token_piece(a->engine, rows[i].token) : (struct str){NULL, 0};
		buf_printf(&body, ",\"%s\":", rows[i].name);
		if (piece.p)
			buf_json_string(&body, piece.p, piece.n);
		else
			buf_puts(&body, "null");
	}
	buf_puts(&body, ",\"chat_template\":");
	if (info->has_chat_template)
		buf_json_string(&body, info->chat_template, strlen(info->chat_template));
	else
		buf_puts(&body, "null");
	buf_putc(&body, '}');
	reply_json(x, 200, &body);
}
