#include "server/compact.h"

#include <stdio.h>
#include <stdlib.h>

#include "server/lanes.h"
#include "server/messages.h"

/* What the model is asked, and what is left of that in the window. */
static const char question[] =
	"Summarise our conversation up to here, for yourself to go on from: what was said, asked and decided, "
	"with all names, numbers, places and dates, and what is still open. "
	"Write the summary and nothing else.";
static const char short_question[] = "Summarise our conversation up to here.";

/* ---- One compaction ---- */

struct compact {
	struct list link; /* app.compactions */
	struct app *app;
	const struct compact_ops *ops;
	void *arg;
	struct compact_settings settings;
	struct buf instructions, tools, messages; /* as in struct compact_request */
	bool tools_as_text, force, background, hurried;
	struct compact_base base;
	struct engine_request *like; /* what requests start from; only what compact_request.like is for */
	int32_t answer_tokens;
	int64_t deadline_ms; /* of a request with a timeout; 0: none */
	bool noted; /* that it has started */
	char session[ENGINE_SESSION_ID_MAX + 1];
	char method[8], path[64], peer[72], request_id[80];

	struct waiter measure; /* on its way while `measuring` */
	bool measuring, writing;
	struct generation *generation; /* that writes it */
	int32_t keep, n_old;	       /* turns that stay, and those that go */
	size_t cut;		       /* messages that go with them, system messages between included */
	bool partial;		       /* not all that should go did: it would not have fitted */
	bool folded;		       /* messages and base are an earlier window, which was still too long */
	int32_t tokens;		       /* that they come to */
	struct buf written;	       /* so far, of the summary */
	bool cut_off;		       /* it reached its max_output_tokens */
	struct compacted made;
};

static int64_t now_ms(void)
{
	return clock_now_ms(clock_system());
}

static void destroy(struct compact *c)
{
	list_remove(&c->link);
	if (c->background)
		c->app->n_background--;
	else
		c->app->n_preparing--;
	buf_free(&c->instructions);
	buf_free(&c->tools);
	buf_free(&c->messages);
	buf_free(&c->written);
	engine_request_destroy(c->like);
	compacted_free(&c->made);
	free(c);
}

static void note(struct compact *c, int state)
{
	struct compact_note n = {.background = c->background,
	                         .tokens_before = c->made.tokens_before,
	                         .tokens_after = c->made.tokens_after,
	                         .turns = c->made.turns};
	n.state = state;
	c->noted = state == COMPACT_NOTE_STARTED;
	if (c->session[0])
		lanes_note_compaction(c->app, c->like->tenant, c->session, &n);
}

void compact_cancel(struct compact *c)
{
	if (!c)
		return;
	c->ops = NULL;
	if (c->noted)
		note(c, COMPACT_NOTE_FAILED);
	if (c->generation)
		generation_cancel(c->generation, NULL);
	c->generation = NULL;
	if (!c->measuring)
		destroy(c); /* else when the measure comes */
}

bool compact_is_writing(const struct compact *c)
{
	return c->writing;
}

void compact_hurry(struct compact *c)
{
	c->hurried = true;
	if (c->generation)
		generation_hurry(c->generation);
}

/* The end: *made is the owner's. */
static void end(struct compact *c, const struct failure *f)
{
	if (c->folded && !c->made.window.len) {
		c->made.window = c->messages;
		c->messages = BUF_INIT;
		c->made.turns = c->base.turns;
		c->made.messages = c->base.messages;
		c->made.tokens_after = c->tokens;
	}
	const struct compact_ops *ops = c->ops;
	void *arg = c->arg;
	if (c->noted)
		note(c, !f && c->made.window.len ? COMPACT_NOTE_DONE : COMPACT_NOTE_FAILED);
	struct compacted made = c->made;
	struct metrics *m = &c->app->metrics;
	bool done = !f && made.window.len > 0;
	if (done || made.failed[0])
		m->compactions[c->background][done ? METRICS_COMPACTION_DONE : METRICS_COMPACTION_FAILED]++;
	if (done)
		m->compacted_tokens += (uint64_t)(made.tokens_before - made.tokens_after);
	c->made = (struct compacted){0};
	destroy(c);
	ops->done(arg, &made, f);
	compacted_free(&made);
}

/* There is none, and the conversation is as it was, or as an earlier pass left it. */
static void give_up(struct compact *c, const char *why)
{
	buf_free(&c->made.window);
	c->made.turns = c->made.messages = 0;
	if (!c->folded) {
		buf_free(&c->made.summary);
		snprintf(c->made.failed, sizeof c->made.failed, "%s", why);
	}
	end(c, NULL);
}

/* ---- Prompts ---- */

static void put_message(struct buf *out, const char *role, struct str text)
{
	buf_printf(out, "{\"role\":\"%s\",\"content\":", role);
	buf_json_string(out, text.p, text.n);
	buf_putc(out, '}');
}

/* {"messages":[instructions, messages, ending],"tools":...}. `ending` may be NULL. */
static void write_conversation(const struct compact *c, struct str messages, const char *ending, struct buf *out)
{
	bool has_instructions = c->instructions.len && c->instructions.data[0] == '"';
	buf_puts(out, "{\"messages\":[");
	if (has_instructions) {
		buf_puts(out, "{\"role\":\"system\",\"content\":");
		buf_append_buf(out, &c->instructions);
		buf_putc(out, '}');
	}
	if (has_instructions && messages.n)
		buf_putc(out, ',');
	buf_append(out, messages.p, messages.n);
	if (ending) {
		buf_putc(out, ',');
		put_message(out, "user", str_from(ending));
	}
	buf_puts(out, "],\"tools\":");
	if (c->tools.len)
		buf_append_buf(out, &c->tools);
	else
		buf_puts(out, "null");
	buf_putc(out, '}');
}

/* The values of a template for such a text, in an arena of their own. ready: an answer is to follow. */
static enum status build(const struct compact *c, const struct buf *text, bool ready, struct arena **arena,
			 struct value **chat, struct error *err)
{
	struct json_doc *doc = NULL;
	struct json root;
	enum status status = text->failed ? error_set(err, STATUS_NOMEM, "There is no memory for the request.")
					  : json_parse(buf_str(text), "The conversation", &doc, &root, err);
	if (status == STATUS_OK) {
		struct json messages = json_get(&root, "messages"), tools = json_get(&root, "tools");
		struct chat_request q = {.messages = &messages,
					 .tools = &tools,
					 .tools_as_text = c->tools_as_text,
					 .add_generation_prompt = ready,
					 .text_n = text->len};
		status = chat_build(&q, arena, chat, err);
	}
	json_doc_free(doc);
	return status;
}

static void on_measured(struct waiter *w, const struct engine_event *ev);

/* Has the prompt's tokens counted. */
static enum status measure(struct compact *c, struct str messages, struct error *err)
{
	struct buf text = BUF_INIT;
	struct arena *arena;
	struct value *chat;
	write_conversation(c, messages, NULL, &text);
	enum status status = build(c, &text, true, &arena, &chat, err);
	buf_free(&text);
	if (status != STATUS_OK)
		return status;
	c->measuring = true;
	c->measure.event = on_measured;
	uint64_t id = engine_next_id(c->app->engine);
	app_wait(c->app, &c->measure, id);
	engine_tokenize_chat(c->app->engine, id, arena, chat);
	return STATUS_OK;
}

/* ---- Which turns go ---- */

/* The messages as a document, [n], and what they belong to. */
struct parsed {
	struct json_doc *doc;
	struct json root, list;
	struct turns turns;
};

static enum status parse(const struct compact *c, struct parsed *p, struct error *err)
{
	struct buf text = BUF_INIT;
	enum status status;
	*p = (struct parsed){0};
	buf_puts(&text, "{\"messages\":[");
	buf_append_buf(&text, &c->messages);
	buf_puts(&text, "]}");
	status = text.failed ? error_set(err, STATUS_NOMEM, "There is no memory for the request.")
			     : json_parse(buf_str(&text), "The conversation", &p->doc, &p->root, err);
	buf_free(&text);
	if (status != STATUS_OK)
		return status;
	p->list = json_get(&p->root, "messages");
	return turns_read(&p->turns, &p->list, err);
}

static void parsed_free(struct parsed *p)
{
	turns_free(&p->turns);
	json_doc_free(p->doc);
}

static int32_t n_turns(const struct turns *t)
{
	int32_t last = -1;
	for (size_t i = 0; i < t->n; i++)
		last = t->of[i] > last ? t->of[i] : last;
	return last + 1;
}

/* How many turns have to go at least so that something is gained: one that is no summary. */
static int32_t fewest(const struct compact *c)
{
	return c->base.turns ? 2 : 1;
}

static size_t first_of_turn(const struct turns *t, int32_t turn)
{
	size_t i = 0;
	while (i < t->n && t->of[i] < turn)
		i++;
	return i;
}

/* ---- Writing ---- */

static const struct generation_ops ops;

static struct engine_request *summary_request(const struct compact *c)
{
	const struct engine_request *like = c->like;
	struct engine_request *r = engine_request_create(c->app->engine);
	if (!r)
		return NULL;
	r->tenant = like->tenant;
	r->context = like->context;
	r->timeout_ms = like->timeout_ms;
	/* Half of the time is for the answer. */
	if (c->deadline_ms)
		r->timeout_ms = c->deadline_ms - now_ms() > 2 ? (c->deadline_ms - now_ms()) / 2 : 1;
	r->cache_salt = like->cache_salt ? strdup(like->cache_salt) : NULL;
	r->sampling.temperature = 0;
	r->background = c->background && !c->hurried;
	if (like->cache_salt && !r->cache_salt) {
		engine_request_destroy(r);
		return NULL;
	}
	return r;
}

/* Submits a request for the messages; NOMEM and what chat_build() says. `into` may be NULL: nobody hears of it. */
static enum status submit(struct compact *c, struct str messages, const char *ending, int32_t max_tokens,
			  const struct generation_ops *to, struct generation **into, struct error *err)
{
	struct buf text = BUF_INIT;
	struct engine_request *r = summary_request(c);
	struct generation_origin origin = {
		.method = c->method, .path = c->path, .peer = c->peer, .request_id = c->request_id};
	struct generation *g = generation_create(c->app, 1, &origin, to, c);
	enum status status = r && g ? STATUS_OK : error_set(err, STATUS_NOMEM, "There is no memory for the request.");
	if (status == STATUS_OK) {
		write_conversation(c, messages, ending, &text);
		r->input = ENGINE_INPUT_CHAT;
		r->max_tokens = max_tokens;
		status = build(c, &text, max_tokens > 0, &r->arena, &r->chat, err);
	}
	buf_free(&text);
	if (status != STATUS_OK) {
		engine_request_destroy(r);
		generation_discard(g);
		return status;
	}
	generation_add(g, r);
	if (into)
		*into = g;
	generation_start(g);
	return STATUS_OK;
}

/* The messages that go, as they stand: their KV is there. */
static void write_old(const struct compact *c, const struct json *list, struct buf *out)
{
	for (size_t i = 0; i < c->cut; i++) {
		struct json message = json_at(list, i);
		if (i)
			buf_putc(out, ',');
		json_write(out, &message);
	}
}

/* Has the oldest c->n_old turns summarised. */
static void write_summary(struct compact *c)
{
	struct parsed p;
	struct buf old = BUF_INIT;
	struct error err = {0};
	enum status status = parse(c, &p, &err);
	buf_clear(&c->written);
	if (status == STATUS_OK) {
		c->cut = first_of_turn(&p.turns, c->n_old);
		write_old(c, &p.list, &old);
		status = old.failed ? STATUS_NOMEM
				    : submit(c, buf_str(&old), question, c->settings.max_output_tokens, &ops,
					     &c->generation, &err);
	}
	parsed_free(&p);
	buf_free(&old);
	if (status != STATUS_OK)
		give_up(c, err.message[0] ? err.message : "There is no memory for a summary.");
}

/* How many turns are to go when c->keep of them stay; 0: none that would be worth it. */
static enum status count_old(struct compact *c, int32_t *n_old, struct error *err)
{
	struct parsed p;
	enum status status = parse(c, &p, err);
	int32_t n = n_turns(&p.turns);
	parsed_free(&p);
	*n_old = status == STATUS_OK && n - c->keep >= fewest(c) ? n - c->keep : 0;
	return status;
}

/* Fewer turns stay, if fewer can; false when it is the last one alone already. */
static bool keep_fewer(struct compact *c)
{
	if (c->keep == 1)
		return false;
	c->keep /= 2;
	return true;
}

static bool fits(const struct compact *c, int32_t prompt_tokens)
{
	const struct engine_info *info = engine_info(c->app->engine);
	int32_t n_ctx = info ? info->n_ctx : 0;
	return prompt_tokens <= n_ctx - (c->answer_tokens >= 0 ? c->answer_tokens : n_ctx / 8);
}

/* It is too long: older turns go, if there are any. A conversation that fits keeps what it was told to keep. */
static void begin(struct compact *c)
{
	struct error err = {0};
	enum status status = count_old(c, &c->n_old, &err);
	c->partial = false;
	while (status == STATUS_OK && c->n_old == 0 && !fits(c, c->tokens) && keep_fewer(c))
		status = count_old(c, &c->n_old, &err);
	if (status != STATUS_OK)
		give_up(c, err.message);
	else if (c->n_old == 0)
		end(c, NULL);
	else {
		if (!c->noted)
			note(c, COMPACT_NOTE_STARTED);
		write_summary(c);
	}
}

/* System messages, the summary as a turn, and what stays. */
static enum status write_window(struct compact *c, struct error *err)
{
	struct parsed p;
	struct buf *out = &c->made.window;
	enum status status = parse(c, &p, err);
	int32_t messages = 0;
	buf_clear(out);
	for (size_t i = 0; status == STATUS_OK && i < c->cut; i++) {
		struct json message = json_at(&p.list, i);
		messages += p.turns.of[i] >= 0;
		if (p.turns.of[i] >= 0)
			continue;
		json_write(out, &message);
		buf_putc(out, ',');
	}
	put_message(out, "user", str_from(short_question));
	buf_putc(out, ',');
	put_message(out, "assistant", buf_str(&c->written));
	for (size_t i = c->cut; status == STATUS_OK && i < json_len(&p.list); i++) {
		struct json message = json_at(&p.list, i);
		buf_putc(out, ',');
		json_write(out, &message);
	}
	parsed_free(&p);
	c->made.turns = c->n_old;
	c->made.messages = messages;
	/* Two messages and a turn of these were a summary. */
	if (c->base.turns) {
		c->made.turns += c->base.turns - 1;
		c->made.messages += c->base.messages - 2;
	}
	return status == STATUS_OK && out->failed ? error_set(err, STATUS_NOMEM, "There is no memory for the summary.")
						  : status;
}

/* A summary without the white space around it. */
static void trim(struct buf *text)
{
	size_t from = 0, to = text->len;
	while (from < to && (unsigned char)text->data[from] <= ' ')
		from++;
	while (to > from && (unsigned char)text->data[to - 1] <= ' ')
		to--;
	if (to < text->len)
		text->data[to] = '\0';
	if (from)
		memmove(text->data, text->data + from, to - from + 1);
	text->len = to - from;
}

static void summarised(struct compact *c)
{
	struct error err = {0};
	enum status status;
	trim(&c->written);
	if (c->written.failed)
		give_up(c, "There is no memory for the summary.");
	else if (c->written.len == 0)
		give_up(c, "The model wrote no summary.");
	else if ((status = write_window(c, &err)) != STATUS_OK ||
		 (status = measure(c, buf_str(&c->made.window), &err)) != STATUS_OK)
		give_up(c, err.message);
}

/* ---- The generation's events ---- */

static void on_prompt(void *arg, int i, const struct engine_event *ev)
{
	(void)arg;
	(void)i;
	(void)ev;
}

static void on_begin(void *arg)
{
	struct compact *c = arg;
	c->writing = true;
	generation_set_status(c->generation, 200);
}

static void on_text(void *arg, int i, const struct engine_event *ev)
{
	struct compact *c = arg;
	(void)i;
	buf_append_buf(&c->written, &ev->text);
	c->cut_off = ev->type == ENGINE_EVENT_DONE && ev->finish == ENGINE_FINISH_LENGTH;
}

static void on_written(void *arg, const struct failure *f, bool began)
{
	struct compact *c = arg;
	struct generation_usage u;
	(void)began;
	generation_usage(c->generation, &u);
	c->generation = NULL;
	c->made.input_tokens += u.prompt_tokens;
	c->made.cached_tokens += u.cached_tokens;
	c->made.output_tokens += u.completion_tokens;
	if (!f) {
		summarised(c);
	} else if (f->kind == FAILURE_CONTEXT_LENGTH && c->n_old / 2 >= fewest(c)) {
		c->n_old /= 2;
		c->partial = true;
		write_summary(c);
	} else if (f->kind == FAILURE_CANCELLED && !c->background) {
		end(c, f); /* the server ends */
	} else {
		give_up(c, f->message);
	}
}

static const struct generation_ops ops = {
	.prompt = on_prompt, .begin = on_begin, .token = on_text, .done = on_text, .ended = on_written};

/* ---- The KV of the window, which nobody waits for ---- */

static void nothing_event(void *arg, int i, const struct engine_event *ev)
{
	(void)arg;
	(void)i;
	(void)ev;
}

static void nothing_begun(void *arg)
{
	(void)arg;
}

static void nothing_ended(void *arg, const struct failure *f, bool began)
{
	(void)arg;
	(void)f;
	(void)began;
}

static const struct generation_ops unheard = {.prompt = nothing_event,
					      .begin = nothing_begun,
					      .token = nothing_event,
					      .done = nothing_event,
					      .ended = nothing_ended};

/* Without it the next turn computes a little more, so whatever goes wrong is no matter. */
static void warm(struct compact *c)
{
	struct error err;
	if (!c->app->draining)
		submit(c, buf_str(&c->made.window), NULL, 0, &unheard, NULL, &err);
}

/* ---- Steps ---- */

/* The window is too long still, so its own turns are summarised in turn, if there are any: each pass leaves less. */
static void fold(struct compact *c, int32_t n)
{
	buf_free(&c->messages);
	c->messages = c->made.window;
	c->made.window = BUF_INIT;
	c->base = (struct compact_base){c->made.turns, c->made.messages};
	c->tokens = n;
	c->folded = true;
	begin(c);
}

static void measured_after(struct compact *c, int32_t n)
{
	c->made.tokens_after = n;
	if (n >= c->tokens) {
		give_up(c, "The summary would be no shorter than what it stands for.");
		return;
	}
	buf_free(&c->made.summary);
	c->made.summary = c->written;
	c->written = BUF_INIT;
	c->made.cut = c->cut_off;
	if (!fits(c, n) || (c->partial && n > c->settings.threshold)) {
		fold(c, n);
	} else {
		if (c->background && !c->hurried)
			warm(c);
		end(c, NULL);
	}
}

static void on_measured(struct waiter *w, const struct engine_event *ev)
{
	struct compact *c = list_entry(w, struct compact, measure);
	struct failure f;
	int32_t n = ev->n_tokens > INT32_MAX ? INT32_MAX : (int32_t)ev->n_tokens;
	c->measuring = false;
	if (!c->ops) {
		destroy(c);
		return;
	}
	if (ev->type == ENGINE_EVENT_ERROR && c->made.window.len) {
		give_up(c, ev->error.message);
		return;
	}
	if (ev->type == ENGINE_EVENT_ERROR) {
		failure_from(&f, &ev->error);
		end(c, &f);
		return;
	}
	if (c->made.window.len) {
		measured_after(c, n);
		return;
	}
	c->made.tokens_before = c->tokens = n;
	if (!c->force && n <= c->settings.threshold) {
		end(c, NULL);
	} else if (c->ops->needed && !c->ops->needed(c->arg)) {
		destroy(c);
	} else {
		begin(c);
	}
}

/* ---- Life ---- */

static void copy(char *to, size_t cap, const char *from)
{
	snprintf(to, cap, "%s", from ? from : "");
}

static bool copy_request(struct compact *c, const struct compact_request *q)
{
	const struct engine_request *like = q->like;
	c->settings = q->settings;
	c->keep = q->settings.keep_turns;
	c->tools_as_text = q->tools_as_text;
	c->background = q->background;
	c->force = q->force || q->background;
	c->base = q->base;
	c->answer_tokens = q->answer_tokens;
	c->made.background = q->background;
	buf_append(&c->instructions, q->instructions.p, q->instructions.n);
	buf_append(&c->tools, q->tools.p, q->tools.n);
	buf_append(&c->messages, q->messages.p, q->messages.n);
	copy(c->session, sizeof c->session, q->session);
	copy(c->method, sizeof c->method, q->origin->method);
	copy(c->path, sizeof c->path, q->background ? "compaction" : q->origin->path);
	copy(c->peer, sizeof c->peer, q->origin->peer);
	copy(c->request_id, sizeof c->request_id, q->origin->request_id);
	c->like = engine_request_create(c->app->engine);
	if (!c->like)
		return false;
	c->like->tenant = like->tenant;
	c->like->context = like->context;
	c->like->timeout_ms = q->background ? 0 : like->timeout_ms;
	c->deadline_ms = c->like->timeout_ms > 0 ? now_ms() + c->like->timeout_ms : 0;
	c->like->cache_salt = like->cache_salt ? strdup(like->cache_salt) : NULL;
	return !c->instructions.failed && !c->tools.failed && !c->messages.failed &&
	       (!like->cache_salt || c->like->cache_salt);
}

enum status compact_start(struct app *a, const struct compact_request *q, const struct compact_ops *to, void *arg,
			  struct compact **out, struct error *err)
{
	struct compact *c = calloc(1, sizeof *c);
	enum status status;
	*out = NULL;
	if (!c)
		return error_set(err, STATUS_NOMEM, "There is no memory for the request.");
	c->app = a;
	c->ops = to;
	c->arg = arg;
	list_push_back(&a->compactions, &c->link);
	if (q->background)
		a->n_background++;
	else
		a->n_preparing++;
	c->background = q->background;
	status = copy_request(c, q) ? measure(c, buf_str(&c->messages), err)
				    : error_set(err, STATUS_NOMEM, "There is no memory for the request.");
	if (status != STATUS_OK)
		destroy(c);
	else
		*out = c;
	return status;
}
