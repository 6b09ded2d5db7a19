/* What clients ask of compactions, and what they are told of them. */
#include "server/compact.h"

enum {
	MIN_THRESHOLD = 128,
	MIN_SUMMARY = 16,
	DEFAULT_SUMMARY = 512,
	DEFAULT_KEEP = 2,
	MAX_KEEP = 1000,
	QUESTION_TOKENS = 96, /* the question and its marks, with room to spare */
};

/* ---- What is asked for ---- */

#define TRY(expr)                                                                                                      \
	do {                                                                                                           \
		enum status try_status = (expr);                                                                       \
		if (try_status != STATUS_OK)                                                                           \
			return try_status;                                                                             \
	} while (0)

static enum status read_number(const struct json *item, const char *key, int64_t min, int64_t max, int32_t *out,
			       struct error *err)
{
	struct json j = json_get(item, key);
	int64_t v = *out;
	TRY(json_read_int(&j, min, max, &v, err));
	*out = (int32_t)v;
	return STATUS_OK;
}

static struct compact_settings sized(int32_t threshold)
{
	return (struct compact_settings){
		.threshold = threshold,
		.max_output_tokens = threshold / 4 < DEFAULT_SUMMARY ? threshold / 4 : DEFAULT_SUMMARY,
		.keep_turns = DEFAULT_KEEP,
	};
}

struct compact_settings compact_defaults(const struct engine_info *info)
{
	int32_t quarter = info ? info->n_ctx / 4 : 0;
	return sized(quarter > MIN_THRESHOLD ? quarter : MIN_THRESHOLD);
}

static enum status read_compaction(const struct json *item, int32_t n_ctx, struct compact_settings *out,
				   struct error *err)
{
	struct json threshold = json_get(item, "compact_threshold");
	/* The summary and its question have to fit behind a conversation of that length. */
	int32_t most = n_ctx - QUESTION_TOKENS - MIN_SUMMARY;
	int64_t v = 0;
	if (most < MIN_THRESHOLD)
		return json_fail(item, STATUS_UNSUPPORTED, err, "is not possible: the context has only %d tokens.",
				 n_ctx);
	if (!json_has(&threshold))
		return json_fail(&threshold, STATUS_INVALID, err,
				 "is missing: the tokens past which older turns are summarised, from %d to %d.",
				 MIN_THRESHOLD, most);
	if (json_read_int(&threshold, MIN_THRESHOLD, most, &v, err) != STATUS_OK)
		return json_fail(
			&threshold, STATUS_INVALID, err,
			"must be from %d to %d: the context has %d tokens, of which a summary and its question take %d "
			"at least.",
			MIN_THRESHOLD, most, n_ctx, QUESTION_TOKENS + MIN_SUMMARY);
	*out = sized((int32_t)v);
	most = n_ctx - QUESTION_TOKENS - out->threshold;
	if (most > out->threshold / 2)
		most = out->threshold / 2;
	if (out->max_output_tokens > most)
		out->max_output_tokens = most;
	TRY(read_number(item, "max_output_tokens", MIN_SUMMARY, most, &out->max_output_tokens, err));
	return read_number(item, "keep_turns", 1, MAX_KEEP, &out->keep_turns, err);
}

enum status compact_read(const struct json *body, const struct engine_info *info, struct compact_settings *out,
			 struct error *err)
{
	struct json list = json_get(body, "context_management");
	*out = (struct compact_settings){0};
	TRY(json_expect(&list, JSON_LIST, err));
	if (json_len(&list) > 1)
		return json_fail(&list, STATUS_INVALID, err, "must have one entry, of the type \"compaction\".");
	for (size_t i = 0; i < json_len(&list); i++) {
		struct json item = json_at(&list, i), type = json_get(&item, "type");
		if (json_kind(&item) != JSON_DICT)
			return json_fail(&item, STATUS_INVALID, err, "must be an object.");
		if (!str_is(json_text(&type), "compaction"))
			return json_fail(&type, STATUS_UNSUPPORTED, err, "must be \"compaction\".");
		TRY(read_compaction(&item, info ? info->n_ctx : 0, out, err));
	}
	return STATUS_OK;
}

enum status compact_refuse(const struct json *body, const char *instead, struct error *err)
{
	struct json list = json_get(body, "context_management");
	if (!json_has(&list))
		return STATUS_OK;
	return json_fail(&list, STATUS_UNSUPPORTED, err,
			 "is possible with /v1/responses, over HTTP and WebSocket, whose answers have a place for the "
			 "summary; %s.",
			 instead);
}

/* ---- What came of it ---- */

void compacted_free(struct compacted *c)
{
	buf_free(&c->window);
	buf_free(&c->summary);
	*c = (struct compacted){0};
}

void compacted_write(const struct compacted *c, struct buf *out)
{
	if (!c->turns && !c->failed[0])
		return;
	buf_printf(out,
		   ",\"compaction\":{\"background\":%s,\"turns\":%d,\"messages\":%d,\"tokens_before\":%d,\"tokens_"
		   "after\":%d,"
		   "\"input_tokens\":%lld,\"cached_tokens\":%lld,\"output_tokens\":%lld,\"failed\":",
		   c->background ? "true" : "false", c->turns, c->messages, c->tokens_before, c->tokens_after,
		   (long long)c->input_tokens, (long long)c->cached_tokens, (long long)c->output_tokens);
	if (c->failed[0])
		buf_json_string(out, c->failed, strlen(c->failed));
	else
		buf_puts(out, "null");
	buf_putc(out, '}');
}

void compact_write_content(struct compact_base base, const struct buf *window, struct buf *out)
{
	buf_printf(out, "{\"turns\":%d,\"messages\":%d,\"window\":[", base.turns, base.messages);
	buf_append_buf(out, window);
	buf_puts(out, "]}");
}

void compact_write_item(const struct compacted *c, const char *id, const struct buf *content, struct buf *out)
{
	buf_printf(out, "{\"id\":\"%s\",\"type\":\"compaction\",\"status\":\"%s\",\"summary\":", id,
		   c->cut ? "incomplete" : "completed");
	buf_json_buf(out, &c->summary);
	buf_printf(out, ",\"turns\":%d,\"messages\":%d,\"tokens_before\":%d,\"tokens_after\":%d,\"encrypted_content\":",
		   c->turns, c->messages, c->tokens_before, c->tokens_after);
	buf_json_buf(out, content);
	buf_putc(out, '}');
}
