#include "server/params.h"

#include "server/compact.h"
#include "server/kv_cache.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/random.h>

#define TRY(expr)                                                                                                      \
	do {                                                                                                           \
		enum status try_status = (expr);                                                                       \
		if (try_status != STATUS_OK)                                                                           \
			return try_status;                                                                             \
	} while (0)

static enum status no_memory(struct error *err)
{
	return error_set(err, STATUS_NOMEM, "There is no memory for the request.");
}

/* ---- Sampling ---- */

/* Ranges are OpenAI's where OpenAI has the parameter. */
static const struct {
	const char *key;
	size_t offset; /* of a float in struct sampling_params */
	double min, max;
} numbers[] = {
	{"temperature", offsetof(struct sampling_params, temperature), 0, 2},
	{"top_p", offsetof(struct sampling_params, top_p), 0, 1},
	{"min_p", offsetof(struct sampling_params, min_p), 0, 1},
	{"typical_p", offsetof(struct sampling_params, typical_p), 0, 1},
	{"repeat_penalty", offsetof(struct sampling_params, repeat_penalty), 0.01, 100},
	{"repetition_penalty", offsetof(struct sampling_params, repeat_penalty), 0.01, 100},
	{"presence_penalty", offsetof(struct sampling_params, presence_penalty), -2, 2},
	{"frequency_penalty", offsetof(struct sampling_params, frequency_penalty), -2, 2},
};

static enum status read_sampling(struct params *p, const struct json *body, struct error *err)
{
	struct sampling_params *s = &p->proto->sampling;
	for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
		struct json j = json_get(body, numbers[i].key);
		float *field = (float *)((char *)s + numbers[i].offset);
		double v = *field;
		TRY(json_read_number(&j, numbers[i].min, numbers[i].max, &v, err));
		if (json_has(&j))
			*field = (float)v;
	}
	struct json top_k = json_get(body, "top_k"), last_n = json_get(body, "repeat_last_n");
	struct json seed = json_get(body, "seed");
	int64_t k = s->top_k, window = s->penalty_last_n, number;
	TRY(json_read_int(&top_k, -1, INT32_MAX, &k, err));
	TRY(json_read_int(&last_n, -1, INT32_MAX, &window, err));
	s->top_k = (int32_t)k;
	s->penalty_last_n = (int32_t)window;
	if (json_has(&seed)) {
		TRY(json_read_int(&seed, INT64_MIN, INT64_MAX, &number, err));
		s->seed = (uint64_t)number;
	} else if (getrandom(&s->seed, sizeof s->seed, GRND_NONBLOCK) != sizeof s->seed) {
		s->seed = (uint64_t)clock_now_ns(clock_system());
	}
	return STATUS_OK;
}

static enum status add_bias(struct sampling_params *s, int64_t token, const struct json *value, struct error *err)
{
	double bias = 0;
	if (!json_has(value))
		return json_fail(value, STATUS_INVALID, err, "must be a number.");
	TRY(json_read_number(value, -100, 100, &bias, err));
	s->bias[s->n_bias++] = (struct logit_bias){(int32_t)token, (float)bias};
	return STATUS_OK;
}

/* {"50256": -100}. Whether the vocabulary has the token is for the engine to say. */
static enum status read_bias(struct params *p, const struct json *body, struct error *err)
{
	struct sampling_params *s = &p->proto->sampling;
	struct json map = json_get(body, "logit_bias"), member;
	size_t n = json_len(&map);
	void *it = NULL;
	TRY(json_expect(&map, JSON_DICT, err));
	if (n == 0)
		return STATUS_OK;
	s->bias = calloc(n, sizeof *s->bias);
	if (!s->bias)
		return no_memory(err);
	while (json_next(&map, &it, &member)) {
		char *end;
		errno = 0;
		long token = strtol(member.key, &end, 10);
		if (end == member.key || *end || errno || token < 0 || token > INT32_MAX)
			return json_fail(&member, STATUS_INVALID, err, "has a key that is not a token id.");
		TRY(add_bias(s, token, &member, err));
	}
	return STATUS_OK;
}

static enum status read_logprobs(struct params *p, const struct json *body, enum params_api api, struct error *err)
{
	struct sampling_params *s = &p->proto->sampling;
	struct json logprobs = json_get(body, "logprobs"), top = json_get(body, "top_logprobs");
	int64_t n = -1;
	bool wanted = false;
	if (api == PARAMS_COMPLETION) {
		TRY(json_read_int(&logprobs, 0, SAMPLING_MAX_TOP_LOGPROBS, &n, err));
	} else if (api == PARAMS_CHAT) {
		TRY(json_read_bool(&logprobs, &wanted, err));
		n = 0;
		TRY(json_read_int(&top, 0, SAMPLING_MAX_TOP_LOGPROBS, &n, err));
		if (!wanted && n > 0)
			return json_fail(&top, STATUS_INVALID, err, "needs \"logprobs\": true.");
		if (!wanted)
			n = -1;
	}
	s->n_logprobs = (int32_t)n;
	return STATUS_OK;
}

/* ---- Limits and stops ---- */

static enum status read_limits(struct params *p, const struct json *body, enum params_api api, struct error *err)
{
	static const char *const keys[] = {[PARAMS_COMPLETION] = "max_tokens",
					   [PARAMS_CHAT] = "max_tokens",
					   [PARAMS_RESPONSE] = "max_output_tokens"};
	struct json max = json_get(body, keys[api]), newer = json_get(body, "max_completion_tokens");
	struct json ignore_eos = json_get(body, "ignore_eos"), skip = json_get(body, "skip_special_tokens");
	struct json timeout = json_get(body, "timeout");
	int64_t v = api == PARAMS_COMPLETION ? 16 : -1;
	double seconds = 0;
	bool skip_special = true;

	/* -1 is the way other local servers say "no limit". */
	TRY(json_read_int(&max, -1, INT32_MAX, &v, err));
	if (api != PARAMS_RESPONSE)
		TRY(json_read_int(&newer, -1, INT32_MAX, &v, err));
	if (v == 0 && api != PARAMS_COMPLETION)
		return json_fail(api != PARAMS_RESPONSE && json_has(&newer) ? &newer : &max, STATUS_INVALID, err,
		                 "must be at least 1.");
	p->has_max_tokens = v >= 0;
	p->proto->max_tokens = (int32_t)v;
	TRY(json_read_number(&timeout, 0.001, 2592000, &seconds, err));
	p->proto->timeout_ms = (int64_t)(seconds * 1000 + 0.5);
	TRY(json_read_bool(&ignore_eos, &p->proto->ignore_eos, err));
	TRY(json_read_bool(&skip, &skip_special, err));
	p->proto->keep_special = !skip_special;
	return STATUS_OK;
}

static enum status add_stop(struct params *p, const struct json *j, struct error *err)
{
	struct str s = json_text(j);
	if (!s.p)
		return json_fail(j, STATUS_INVALID, err, "must be a string.");
	if (s.n == 0)
		return json_fail(j, STATUS_INVALID, err, "is an empty string, which every answer contains.");
	return engine_request_add_stop(p->proto, s.p, s.n) ? STATUS_OK : no_memory(err);
}

static enum status read_stops(struct params *p, const struct json *body, struct error *err)
{
	struct json stop = json_get(body, "stop"), ids = json_get(body, "stop_token_ids");
	size_t n = json_len(&ids);

	if (json_kind(&stop) == JSON_TEXT)
		TRY(add_stop(p, &stop, err));
	else if (json_has(&stop) && json_kind(&stop) != JSON_LIST)
		return json_fail(&stop, STATUS_INVALID, err, "must be a string or an array of strings.");
	else if (json_len(&stop) > PARAMS_MAX_STOPS)
		return json_fail(&stop, STATUS_INVALID, err, "has more than %d entries.", PARAMS_MAX_STOPS);
	for (size_t i = 0; json_kind(&stop) == JSON_LIST && i < json_len(&stop); i++) {
		struct json item = json_at(&stop, i);
		TRY(add_stop(p, &item, err));
	}
	TRY(json_expect(&ids, JSON_LIST, err));
	if (n == 0)
		return STATUS_OK;
	p->proto->stop_tokens = calloc(n, sizeof *p->proto->stop_tokens);
	if (!p->proto->stop_tokens)
		return no_memory(err);
	for (size_t i = 0; i < n; i++) {
		struct json item = json_at(&ids, i);
		int64_t id = -1;
		TRY(json_read_int(&item, 0, INT32_MAX, &id, err));
		if (id < 0)
			return json_fail(&item, STATUS_INVALID, err, "must be a token id.");
		p->proto->stop_tokens[p->proto->n_stop_tokens++] = (int32_t)id;
	}
	return STATUS_OK;
}

/* ---- The rest ---- */

static enum status read_streaming(struct params *p, const struct json *body, enum params_api api, struct error *err)
{
	struct json stream = json_get(body, "stream"), options = json_get(body, "stream_options");
	TRY(json_read_bool(&stream, &p->stream, err));
	if (api == PARAMS_RESPONSE)
		return STATUS_OK;
	TRY(json_expect(&options, JSON_DICT, err));
	if (json_has(&options) && !p->stream)
		return json_fail(&options, STATUS_INVALID, err, "is only allowed with \"stream\": true.");
	struct json usage = json_get(&options, "include_usage"), every = json_get(&options, "continuous_usage_stats");
	TRY(json_read_bool(&usage, &p->include_usage, err));
	TRY(json_read_bool(&every, &p->continuous_usage, err));
	/* As in vLLM, usage in every chunk is a variation of usage at all. */
	p->continuous_usage = p->continuous_usage && p->include_usage;
	return STATUS_OK;
}

static enum status read_choices(struct params *p, const struct json *body, enum params_api api, struct error *err)
{
	struct json n = json_get(body, "n"), best_of = json_get(body, "best_of"), echo = json_get(body, "echo");
	struct json suffix = json_get(body, "suffix"), ids = json_get(body, "return_token_ids");
	int64_t v = 1, best;
	struct str after = {NULL, 0};
	if (api == PARAMS_RESPONSE)
		return STATUS_OK;
	TRY(json_read_int(&n, 1, PARAMS_MAX_CHOICES, &v, err));
	p->n = (int32_t)v;
	TRY(json_read_bool(&ids, &p->return_token_ids, err));
	if (api == PARAMS_CHAT)
		return STATUS_OK;
	TRY(json_read_bool(&echo, &p->echo, err));
	best = v;
	TRY(json_read_int(&best_of, 1, PARAMS_MAX_CHOICES, &best, err));
	if (best != v)
		return json_fail(&best_of, STATUS_UNSUPPORTED, err, "is only supported when it equals n.");
	TRY(json_read_text(&suffix, &after, err));
	if (after.n)
		return json_fail(&suffix, STATUS_UNSUPPORTED, err,
				 "is not supported: the model completes forward only.");
	return STATUS_OK;
}

static enum status read_session(struct params *p, const struct json *body, struct str header, struct error *err)
{
	struct json id = json_get(body, "session_id");
	struct str s = {NULL, 0};
	TRY(json_read_text(&id, &s, err));
	if (s.p)
		return params_session_id(s, "session_id", p->proto->session, err);
	if (header.p)
		return params_session_id(header, "x-session-token", p->proto->session, err);
	return STATUS_OK;
}

/* Requests share KV only with those of the same salt. */
static enum status read_cache_salt(struct params *p, const struct json *body, struct error *err)
{
	enum { MAX_SALT_BYTES = 256 };
	struct json salt = json_get(body, "cache_salt");
	struct str s = {NULL, 0};
	TRY(json_read_text(&salt, &s, err));
	if (!s.p)
		return STATUS_OK;
	if (s.n > MAX_SALT_BYTES || memchr(s.p, '\0', s.n))
		return json_fail(&salt, STATUS_INVALID, err, "must be at most 256 bytes without a NUL.");
	p->proto->cache_salt = strndup(s.p, s.n);
	return p->proto->cache_salt ? STATUS_OK : error_set(err, STATUS_NOMEM, "There is no memory for the request.");
}

/* As in the Responses API. */
static enum status read_truncation(struct params *p, const struct json *body, enum params_api api, struct error *err)
{
	struct json truncation = json_get(body, "truncation");
	struct str s = {"disabled", 8};
	TRY(json_read_text(&truncation, &s, err));
	p->truncate = str_is(s, "auto");
	if (!p->truncate && !str_is(s, "disabled"))
		return json_fail(&truncation, STATUS_INVALID, err, "must be \"auto\" or \"disabled\".");
	if (p->truncate && api == PARAMS_COMPLETION)
		return json_fail(&truncation, STATUS_UNSUPPORTED, err,
		                 "cannot be \"auto\" here: a raw prompt has no turns to leave out.");
	return STATUS_OK;
}

/* What the answer must be: a JSON text, or a call of a tool. */
static enum status read_form(struct params *p, struct engine *e, const struct json *body, enum params_api api,
			     struct error *err)
{
	bool flat = api == PARAMS_RESPONSE;
	struct json text = json_get(body, "text"),
		    format = json_get(flat ? &text : body, flat ? "format" : "response_format");
	if (flat)
		TRY(json_expect(&text, JSON_DICT, err));
	TRY(answer_format_read(&format, flat, &p->proto->grammar, err));
	if (api == PARAMS_COMPLETION)
		return STATUS_OK;
	if (!p->proto->grammar)
		TRY(tools_read(&p->tools, body, flat, engine_info(e), &p->proto->grammar, err));
	else {
		struct grammar *call = NULL;
		enum status status = tools_read(&p->tools, body, flat, engine_info(e), &call, err);
		grammar_unref(call);
		TRY(status);
		if (p->tools.active)
			return json_fail(&format, STATUS_UNSUPPORTED, err,
					 "cannot be combined with tools, unless \"tool_choice\" is \"none\".");
	}
	/* Marks of these families are special tokens. */
	if (p->tools.active && p->tools.family != TOOLS_TAGGED)
		p->proto->keep_special = true;
	return STATUS_OK;
}

enum status params_session_id(struct str s, const char *param, char out[ENGINE_SESSION_ID_MAX + 1], struct error *err)
{
	bool ok = s.n > 0 && s.n <= ENGINE_SESSION_ID_MAX;
	for (size_t i = 0; ok && i < s.n; i++) {
		char c = s.p[i];
		ok = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
		     c == '.' || c == '-';
	}
	if (!ok)
		return error_set_param(err, STATUS_INVALID, param,
				       "%s must be 1 to %d of the characters A-Z a-z 0-9 _ . -", param,
				       ENGINE_SESSION_ID_MAX);
	memcpy(out, s.p, s.n);
	out[s.n] = '\0';
	return STATUS_OK;
}

enum status params_parse(struct params *p, struct engine *e, int32_t tenant, const struct json *body,
                         enum params_api api, struct str session_header, struct error *err)
{
	*p = (struct params){.n = 1};
	p->proto = engine_request_create(e);
	if (!p->proto)
		return no_memory(err);
	p->proto->tenant = tenant;
	struct json temperature = json_get(body, "temperature"), top_p = json_get(body, "top_p");
	p->has_temperature = json_has(&temperature);
	p->has_top_p = json_has(&top_p);
	TRY(read_sampling(p, body, err));
	TRY(read_bias(p, body, err));
	TRY(read_logprobs(p, body, api, err));
	TRY(read_limits(p, body, api, err));
	TRY(read_stops(p, body, err));
	TRY(read_streaming(p, body, api, err));
	TRY(read_choices(p, body, api, err));
	TRY(read_session(p, body, session_header, err));
	TRY(read_cache_salt(p, body, err));
	TRY(read_truncation(p, body, api, err));
	if (api == PARAMS_CHAT)
		TRY(compact_refuse(body, "here \"truncation\": \"auto\" leaves out the oldest turns", err));
	if (api == PARAMS_COMPLETION)
		TRY(compact_refuse(body, "a raw prompt has no turns", err));
	TRY(kv_cache_read(body, engine_info(e), &p->proto->context, &p->tell_kv_cache, err));
	return read_form(p, e, body, api, err);
}

void params_free(struct params *p)
{
	engine_request_destroy(p->proto);
	p->proto = NULL;
	tools_free(&p->tools);
}

/* A malloc'd copy; *ok turns false when there is no memory. */
static void *copy_array(const void *from, size_t n, size_t size, bool *ok)
{
	void *to = NULL;
	if (n) {
		to = malloc(n * size);
		if (to)
			memcpy(to, from, n * size);
		else
			*ok = false;
	}
	return to;
}

struct engine_request *params_request(const struct params *p, struct engine *e, int choice)
{
	const struct engine_request *from = p->proto;
	struct engine_request *r = engine_request_create(e);
	bool ok = true;
	if (!r)
		return NULL;
	r->tenant = from->tenant;
	r->context = from->context;
	r->sampling = from->sampling;
	r->sampling.seed += (uint64_t)choice;
	r->sampling.bias = copy_array(from->sampling.bias, from->sampling.n_bias, sizeof *from->sampling.bias, &ok);
	r->stop_tokens = copy_array(from->stop_tokens, from->n_stop_tokens, sizeof *from->stop_tokens, &ok);
	r->n_stop_tokens = r->stop_tokens ? from->n_stop_tokens : 0;
	for (size_t i = 0; ok && i < from->n_stops; i++)
		ok = engine_request_add_stop(r, from->stops[i].p, from->stops[i].n);
	r->cache_salt = from->cache_salt ? strdup(from->cache_salt) : NULL;
	if (!ok || (from->cache_salt && !r->cache_salt)) {
		engine_request_destroy(r);
		return NULL;
	}
	/* One choice carries the session on; the prefix index shares the prompt with the others. */
	if (choice == 0)
		memcpy(r->session, from->session, sizeof r->session);
	r->grammar = grammar_ref(from->grammar);
	r->max_tokens = from->max_tokens;
	r->timeout_ms = from->timeout_ms;
	r->ignore_eos = from->ignore_eos;
	r->keep_special = from->keep_special;
	return r;
}
