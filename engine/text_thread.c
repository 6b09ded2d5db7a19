/*
 * The text thread: renders chat templates and tokenises, so that neither the loop nor the worker waits for a long
 * prompt. It keeps the order of what it passes on.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <time.h>

#include "engine/context.h"
#include "engine/engine_internal.h"
#include "engine/event.h"
#include "engine/splitting.h"
#include "engine/truncate.h"

static bool set_token_text(struct engine *e, struct arena *a, struct value *vars, const char *name, int32_t token)
{
	if (token < 0 || value_dict_get(vars, name, strlen(name)))
		return true;
	struct str piece = tokenizer_piece(e->tokenizer, token, false);
	return value_dict_set(a, vars, name, strlen(name), value_string(a, piece.p, piece.n, VALUE_TRUSTED));
}

/* Templates were written against transformers, which defines these whether or not there are any. */
static bool set_absent(struct arena *a, struct value *vars, const char *name)
{
	return value_dict_get(vars, name, strlen(name)) || value_dict_set(a, vars, name, strlen(name), value_none(a));
}

static bool complete_variables(struct engine *e, struct arena *a, struct value *vars)
{
	return set_token_text(e, a, vars, "bos_token", tokenizer_bos(e->tokenizer)) &&
	       set_token_text(e, a, vars, "eos_token", tokenizer_eos(e->tokenizer)) && set_absent(a, vars, "tools") &&
	       set_absent(a, vars, "documents");
}

static enum status no_room(struct arena *arena, struct error *err)
{
	return arena_starved(arena) ? error_set(err, STATUS_NOMEM, "no memory for the prompt")
	                            : error_set_param(err, STATUS_LIMIT, "messages", "the chat is too large");
}

/* Renders a chat and appends its tokens; *prompt (may be NULL) receives the text. */
static enum status encode_chat(struct engine *e, struct arena *arena, struct value *chat, struct token_buf *tokens,
                               struct buf *prompt, struct error *err)
{
	struct rendered r = {0};
	enum status st;
	if (!e->template)
		return error_set_param(err, STATUS_INVALID, "messages", "this server cannot render chats: %s",
		                       e->info.chat_template_error ? e->info.chat_template_error
		                                                   : "the model has no chat template");
	if (!complete_variables(e, arena, chat))
		return no_room(arena, err);
	st = template_render(e->template, chat, (int64_t)time(NULL), NULL, &r, err);
	if (st != STATUS_OK)
		goto done;
	/*
	 * The template places BOS itself where the model wants it; one that leaves it out follows the file's own wish.
	 */
	int32_t bos = tokenizer_bos(e->tokenizer);
	size_t first = tokens->n;
	if (tokenizer_adds_bos(e->tokenizer) && bos >= 0 && !token_buf_add(tokens, bos)) {
		st = error_set(err, STATUS_NOMEM, "no memory for the prompt");
		goto done;
	}
	struct str text = buf_str(&r.text);
	st = tokenizer_encode(e->tokenizer, text.p, text.n, r.data, r.n_data, TOKENIZE_SPECIAL, tokens, err);
	if (st == STATUS_OK && tokens->n > first + 1 && tokens->ids[first] == bos && tokens->ids[first + 1] == bos) {
		memmove(tokens->ids + first, tokens->ids + first + 1, (tokens->n - first - 1) * sizeof *tokens->ids);
		tokens->n--;
	}
	if (st == STATUS_OK && prompt) {
		*prompt = r.text;
		r.text = BUF_INIT;
	}
done:
	rendered_free(&r);
	return st;
}

/* How long the prompt may be that leaves room for the answer. */
static int32_t room_for_prompt(const struct engine *e, const struct engine_request *r)
{
	int32_t n_ctx = context_is_bounded(&e->options, &r->context) ? e->info.n_ctx_long : e->info.n_ctx;
	return n_ctx - (r->max_tokens >= 0 ? r->max_tokens : n_ctx / 8);
}

/* As encode_chat(), in place of what `tokens` had, without the n oldest turns. */
static enum status encode_rest(struct engine *e, struct engine_request *r, const struct value *all, int32_t n,
                               struct token_buf *tokens, struct error *err)
{
	if (!truncate_turns(r, all, n))
		return no_room(r->arena, err);
	tokens->n = 0;
	r->turns_dropped = n;
	return encode_chat(e, r->arena, r->chat, tokens, NULL, err);
}

/*
 * Leaves out as few of the oldest turns as it takes. Where even the last one alone is too long, it is for the worker to
 * say so. Templates may write anything for any list of messages, so what fits is tried out: each try halves what is in
 * question.
 */
static enum status encode_turns(struct engine *e, struct engine_request *r, struct token_buf *tokens, struct error *err)
{
	enum status st = encode_chat(e, r->arena, r->chat, tokens, NULL, err);
	int32_t room = room_for_prompt(e, r), least = 0, most = truncate_most(r);
	if (st != STATUS_OK || most == 0 || (int64_t)tokens->n <= room)
		return st;
	const struct value *all = truncate_messages(r);
	if (!all)
		return no_room(r->arena, err);
	st = encode_rest(e, r, all, most, tokens, err);
	if (st != STATUS_OK || (int64_t)tokens->n > room)
		return st;
	/* Without `least` turns it does not fit, without `most` it does. */
	while (st == STATUS_OK && most - least > 1) {
		int32_t middle = least + (most - least) / 2;
		st = encode_rest(e, r, all, middle, tokens, err);
		if ((int64_t)tokens->n <= room)
			most = middle;
		else
			least = middle;
	}
	return st == STATUS_OK && r->turns_dropped != most ? encode_rest(e, r, all, most, tokens, err) : st;
}

/* A raw prompt: people paste templated text, so control tokens count, and a BOS they pasted is not doubled. */
static enum status encode_text(struct engine *e, const struct engine_request *r, struct token_buf *tokens,
                               struct error *err)
{
	enum status st = tokenizer_encode(e->tokenizer, r->text ? r->text : "", r->text_n, NULL, 0,
	                                  TOKENIZE_SPECIAL | TOKENIZE_ADD_BOS_EOS, tokens, err);
	if (st != STATUS_OK)
		return st;
	int32_t bos = tokenizer_bos(e->tokenizer);
	if (bos >= 0 && tokenizer_adds_bos(e->tokenizer) && tokens->n >= 2 && tokens->ids[0] == bos &&
	    tokens->ids[1] == bos) {
		memmove(tokens->ids, tokens->ids + 1, (tokens->n - 1) * sizeof *tokens->ids);
		tokens->n--;
	}
	/* An empty prompt still has to begin with something. */
	if (tokens->n == 0 && bos >= 0 && !token_buf_add(tokens, bos))
		return error_set(err, STATUS_NOMEM, "no memory for the prompt");
	return STATUS_OK;
}

static void handle_generate(struct engine *e, struct command *c, struct list *out)
{
	struct engine_request *r = c->request;
	struct error err = {0};
	enum status st = STATUS_OK;
	switch (r->input) {
	case ENGINE_INPUT_TEXT:
		st = encode_text(e, r, &c->tokens, &err);
		break;
	case ENGINE_INPUT_CHAT:
		st = encode_turns(e, r, &c->tokens, &err);
		if (st == STATUS_OK && !turns_mark(r, e->tokenizer, &c->tokens))
			st = error_set(&err, STATUS_NOMEM, "no memory for the prompt");
		break;
	case ENGINE_INPUT_TOKENS:
		c->tokens = (struct token_buf){r->tokens, r->n_tokens, r->n_tokens};
		r->tokens = NULL;
		r->n_tokens = 0;
		break;
	}
	if (st != STATUS_OK) {
		command_fail(e, c, &err, out);
		return;
	}
	/* The prompt's source may be large, and is not needed any more, unless it is to be echoed. */
	arena_destroy(r->arena);
	r->arena = NULL;
	r->chat = NULL;
	if (!r->want_prompt) {
		free(r->text);
		r->text = NULL;
	}
	mailbox_post(&e->worker_box, &c->link);
}

static void handle_tokenize(struct engine *e, struct command *c, struct list *out)
{
	struct token_buf tokens = {NULL, 0, 0};
	struct error err = {0};
	enum status st;
	if (c->type == COMMAND_TOKENIZE_CHAT)
		st = encode_chat(e, c->arena, c->chat, &tokens, &c->reply->text, &err);
	else
		st = tokenizer_encode(e->tokenizer, c->text, c->text_n, NULL, 0, c->tokenize_flags, &tokens, &err);
	if (st != STATUS_OK) {
		token_buf_free(&tokens);
		command_fail(e, c, &err, out);
		return;
	}
	c->reply->tokens = tokens.ids;
	c->reply->n_tokens = tokens.n;
	command_answer(e, c, out);
}

static void handle_detokenize(struct engine *e, struct command *c, struct list *out)
{
	struct error err;
	for (size_t i = 0; i < c->tokens.n; i++) {
		int32_t id = c->tokens.ids[i];
		if (id < 0 || id >= tokenizer_n_vocab(e->tokenizer)) {
			error_set_param(&err, STATUS_INVALID, "tokens",
			                "token id %" PRId32 " at position %zu is outside the vocabulary of %" PRId32,
			                id, i, tokenizer_n_vocab(e->tokenizer));
			command_fail(e, c, &err, out);
			return;
		}
	}
	tokenizer_decode(e->tokenizer, c->tokens.ids, c->tokens.n, true, &c->reply->text);
	if (c->reply->text.failed) {
		error_set(&err, STATUS_NOMEM, "no memory for the text");
		command_fail(e, c, &err, out);
		return;
	}
	command_answer(e, c, out);
}

/* ---- Documents: a part of each in turn, between other commands ---- */

static void cancel_split(struct engine *e, struct list *splits, uint64_t id, struct list *out)
{
	struct error err;
	list_each(l, next, splits) {
		struct command *c = list_entry(l, struct command, link);
		if (c->id != id)
			continue;
		list_remove(&c->link);
		error_set(&err, STATUS_CANCELLED, "cancelled");
		command_fail(e, c, &err, out);
	}
}

static void continue_splits(struct engine *e, struct list *splits, struct list *out)
{
	struct list *l = list_pop_front(splits);
	struct command *c = l ? list_entry(l, struct command, link) : NULL;
	struct error err;
	bool done;
	if (!c)
		return;
	enum status st = splitting_next(c->splitting, e->tokenizer, buf_str(&c->reply->text), &done, &err);
	if (st != STATUS_OK) {
		command_fail(e, c, &err, out);
	} else if (done) {
		splitting_take(c->splitting, &c->reply->chunks, &c->reply->n_chunks);
		command_answer(e, c, out);
	} else {
		list_push_back(splits, &c->link);
	}
}

static void handle(struct engine *e, struct command *c, struct list *splits, struct list *out)
{
	struct error err;
	if (c->type == COMMAND_CANCEL) {
		cancel_split(e, splits, c->id, out);
		mailbox_post(&e->worker_box, &c->link);
		return;
	}
	if (engine_state(e) != ENGINE_READY) {
		error_set(&err, STATUS_BUSY,
		          engine_state(e) == ENGINE_LOADING ? "the model is still loading"
		                                            : "the model is not available");
		command_fail(e, c, &err, out);
		return;
	}
	switch (c->type) {
	case COMMAND_GENERATE:
		handle_generate(e, c, out);
		break;
	case COMMAND_TOKENIZE:
	case COMMAND_TOKENIZE_CHAT:
		handle_tokenize(e, c, out);
		break;
	case COMMAND_DETOKENIZE:
		handle_detokenize(e, c, out);
		break;
	case COMMAND_SPLIT:
		list_push_back(splits, &c->link);
		break;
	default:
		command_destroy(c);
	}
}

void *text_thread_main(void *engine)
{
	struct engine *e = engine;
	struct list commands, splits, out;
	list_init(&commands);
	list_init(&splits);
	list_init(&out);
	for (;;) {
		if (list_empty(&splits))
			mailbox_wait(&e->text_box, &commands, -1);
		else
			mailbox_take(&e->text_box, &commands);
		for (struct list *l; (l = list_pop_front(&commands));) {
			struct command *c = list_entry(l, struct command, link);
			if (c->type == COMMAND_STOP) {
				command_destroy(c);
				goto stop;
			}
			handle(e, c, &splits, &out);
			mailbox_post_all(&e->events, &out);
		}
		continue_splits(e, &splits, &out);
		mailbox_post_all(&e->events, &out);
	}
stop:
	for (struct list *l; (l = list_pop_front(&commands));)
		command_destroy(list_entry(l, struct command, link));
	for (struct list *l; (l = list_pop_front(&splits));)
		command_destroy(list_entry(l, struct command, link));
	return NULL;
}
