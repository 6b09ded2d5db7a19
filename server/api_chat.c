/* POST /v1/chat/completions, as OpenAI specifies it (platform.openai.com/docs/api-reference/chat). */
#include "server/completion.h"
#include "server/messages.h"

static void chat_logprob(struct completion *c, struct completion_choice *ch, const struct engine_event *ev)
{
	if (ch->logprobs[0].len)
		buf_putc(&ch->logprobs[0], ',');
	write_token_logprob(c->app, &ch->logprobs[0], ev, c->params.proto->sampling.n_logprobs);
}

static void write_logprobs(struct completion *c, const struct completion_choice *ch, struct buf *out)
{
	buf_puts(out, ",\"logprobs\":");
	if (c->params.proto->sampling.n_logprobs < 0)
		buf_puts(out, "null");
	else
		buf_printf(out, "{\"content\":[%s],\"refusal\":null}", ch->logprobs[0].len ? ch->logprobs[0].data : "");
}

static void chat_intro(struct completion *c, int i, struct buf *out)
{
	buf_printf(out,
		   "{\"index\":%d,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_"
		   "reason\":null",
		   i);
	if (c->params.return_token_ids)
		write_token_ids(out, "prompt_token_ids", &c->choices[i].prompt_ids);
	buf_putc(out, '}');
}

static void chat_chunk(struct completion *c, int i, const char *finish, struct buf *out)
{
	const struct completion_choice *ch = &c->choices[i];
	buf_printf(out, "{\"index\":%d,\"delta\":{", i);
	if (!finish && ch->tool_calls.len) {
		buf_printf(out, "\"tool_calls\":[%s]", ch->tool_calls.data);
	} else if (!finish) {
		buf_puts(out, "\"content\":");
		buf_json_string(out, buf_str(&ch->text).p, ch->text.len);
	}
	buf_putc(out, '}');
	if (finish)
		buf_printf(out, ",\"logprobs\":null,\"finish_reason\":\"%s\"", finish);
	else {
		write_logprobs(c, ch, out);
		buf_puts(out, ",\"finish_reason\":null");
	}
	if (c->params.return_token_ids)
		write_token_ids(out, "token_ids", &ch->token_ids);
	buf_putc(out, '}');
}

static void chat_choice(struct completion *c, int i, struct buf *out)
{
	const struct completion_choice *ch = &c->choices[i];
	buf_printf(out, "{\"index\":%d,\"message\":{\"role\":\"assistant\",\"content\":", i);
	if (only_calls(ch))
		buf_puts(out, "null");
	else
		buf_json_string(out, buf_str(&ch->text).p, ch->text.len);
	buf_puts(out, ",\"refusal\":null");
	if (ch->n_calls)
		buf_printf(out, ",\"tool_calls\":[%s]", buf_str(&ch->tool_calls).p);
	buf_putc(out, '}');
	write_logprobs(c, ch, out);
	buf_printf(out, ",\"finish_reason\":\"%s\"", ch->finish);
	if (c->params.return_token_ids) {
		write_token_ids(out, "prompt_token_ids", &ch->prompt_ids);
		write_token_ids(out, "token_ids", &ch->token_ids);
	}
	buf_putc(out, '}');
}

static const struct completion_shape shape = {
	.object = "chat.completion",
	.chunk_object = "chat.completion.chunk",
	.id_prefix = "chatcmpl-",
	.intro = chat_intro,
	.logprob = chat_logprob,
	.chunk = chat_chunk,
	.finish_apart = true,
	.choice = chat_choice,
};

/* Each choice has values of its own: an arena belongs to one request. */
static enum status add_choices(struct completion *c, const struct chat_request *chat, struct error *err)
{
	for (int i = 0; i < c->params.n; i++) {
		struct engine_request *r = completion_request(c, i);
		enum status status;
		if (!r)
			return error_set(err, STATUS_NOMEM, "There is no memory for the request.");
		status = chat_give(chat, r, err);
		if (status != STATUS_OK) {
			engine_request_destroy(r);
			return status;
		}
		completion_add(c, r);
	}
	return STATUS_OK;
}

void api_chat(struct http_exchange *x, void *app)
{
	struct app *a = app;
	struct json_doc *doc;
	struct json root, model, messages, tools, extra, generate;
	struct chat_request chat = {.add_generation_prompt = true};
	struct params params = {0};
	struct completion *c;
	struct failure f;
	struct error err = {0};

	if (!app_accepts(a, &f)) {
		reply_failure(x, &f);
		return;
	}
	if (!read_body(x, false, &doc, &root))
		return;
	model = json_get(&root, "model");
	messages = json_get(&root, "messages");
	tools = json_get(&root, "tools");
	extra = json_get(&root, "chat_template_kwargs");
	generate = json_get(&root, "add_generation_prompt");
	if (!app_serves(a, &model, &f)) {
		reply_failure(x, &f);
		goto done;
	}
	if (params_parse(&params, a->engine, http_principal(x), &root, PARAMS_CHAT, http_header(x, "x-session-token"),
	                 &err) != STATUS_OK ||
	    json_read_bool(&generate, &chat.add_generation_prompt, &err) != STATUS_OK) {
		reply_error(x, &err);
		goto done;
	}
	chat.messages = &messages;
	chat.tools = params.tools.active ? &tools : NULL;
	chat.tools_as_text = params.tools.as_text;
	chat.extra = &extra;
	chat.text_n = http_body(x).n;
	c = completion_create(a, x, &shape, &params, 1);
	if (!c)
		goto done;
	chat.turns = c->params.truncate ? &c->turns : NULL;
	if ((!c->params.truncate || turns_read(&c->turns, &messages, &err) == STATUS_OK) &&
	    add_choices(c, &chat, &err) == STATUS_OK)
		completion_start(c);
	else
		completion_abort(c, &err);
done:
	params_free(&params);
	json_doc_free(doc);
}
