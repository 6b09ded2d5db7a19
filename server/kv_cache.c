#include "server/kv_cache.h"

#include <strings.h>

#include "server/compact.h"

#define TRY(expr)                                                                                                      \
	do {                                                                                                           \
		enum status try_status = (expr);                                                                       \
		if (try_status != STATUS_OK)                                                                           \
			return try_status;                                                                             \
	} while (0)

/*
 * Bounds of an entropy in nats; weights that are even over all tokens that a context may ever have come to less than
 * the latter.
 */
static const double ENTROPY_LEAST = 0.001, ENTROPY_MOST = 20;

static enum status read_size(const struct json *field, int64_t min, int32_t *out, struct error *err)
{
	int64_t v = *out;
	TRY(json_read_int(field, min, INT32_MAX, &v, err));
	*out = (int32_t)v;
	return STATUS_OK;
}

static enum status read_policy(const struct json *field, struct engine_context *out, struct error *err)
{
	struct str name = json_text(field);
	struct buf all = BUF_INIT;
	TRY(json_expect(field, JSON_TEXT, err));
	for (size_t i = 0; engine_context_policy(i); i++) {
		if (str_is(name, engine_context_policy(i)))
			out->policy = engine_context_policy(i);
		buf_printf(&all, i ? ", %s" : "%s", engine_context_policy(i));
	}
	if (!out->policy && json_has(field))
		json_fail(field, STATUS_INVALID, err, "must be one of: %s.", all.failed ? "?" : all.data);
	buf_free(&all);
	return out->policy || !json_has(field) ? STATUS_OK : STATUS_INVALID;
}

/* Pages have one type, that of the server; whoever depends on it can say so. */
static enum status check_dtype(const struct json *field, const struct engine_info *info, struct error *err)
{
	struct str name = json_text(field);
	TRY(json_expect(field, JSON_TEXT, err));
	if (!json_has(field) ||
	    (info && name.n == strlen(info->kv_type) && strncasecmp(name.p, info->kv_type, name.n) == 0))
		return STATUS_OK;
	return json_fail(field, STATUS_INVALID, err,
	                 "must be \"%s\": the KV of all requests is kept as --kv-dtype of the server says.",
	                 info ? info->kv_type : "?");
}

/* A share, which has to be exact to a thousandth. */
static enum status read_ratio(const struct json *field, struct engine_context *out, struct error *err)
{
	double v = -1;
	TRY(json_read_number(field, 0, 0.95, &v, err));
	if (!json_has(field))
		return STATUS_OK;
	out->by_share = true;
	out->shrink_permille = (int32_t)(v * 1000 + 0.5);
	return STATUS_OK;
}

static enum status read_aggregation(const struct json *field, struct engine_context *out, struct error *err)
{
	struct str s = {NULL, 0};
	TRY(json_read_text(field, &s, err));
	out->by_age = str_is(s, "recency");
	out->by_mass = str_is(s, "attention_mass");
	if (s.p && !out->by_age && !out->by_mass && !str_is(s, "norm_ratio"))
		return json_fail(field, STATUS_INVALID, err, "must be one of: norm_ratio, attention_mass, recency.");
	return STATUS_OK;
}

static enum status read_trigger(const struct json *field, struct engine_context *out, struct error *err)
{
	struct json member;
	void *it = NULL;
	TRY(json_expect(field, JSON_DICT, err));
	while (json_has(field) && json_next(field, &it, &member)) {
		if (!strcmp(member.key, "tokens"))
			TRY(read_size(&member, 1, &out->trigger_tokens, err));
		else if (!strcmp(member.key, "free_pages"))
			TRY(read_size(&member, 1, &out->trigger_free_pages, err));
		else if (!strcmp(member.key, "entropy"))
			TRY(json_read_number(&member, ENTROPY_LEAST, ENTROPY_MOST, &out->trigger_entropy, err));
		else
			return json_fail(
				&member, STATUS_INVALID, err,
				"is not known; a policy is triggered by \"tokens\", \"free_pages\" and \"entropy\".");
	}
	return STATUS_OK;
}

/* true, or an object that says how; 0 is none in it, and -1 in `out`. */
static enum status read_page_in(const struct json *field, struct engine_context *out, struct error *err)
{
	struct json member;
	void *it = NULL;
	if (json_kind(field) != JSON_DICT) {
		if (json_kind(field) > JSON_BOOL)
			return json_fail(field, STATUS_INVALID, err,
					 "must be true, false or an object with \"every\" and \"recompute\".");
		return json_read_bool(field, &out->page_in, err);
	}
	out->page_in = true;
	while (json_next(field, &it, &member)) {
		bool every = !strcmp(member.key, "every");
		int32_t *to = every ? &out->recall_every : &out->recompute_tokens;
		if (!every && strcmp(member.key, "recompute") != 0)
			return json_fail(&member, STATUS_INVALID, err,
					 "is not known; the fields of page_in are \"every\" and \"recompute\".");
		TRY(read_size(&member, 0, to, err));
		if (json_has(&member) && *to == 0)
			*to = -1;
	}
	return STATUS_OK;
}

enum status kv_cache_read(const struct json *body, const struct engine_info *info, struct engine_context *out,
                          bool *given, struct error *err)
{
	struct json field = json_get(body, "kv_cache"), member;
	void *it = NULL;
	TRY(json_expect(&field, JSON_DICT, err));
	*given = json_has(&field);
	while (*given && json_next(&field, &it, &member)) {
		const char *key = member.key;
		if (!strcmp(key, "policy"))
			TRY(read_policy(&member, out, err));
		else if (!strcmp(key, "start_size"))
			TRY(read_size(&member, 0, &out->start_size, err));
		else if (!strcmp(key, "recent_size"))
			TRY(read_size(&member, 1, &out->recent_size, err));
		else if (!strcmp(key, "max_cache_size"))
			TRY(read_size(&member, 1, &out->max_cache_size, err));
		else if (!strcmp(key, "cache_length_shrink_ratio"))
			TRY(read_ratio(&member, out, err));
		else if (!strcmp(key, "aggregation"))
			TRY(read_aggregation(&member, out, err));
		else if (!strcmp(key, "trigger"))
			TRY(read_trigger(&member, out, err));
		else if (!strcmp(key, "page_in"))
			TRY(read_page_in(&member, out, err));
		else if (!strcmp(key, "diagnostics"))
			TRY(json_read_bool(&member, &out->diagnostics, err));
		else if (!strcmp(key, "dtype"))
			TRY(check_dtype(&member, info, err));
		else
			return json_fail(
				&member, STATUS_INVALID, err,
				"is not known; the fields of kv_cache are policy, start_size, recent_size, "
				"max_cache_size, "
				"cache_length_shrink_ratio, aggregation, trigger, page_in, diagnostics and dtype.");
	}
	return STATUS_OK;
}

/* null is what there is no figure of. */
static void write_diagnostics(struct buf *out, const struct engine_diagnostics *d)
{
	const struct {
		const char *key;
		double value;
		bool known;
	} figures[] = {
		{"attention_entropy", d->entropy, d->n_rows > 0},
		{"largest_weight", d->largest, d->n_rows > 0},
		{"drift", d->drift, d->n_samples > 0},
		{"drift_most", d->drift_most, d->n_samples > 0},
	};
	buf_puts(out, ",\"diagnostics\":{");
	for (size_t i = 0; i < sizeof figures / sizeof *figures; i++) {
		buf_printf(out, "\"%s\":", figures[i].key);
		if (figures[i].known)
			buf_json_number(out, figures[i].value);
		else
			buf_puts(out, "null");
		buf_puts(out, ",");
	}
	buf_printf(out, "\"drift_samples\":%d}", d->n_samples);
}

void kv_cache_write(struct buf *out, const struct engine_context_usage *u, const struct compacted *compacted,
                    bool asked)
{
	int32_t below = u->pages_tier[ENGINE_TIER_RAM] + u->pages_tier[ENGINE_TIER_DISK];
	if (!u->policy || (!asked && below == 0 && u->policy == engine_context_policy(0)))
		return;
	buf_printf(
		out,
		",\"kv_cache\":{\"policy\":\"%s\",\"tokens_logical\":%d,\"tokens_resident\":%d,\"evicted_tokens\":%d,"
		"\"merged_tokens\":%d,\"shrink_ratio\":%.6g,\"bytes\":%llu,\"fallback_pages\":%d",
		u->policy, u->tokens_logical, u->tokens_resident, u->evicted_tokens, u->merged_tokens,
		u->tokens_logical > 0 ? (double)(u->tokens_logical - u->tokens_resident) / u->tokens_logical : 0.0,
		(unsigned long long)u->bytes, u->fallback_pages);
	write_pages_by_tier(u->pages, u->pages_tier, 0, out);
	if (u->moved)
		buf_printf(out, ",\"start_moved\":%d", u->moved);
	if (u->chooses)
		buf_printf(out, ",\"tokens_read\":%d", u->tokens_read);
	if (u->pages_in)
		buf_printf(out,
			   ",\"page_in\":{\"pages\":%d,\"pages_below\":%d,\"pages_lost\":%d,\"choices\":%d,"
			   "\"pages_recomputed\":%d,\"tokens_recomputed\":%d}",
			   u->pages_back, u->pages_below, u->pages_missing, u->recalls, u->pages_recomputed,
			   u->tokens_recomputed);
	if (u->trigger_asked && u->trigger != ENGINE_TRIGGER_NONE)
		buf_printf(out, ",\"trigger\":{\"fired\":\"%s\",\"tokens\":%d}", engine_trigger_name(u->trigger),
			   u->trigger_tokens);
	else if (u->trigger_asked)
		buf_puts(out, ",\"trigger\":{\"fired\":null,\"tokens\":null}");
	if (u->diagnostics.wanted)
		write_diagnostics(out, &u->diagnostics);
	if (compacted)
		compacted_write(compacted, out);
	buf_putc(out, '}');
}
