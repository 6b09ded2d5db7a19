/*
 * POST /v1/completions, as OpenAI specifies it (platform.openai.com/docs/api-reference/completions): with echo and
 * logprobs it scores a prompt. return_token_ids follows vLLM.
 */
#include <math.h>
#include <stdlib.h>

#include "engine/base/utf8.h"
#include "server/completion.h"

enum { MAX_MEMBERS = 1024 /* prompts times choices */ };

/* The four parallel arrays of the legacy log-probability object. */
enum { LP_TOKENS, LP_TOKEN_LOGPROBS, LP_TOP, LP_OFFSETS };

/* ---- Log-probabilities ---- */

/*
 * A token as a JSON string, which may be a key. Bytes that are no text by themselves are spelled out as OpenAI does,
 * "bytes:\xe2\x80", and so is NUL, which some readers do not take in keys.
 */
static void write_token(struct buf *out, struct str piece)
{
	if (utf8_valid(piece.p, piece.n) && !memchr(piece.p, 0, piece.n)) {
		buf_json_string(out, piece.p, piece.n);
		return;
	}
	buf_puts(out, "\"bytes:");
	for (size_t i = 0; i < piece.n; i++)
		buf_printf(out, "\\\\x%02x", (unsigned)(unsigned char)piece.p[i]);
	buf_putc(out, '"');
}

/*
 * {"token": logprob, ...}: the alternatives and the token itself; of two tokens with the same text the likelier stays.
 */
static void write_top(struct completion *c, struct buf *out, const struct sample_result *s, struct str piece)
{
	struct str seen[SAMPLING_MAX_TOP_LOGPROBS + 1];
	int32_t n_top =
		s->n_top < c->params.proto->sampling.n_logprobs ? s->n_top : c->params.proto->sampling.n_logprobs;
	size_t n_seen = 0;
	buf_putc(out, '{');
	for (int32_t i = 0; i <= n_top; i++) {
		bool own = i == n_top, twice = false;
		struct str p = own ? piece : engine_token_piece(c->app->engine, s->top[i].token);
		for (size_t k = 0; k < n_seen && !twice; k++)
			twice = str_eq(seen[k], p);
		if (twice)
			continue;
		if (n_seen)
			buf_putc(out, ',');
		seen[n_seen++] = p;
		write_token(out, p);
		buf_putc(out, ':');
		write_logprob(out, own ? s->logprob : s->top[i].logprob);
	}
	buf_putc(out, '}');
}

/* `offset`: characters of the choice's text before this token. `s` is NULL for a token that nothing precedes. */
static void add_logprob(struct completion *c, struct completion_choice *ch, struct str piece,
			const struct sample_result *s, size_t offset)
{
	if (ch->logprobs[LP_TOKENS].len)
		for (size_t k = 0; k < 4; k++)
			buf_putc(&ch->logprobs[k], ',');
	write_token(&ch->logprobs[LP_TOKENS], piece);
	if (s) {
		write_logprob(&ch->logprobs[LP_TOKEN_LOGPROBS], s->logprob);
		write_top(c, &ch->logprobs[LP_TOP], s, piece);
	} else {
		buf_puts(&ch->logprobs[LP_TOKEN_LOGPROBS], "null");
		buf_puts(&ch->logprobs[LP_TOP], "null");
	}
	buf_printf(&ch->logprobs[LP_OFFSETS], "%zu", offset);
}

/* Code points that begin in s. */
static size_t count_chars(struct str s)
{
	size_t n = 0;
	for (size_t i = 0; i < s.n; i++)
		n += ((unsigned char)s.p[i] & 0xC0) != 0x80;
	return n;
}

static void completion_logprob(struct completion *c, struct completion_choice *ch, const struct engine_event *ev)
{
	add_logprob(c, ch, buf_str(&ev->piece), &ev->sample, ch->offset);
	ch->offset += count_chars(buf_str(&ev->piece));
}

/* The prompt's own log-probabilities. A token that is not in the text (BOS) takes no room in it. */
static void add_prompt_logprobs(struct completion *c, struct completion_choice *ch, const struct engine_event *ev)
{
	struct str rest = buf_str(&ev->text);
	for (size_t i = 0; i < ev->n_tokens; i++) {
		struct str piece = engine_token_piece(c->app->engine, ev->tokens[i]), in_text = piece;
		/* SentencePiece's first word loses its space. */
		if (in_text.n && in_text.p[0] == ' ' &&
		    !(rest.n >= in_text.n && memcmp(rest.p, in_text.p, in_text.n) == 0)) {
			in_text.p++;
			in_text.n--;
		}
		add_logprob(c, ch, piece, isnan(ev->logprobs[i].logprob) ? NULL : &ev->logprobs[i], ch->offset);
		if (rest.n >= in_text.n && memcmp(rest.p, in_text.p, in_text.n) == 0) {
			ch->offset += count_chars(in_text);
			rest.p += in_text.n;
			rest.n -= in_text.n;
		}
	}
}

static void completion_prompt(struct completion *c, struct completion_choice *ch, const struct engine_event *ev)
{
	if (!c->params.echo)
		return;
	buf_append(&ch->text, ev->text.data, ev->text.len);
	if (c->params.proto->sampling.n_logprobs >= 0 && ev->logprobs)
		add_prompt_logprobs(c, ch, ev);
	else
		ch->offset = count_chars(buf_str(&ev->text));
}

/* ---- Shape ---- */

static void write_choice(struct completion *c, int i, const char *finish, bool whole, struct buf *out)
{
	const struct completion_choice *ch = &c->choices[i];
	const struct buf *lp = ch->logprobs;
	buf_printf(out, "{\"index\":%d,\"text\":", i);
	buf_json_string(out, buf_str(&ch->text).p, ch->text.len);
	buf_puts(out, ",\"logprobs\":");
	if (c->params.proto->sampling.n_logprobs < 0 || (!whole && !lp[LP_TOKENS].len))
		buf_puts(out, "null");
	else
		buf_printf(out, "{\"tokens\":[%s],\"token_logprobs\":[%s],\"top_logprobs\":[%s],\"text_offset\":[%s]}",
			   lp[LP_TOKENS].len ? lp[LP_TOKENS].data : "",
			   lp[LP_TOKEN_LOGPROBS].len ? lp[LP_TOKEN_LOGPROBS].data : "",
			   lp[LP_TOP].len ? lp[LP_TOP].data : "", lp[LP_OFFSETS].len ? lp[LP_OFFSETS].data : "");
	if (finish)
		buf_printf(out, ",\"finish_reason\":\"%s\"", finish);
	else
		buf_puts(out, ",\"finish_reason\":null");
	if (c->params.return_token_ids) {
		if (whole || ch->prompt_ids.len)
			write_token_ids(out, "prompt_token_ids", &ch->prompt_ids);
		write_token_ids(out, "token_ids", &ch->token_ids);
	}
	buf_putc(out, '}');
}

/* The echoed prompt comes as a chunk of its own; without echo the stream begins with the first text. */
static void completion_intro(struct completion *c, int i, struct buf *out)
{
	struct completion_choice *ch = &c->choices[i];
	if (!c->params.echo)
		return;
	write_choice(c, i, NULL, false, out);
	buf_clear(&ch->text);
	buf_clear(&ch->prompt_ids);
	for (size_t k = 0; k < 4; k++)
		buf_clear(&ch->logprobs[k]);
}

static void completion_chunk(struct completion *c, int i, const char *finish, struct buf *out)
{
	write_choice(c, i, finish, false, out);
}

static void completion_choice(struct completion *c, int i, struct buf *out)
{
	write_choice(c, i, c->choices[i].finish, true, out);
}

static const struct completion_shape shape = {
	.object = "text_completion",
	.chunk_object = "text_completion",
	.id_prefix = "cmpl-",
	.prompt = completion_prompt,
	.intro = completion_intro,
	.logprob = completion_logprob,
	.chunk = completion_chunk,
	.choice = completion_choice,
};

/* ---- Prompts ---- */

static enum status no_memory(struct error *err)
{
	return error_set(err, STATUS_NOMEM, "There is no memory for the request.");
}

static bool is_number(const struct json *j)
{
	return json_kind(j) == JSON_INT || json_kind(j) == JSON_FLOAT;
}

static enum status read_tokens(const struct json *list, struct engine_request *r, struct error *err)
{
	size_t n = json_len(list);
	r->input = ENGINE_INPUT_TOKENS;
	r->tokens = malloc(n * sizeof *r->tokens);
	if (!r->tokens)
		return no_memory(err);
	for (size_t i = 0; i < n; i++) {
		struct json item = json_at(list, i);
		int64_t id = -1;
		if (!is_number(&item))
			return json_fail(&item, STATUS_INVALID, err, "must be a token id.");
		if (json_read_int(&item, 0, INT32_MAX, &id, err) != STATUS_OK)
			return STATUS_INVALID;
		r->tokens[i] = (int32_t)id;
	}
	r->n_tokens = n;
	return STATUS_OK;
}

/* One prompt: a string, or a non-empty array of token ids. */
static enum status read_prompt(const struct json *j, struct engine_request *r, struct error *err)
{
	struct str s = json_text(j);
	if (json_kind(j) == JSON_LIST && json_len(j))
		return read_tokens(j, r, err);
	if (json_kind(j) != JSON_TEXT)
		return json_fail(j, STATUS_INVALID, err, "must be a string or a non-empty array of token ids.");
	r->input = ENGINE_INPUT_TEXT;
	r->text = malloc(s.n + 1);
	if (!r->text)
		return no_memory(err);
	memcpy(r->text, s.p, s.n);
	r->text[s.n] = '\0';
	r->text_n = s.n;
	return STATUS_OK;
}

/* How many prompts there are: an array of ids is one prompt, an array of anything else is several. */
static enum status count_prompts(const struct json *prompt, int n_choices, int *n, struct error *err)
{
	struct json first = json_at(prompt, 0);
	if (json_kind(prompt) != JSON_TEXT && json_kind(prompt) != JSON_LIST)
		return json_fail(prompt, STATUS_INVALID, err, "must be a string, an array of strings, or token ids.");
	if (json_kind(prompt) == JSON_LIST && json_len(prompt) == 0)
		return json_fail(prompt, STATUS_INVALID, err, "must not be empty.");
	*n = 1;
	if (json_kind(prompt) == JSON_TEXT || is_number(&first))
		return STATUS_OK;
	if (json_len(prompt) > (size_t)(MAX_MEMBERS / n_choices))
		return json_fail(prompt, STATUS_INVALID, err, "has too many entries: prompts times n may be %d.",
				 MAX_MEMBERS);
	*n = (int)json_len(prompt);
	return STATUS_OK;
}

static enum status add_prompts(struct completion *c, const struct json *prompt, int n_prompts, struct error *err)
{
	struct json first = json_at(prompt, 0);
	bool several = json_kind(prompt) == JSON_LIST && !is_number(&first);
	for (int i = 0; i < n_prompts; i++) {
		struct json one = several ? json_at(prompt, (size_t)i) : *prompt;
		for (int k = 0; k < c->params.n; k++) {
			/* A session has one history: only the first prompt's first choice continues it. */
			struct engine_request *r = completion_request(c, i * c->params.n + k);
			enum status status;
			if (!r)
				return no_memory(err);
			/* Different prompts may share a seed; the choices of one may not. */
			r->sampling.seed = c->params.proto->sampling.seed + (uint64_t)k;
			r->want_prompt_logprobs = c->params.echo && r->sampling.n_logprobs >= 0;
			status = read_prompt(&one, r, err);
			if (status != STATUS_OK) {
				engine_request_destroy(r);
				return status;
			}
			completion_add(c, r);
		}
	}
	return STATUS_OK;
}

void api_completions(struct http_exchange *x, void *app)
{
	struct app *a = app;
	struct json_doc *doc;
	struct json root, model, prompt;
	struct params params = {0};
	struct completion *c;
	struct failure f;
	struct error err = {0};
	int n_prompts = 0;

	if (!app_accepts(a, &f)) {
		reply_failure(x, &f);
		return;
	}
	if (!read_body(x, false, &doc, &root))
		return;
	model = json_get(&root, "model");
	prompt = json_get(&root, "prompt");
	if (!app_serves(a, &model, &f)) {
		reply_failure(x, &f);
		goto done;
	}
	if (params_parse(&params, a->engine, http_principal(x), &root, PARAMS_COMPLETION,
	                 http_header(x, "x-session-token"), &err) != STATUS_OK ||
	    count_prompts(&prompt, params.n, &n_prompts, &err) != STATUS_OK) {
		reply_error(x, &err);
		goto done;
	}
	c = completion_create(a, x, &shape, &params, n_prompts);
	if (!c)
		goto done;
	if (add_prompts(c, &prompt, n_prompts, &err) == STATUS_OK)
		completion_start(c);
	else
		completion_abort(c, &err);
done:
	params_free(&params);
	json_doc_free(doc);
}
