#include "server/document.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "server/coherence.h"

enum {
	CHUNK_TOKENS = 2048,    /* of a part, where nothing is said */
	OUTPUT_TOKENS = 256,
	OVERLAP_PERMILLE = 150,
	PARALLEL = 4,
	LABEL_TOKENS = 16,      /* "Part 12:" and an empty line */
	FRAME_TOKENS = 96,      /* of a chat template, and the sentence that says which part it is */
	MIN_CHUNK_TOKENS = 64,
	ARENA_SPARE_BYTES = 64 << 10,
};

static const char reduce_begins[] =
	"These are answers to one instruction, each for one part of a document, in their order. The instruction was: ",
		  reduce_ends[] =
			  "\nPut the answers together into one for the whole document, as the instruction says.";

enum state { WAITING, RUNNING, DONE };

/* A request: of a part (level 0), or of the answers [first, first + n) of the level below. */
struct call {
	enum state state;
	int32_t level;
	size_t first, n; /* level 0: the part; else calls */
	struct buf output;
	int32_t *tokens; /* [n_tokens] */
	size_t n_tokens, cap;
	const char *finish;
};

struct document {
	char *instruction, *reduce_instruction, *cache_salt;
	int32_t max_chunk_tokens, max_output_tokens, overlap_permille, parallel, tenant;
	float temperature;
	uint64_t seed;

	struct buf text;
	struct engine_chunk *chunks; /* [n_chunks] */
	size_t n_chunks;
	struct call *calls; /* [n_calls], level by level */
	size_t n_calls, cap;
	size_t level_first, next; /* where the last level begins, and the first call that may still wait */
	int32_t n_running;
	int64_t prompt_tokens, cached_tokens, completion_tokens, requests;
};

/* ---- Life ---- */

static char *copy(struct str s, bool *failed)
{
	char *c = s.p ? strndup(s.p, s.n) : NULL;
	*failed = *failed || (s.p && !c);
	return c;
}

/* Every byte is a token at most, but for the frame around it. */
static int64_t most_tokens(const char *text)
{
	return text ? (int64_t)strlen(text) : 0;
}

/* What a prompt takes beside the text of a part or the answers. */
static int64_t frame_tokens(const struct document *d)
{
	int64_t map = most_tokens(d->instruction);
	int64_t reduce = d->reduce_instruction ? most_tokens(d->reduce_instruction)
	                                       : map + (int64_t)sizeof reduce_begins + (int64_t)sizeof reduce_ends;
	return FRAME_TOKENS + (map > reduce ? map : reduce);
}

static enum status check_sizes(struct document *d, const struct engine_info *info, struct error *err)
{
	int64_t frame = frame_tokens(d), room = info->n_ctx - d->max_output_tokens - frame,
		least = 2 * ((int64_t)d->max_output_tokens + LABEL_TOKENS);
	if (room < MIN_CHUNK_TOKENS)
		return error_set_param(err, STATUS_INVALID, "max_output_tokens",
		                       "The context of %d tokens leaves no room for a part of a document beside %lld "
		                       "tokens of instructions and an answer "
		                       "of %d.",
		                       info->n_ctx, (long long)frame, d->max_output_tokens);
	if (d->max_chunk_tokens == 0) {
		int64_t wanted = least > CHUNK_TOKENS ? least : CHUNK_TOKENS;
		d->max_chunk_tokens = (int32_t)(room < wanted ? room : wanted);
	}
	if (d->max_chunk_tokens > room)
		return error_set_param(err, STATUS_INVALID, "max_chunk_tokens",
		                       "max_chunk_tokens can be at most %lld: the context has %d tokens, of which up "
		                       "to %lld are for instructions and %d "
		                       "for an answer.",
		                       (long long)room, info->n_ctx, (long long)frame, d->max_output_tokens);
	/* Else answers could not be put together two by two. */
	if (d->max_chunk_tokens < least)
		return error_set_param(err, STATUS_INVALID, "max_chunk_tokens",
		                       "max_chunk_tokens must be at least %lld: two answers of max_output_tokens (%d) "
		                       "have to fit in it.",
		                       (long long)least, d->max_output_tokens);
	return STATUS_OK;
}

enum status document_create(const struct document_params *p, const struct engine_info *info, struct document **out,
                            struct error *err)
{
	bool failed = false;
	if (!p->split_only && (!p->instruction.p || p->instruction.n == 0))
		return error_set_param(err, STATUS_INVALID, "instruction",
		                       "instruction must say what to do with each part of the document.");
	struct document *d = calloc(1, sizeof *d);
	if (!d)
		return error_set(err, STATUS_NOMEM, "There is no memory for the document.");
	d->instruction = copy(p->instruction, &failed);
	d->reduce_instruction = copy(p->reduce_instruction, &failed);
	d->cache_salt = copy(p->cache_salt ? str_from(p->cache_salt) : (struct str){NULL, 0}, &failed);
	d->max_chunk_tokens = p->max_chunk_tokens;
	d->max_output_tokens = p->max_output_tokens ? p->max_output_tokens : OUTPUT_TOKENS;
	d->overlap_permille = p->overlap_permille >= 0 ? p->overlap_permille : OVERLAP_PERMILLE;
	d->parallel = p->parallel ? p->parallel : PARALLEL;
	d->tenant = p->tenant;
	d->temperature = (float)p->temperature;
	d->seed = p->seed;
	enum status st = STATUS_OK;
	if (failed)
		st = error_set(err, STATUS_NOMEM, "There is no memory for the document.");
	else if (!p->split_only)
		st = check_sizes(d, info, err);
	else if (d->max_chunk_tokens == 0)
		d->max_chunk_tokens = CHUNK_TOKENS;
	if (st != STATUS_OK) {
		document_destroy(d);
		return st;
	}
	*out = d;
	return STATUS_OK;
}

void document_destroy(struct document *d)
{
	if (!d)
		return;
	for (size_t i = 0; i < d->n_calls; i++) {
		buf_free(&d->calls[i].output);
		free(d->calls[i].tokens);
	}
	free(d->calls);
	free(d->chunks);
	buf_free(&d->text);
	free(d->instruction);
	free(d->reduce_instruction);
	free(d->cache_salt);
	free(d);
}

/* ---- Parts ---- */

void document_split(const struct document *d, struct engine_split_params *out)
{
	*out = (struct engine_split_params){.max_tokens = d->max_chunk_tokens, .overlap_permille = d->overlap_permille};
}

static struct call *add_call(struct document *d, int32_t level, size_t first, size_t n)
{
	if (d->n_calls == d->cap) {
		size_t cap = d->cap ? 2 * d->cap : 16;
		struct call *grown = realloc(d->calls, cap * sizeof *grown);
		if (!grown)
			return NULL;
		d->calls = grown;
		d->cap = cap;
	}
	struct call *c = &d->calls[d->n_calls++];
	*c = (struct call){.level = level, .first = first, .n = n};
	return c;
}

enum status document_begin_with(struct document *d, struct buf *text, struct engine_chunk *chunks, size_t n,
                                struct error *err)
{
	d->text = *text;
	d->chunks = chunks;
	d->n_chunks = n;
	*text = BUF_INIT;
	if (n == 0)
		return error_set_param(err, STATUS_INVALID, "input", "input has no text.");
	for (size_t i = 0; i < n; i++)
		if (!add_call(d, 0, i, 1))
			return error_set(err, STATUS_NOMEM, "There is no memory for the document.");
	return STATUS_OK;
}

enum status document_begin(struct document *d, struct engine_event *split, struct error *err)
{
	struct engine_chunk *chunks = split->chunks;
	split->chunks = NULL;
	return document_begin_with(d, &split->text, chunks, split->n_chunks, err);
}

/* ---- Requests ---- */

static void write_part(const struct document *d, const struct call *c, struct buf *out)
{
	const struct engine_chunk *k = &d->chunks[c->first];
	buf_puts(out, d->instruction);
	if (d->n_chunks == 1)
		buf_puts(out, "\n\nThis is the document:\n\n");
	else
		buf_printf(out, "\n\nThis is part %zu of %zu of a document:\n\n", c->first + 1, d->n_chunks);
	buf_append(out, d->text.data + k->start, k->end - k->start);
}

static void write_answers(const struct document *d, const struct call *c, struct buf *out)
{
	if (d->reduce_instruction) {
		buf_puts(out, d->reduce_instruction);
	} else {
		buf_puts(out, reduce_begins);
		buf_puts(out, d->instruction);
		buf_puts(out, reduce_ends);
	}
	for (size_t i = 0; i < c->n; i++) {
		buf_printf(out, "\n\nPart %zu:\n", i + 1);
		buf_append_buf(out, &d->calls[c->first + i].output);
	}
}

/* {"messages": [{"role": "user", "content": prompt}], "add_generation_prompt": true} */
static struct value *chat_of(struct arena *a, const struct buf *prompt)
{
	struct value *chat = value_dict(a), *messages = value_list(a), *turn = value_dict(a);
	bool ok = chat && messages && turn &&
	          value_dict_set(a, turn, "role", 4, value_string(a, "user", 4, VALUE_DATA)) &&
	          value_dict_set(a, turn, "content", 7, value_string(a, prompt->data, prompt->len, VALUE_DATA)) &&
	          value_list_add(a, messages, turn) && value_dict_set(a, chat, "messages", 8, messages) &&
	          value_dict_set(a, chat, "add_generation_prompt", 21, value_bool(a, true));
	return ok ? chat : NULL;
}

static struct engine_request *make_request(const struct document *d, struct engine *e, const struct call *c)
{
	struct buf prompt = BUF_INIT;
	struct engine_request *r = engine_request_create(e);
	if (!r)
		return NULL;
	if (c->level == 0)
		write_part(d, c, &prompt);
	else
		write_answers(d, c, &prompt);
	r->input = ENGINE_INPUT_CHAT;
	r->tenant = d->tenant;
	r->max_tokens = d->max_output_tokens;
	r->sampling.temperature = d->temperature;
	r->sampling.seed = d->seed + (uint64_t)(c - d->calls);
	r->cache_salt = d->cache_salt ? strdup(d->cache_salt) : NULL;
	r->arena = prompt.failed ? NULL : arena_create(4 * prompt.len + ARENA_SPARE_BYTES);
	r->chat = r->arena ? chat_of(r->arena, &prompt) : NULL;
	buf_free(&prompt);
	if (!r->chat || (d->cache_salt && !r->cache_salt)) {
		engine_request_destroy(r);
		return NULL;
	}
	return r;
}

enum status document_next(struct document *d, struct engine *e, struct engine_request **r, size_t *call,
                          struct error *err)
{
	*r = NULL;
	while (d->next < d->n_calls && d->calls[d->next].state != WAITING)
		d->next++;
	if (d->next == d->n_calls || d->n_running >= d->parallel)
		return STATUS_OK;
	struct call *c = &d->calls[d->next];
	*r = make_request(d, e, c);
	if (!*r)
		return error_set(err, STATUS_NOMEM, "There is no memory for the document.");
	c->state = RUNNING;
	d->n_running++;
	*call = d->next;
	return STATUS_OK;
}

enum status document_token(struct document *d, size_t call, const struct engine_event *ev)
{
	struct call *c = &d->calls[call];
	if (c->n_tokens == c->cap) {
		size_t cap = c->cap ? 2 * c->cap : 64;
		int32_t *grown = realloc(c->tokens, cap * sizeof *grown);
		if (!grown)
			return STATUS_NOMEM;
		c->tokens = grown;
		c->cap = cap;
	}
	c->tokens[c->n_tokens++] = ev->sample.token;
	buf_append_buf(&c->output, &ev->text);
	return c->output.failed ? STATUS_NOMEM : STATUS_OK;
}

/* A call without a request: an answer that is left over goes up as it is. */
static enum status lift(struct document *d, size_t from, struct call *c)
{
	const struct call *below = &d->calls[from];
	c->tokens = malloc((below->n_tokens + 1) * sizeof *c->tokens);
	buf_append_buf(&c->output, &below->output);
	if (!c->tokens || c->output.failed)
		return STATUS_NOMEM;
	if (below->n_tokens)
		memcpy(c->tokens, below->tokens, below->n_tokens * sizeof *c->tokens);
	c->n_tokens = c->cap = below->n_tokens;
	c->finish = below->finish;
	c->state = DONE;
	return STATUS_OK;
}

/* The answers of the last level, in groups as large as a part. */
static enum status add_level(struct document *d)
{
	size_t first = d->level_first, end = d->n_calls;
	int32_t level = d->calls[first].level + 1;
	d->level_first = end;
	while (first < end) {
		size_t n = 0;
		int64_t tokens = 0;
		while (first + n < end && (n < 2 || tokens + (int64_t)d->calls[first + n].n_tokens + LABEL_TOKENS <=
		                                            d->max_chunk_tokens)) {
			tokens += (int64_t)d->calls[first + n].n_tokens + LABEL_TOKENS;
			n++;
		}
		if (!add_call(d, level, first, n))
			return STATUS_NOMEM;
		if (n == 1 && lift(d, first, &d->calls[d->n_calls - 1]) != STATUS_OK)
			return STATUS_NOMEM;
		first += n;
	}
	return STATUS_OK;
}

static bool level_done(const struct document *d)
{
	for (size_t i = d->level_first; i < d->n_calls; i++)
		if (d->calls[i].state != DONE)
			return false;
	return true;
}

enum status document_done(struct document *d, size_t call, const struct engine_event *ev)
{
	struct call *c = &d->calls[call];
	buf_append_buf(&c->output, &ev->text);
	c->finish = ev->finish == ENGINE_FINISH_LENGTH ? "length" : "stop";
	c->state = DONE;
	d->n_running--;
	d->requests++;
	d->prompt_tokens += ev->usage.prompt_tokens;
	d->cached_tokens += ev->usage.cached_tokens;
	d->completion_tokens += ev->usage.completion_tokens;
	if (c->output.failed)
		return STATUS_NOMEM;
	return level_done(d) && d->n_calls - d->level_first > 1 ? add_level(d) : STATUS_OK;
}

bool document_ended(const struct document *d)
{
	return d->n_calls > 0 && d->n_calls - d->level_first == 1 && d->calls[d->level_first].state == DONE;
}

bool document_is_last(const struct document *d, size_t call)
{
	return call == d->level_first && d->n_calls - d->level_first == 1;
}

size_t document_n_chunks(const struct document *d)
{
	return d->n_chunks;
}

size_t document_n_calls(const struct document *d)
{
	return d->n_calls;
}

struct str document_output(const struct document *d)
{
	return buf_str(&d->calls[d->n_calls - 1].output);
}

/* ---- What is told of it ---- */

static void write_chunk(const struct document *d, size_t i, bool text, struct buf *out)
{
	const struct engine_chunk *k = &d->chunks[i];
	buf_printf(out, "{\"index\":%zu,\"start\":%zu,\"fresh\":%zu,\"end\":%zu,\"tokens\":%d,\"cut\":\"%s\"", i,
	           k->start, k->fresh, k->end, k->n_tokens, k->cut);
	if (text) {
		buf_puts(out, ",\"text\":");
		buf_json_string(out, d->text.data + k->start, k->end - k->start);
	}
}

void document_write_chunks(const struct document *d, bool text, struct buf *out)
{
	buf_putc(out, '[');
	for (size_t i = 0; i < d->n_chunks; i++) {
		if (i)
			buf_putc(out, ',');
		write_chunk(d, i, text, out);
		buf_putc(out, '}');
	}
	buf_putc(out, ']');
}

/* Where the level of a call begins. */
static size_t level_start(const struct document *d, size_t call)
{
	while (call > 0 && d->calls[call - 1].level == d->calls[call].level)
		call--;
	return call;
}

static void write_answer(const struct call *c, struct buf *out)
{
	buf_puts(out, ",\"output\":");
	buf_json_buf(out, &c->output);
	buf_printf(out, ",\"finish_reason\":\"%s\"", c->finish);
}

void document_write_call(const struct document *d, size_t call, struct buf *out)
{
	const struct call *c = &d->calls[call];
	size_t below = c->level > 0 ? level_start(d, c->first) : 0;
	buf_printf(out, "{\"level\":%d,\"index\":%zu,\"of\":[%zu,%zu]", c->level, call - level_start(d, call),
	           c->first - below, c->first - below + c->n - 1);
	write_answer(c, out);
	buf_putc(out, '}');
}

static enum status write_parts(const struct document *d, struct buf *out)
{
	double *c = malloc((d->n_chunks + 1) * sizeof *c), sum = 0, least = NAN;
	struct coherence_text *texts = malloc((d->n_chunks + 1) * sizeof *texts);
	size_t n = 0;
	enum status st = c && texts ? STATUS_OK : STATUS_NOMEM;
	for (size_t i = 0; st == STATUS_OK && i < d->n_chunks; i++)
		texts[i] = (struct coherence_text){d->calls[i].tokens, d->calls[i].n_tokens};
	if (st == STATUS_OK)
		st = coherence_of_neighbours(texts, d->n_chunks, c);
	buf_puts(out, ",\"chunks\":[");
	for (size_t i = 0; st == STATUS_OK && i < d->n_chunks; i++) {
		if (i)
			buf_putc(out, ',');
		write_chunk(d, i, false, out);
		write_answer(&d->calls[i], out);
		/* Of the last one there is no next. */
		double with_next = i + 1 < d->n_chunks ? c[i] : NAN;
		buf_puts(out, ",\"coherence_with_next\":");
		buf_json_number(out, with_next);
		buf_putc(out, '}');
		if (!isnan(with_next)) {
			sum += with_next;
			least = isnan(least) || with_next < least ? with_next : least;
			n++;
		}
	}
	buf_puts(out, "],\"coherence\":{\"mean\":");
	buf_json_number(out, n ? sum / (double)n : NAN);
	buf_puts(out, ",\"min\":");
	buf_json_number(out, least);
	buf_putc(out, '}');
	free(c);
	free(texts);
	return st;
}

enum status document_write_result(const struct document *d, struct buf *out)
{
	const struct call *last = &d->calls[d->n_calls - 1];
	bool any = false;
	buf_puts(out, "\"output\":");
	buf_json_buf(out, &last->output);
	buf_printf(out, ",\"finish_reason\":\"%s\"", last->finish);
	enum status st = write_parts(d, out);
	buf_puts(out, ",\"reductions\":[");
	for (size_t i = d->n_chunks; i < d->n_calls; i++) {
		if (d->calls[i].n < 2)
			continue;
		if (any)
			buf_putc(out, ',');
		any = true;
		document_write_call(d, i, out);
	}
	buf_printf(out,
	           "],\"usage\":{\"prompt_tokens\":%lld,\"completion_tokens\":%lld,\"total_tokens\":%lld,\"prompt_"
	           "tokens_details\":{"
	           "\"cached_tokens\":%lld},\"requests\":%lld}",
	           (long long)d->prompt_tokens, (long long)d->completion_tokens,
	           (long long)(d->prompt_tokens + d->completion_tokens), (long long)d->cached_tokens,
	           (long long)d->requests);
	return st == STATUS_OK && out->failed ? STATUS_NOMEM : st;
}
