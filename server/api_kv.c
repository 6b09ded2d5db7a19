/*
 * GET /v1/kv: the KV cache as it is now, counted page by page for this answer: who holds what, what the prefix index
 * found, what had to go and why, what the tiers below have, and the sessions with their share (?limit=N&after=CURSOR,
 * as in GET /v1/sessions).
 *
 * Figures of the whole are for every key. What belongs to single keys and sessions is shown to their owner, and to keys
 * that are "admin".
 */
#include "server/api.h"

enum { SESSIONS_LIMIT = 100 };

static void write_pool(struct buf *out, const struct engine_kv *kv, const struct engine_info *info,
                       const struct engine_stats *s)
{
	uint64_t page_bytes = info->page_bytes;
	int32_t used = kv->pages_total - kv->pages_free;
	buf_printf(out,
	           ",\"pool\":{\"pages\":%d,\"pages_free\":%d,\"pages_used\":%d,\"bytes\":%llu,\"bytes_used\":%llu,"
	           "\"page_tokens\":%d,\"page_bytes\":%llu,\"token_bytes\":%llu,\"type\":\"%s\","
	           "\"wide_pages\":%d,\"wide_pages_max\":%d,\"wide_refused\":%llu,\"fallback_pages\":%llu,"
	           "\"not_finite\":%llu,\"unsound_pages\":%llu,\"clamped\":%llu,\"bounds_bytes\":%llu,\"bounded_"
	           "pages\":%llu}",
	           kv->pages_total, kv->pages_free, used, (unsigned long long)kv->pages_total * page_bytes,
	           (unsigned long long)used * page_bytes, info->page_tokens, (unsigned long long)page_bytes,
	           (unsigned long long)info->kv_bytes_per_token, info->kv_type, s->kv_wide_pages, s->kv_wide_max,
	           (unsigned long long)s->kv_wide_refused, (unsigned long long)s->kv_fallback_pages,
	           (unsigned long long)s->kv_not_finite, (unsigned long long)s->kv_unsound_pages,
	           (unsigned long long)s->kv_clamped, (unsigned long long)info->bounds_bytes,
	           (unsigned long long)s->kv_bounded);
}

static void write_holders(struct buf *out, const struct engine_kv *kv)
{
	buf_printf(out,
		   ",\"pages\":{\"running\":%d,\"queued\":%d,\"sessions\":%d,\"index\":%d,\"nobody\":%d,\"shared\":%d}",
		   kv->pages_running, kv->pages_queued, kv->pages_sessions, kv->pages_index, kv->pages_free,
		   kv->pages_shared);
	buf_printf(out,
	           ",\"references\":{\"running\":%lld,\"queued\":%lld,\"sessions\":%lld,\"index\":%lld,\"total\":%lld}",
	           (long long)kv->refs_running, (long long)kv->refs_queued, (long long)kv->refs_sessions,
	           (long long)kv->refs_index,
	           (long long)(kv->refs_running + kv->refs_queued + kv->refs_sessions + kv->refs_index));
	buf_printf(out, ",\"tokens\":{\"running\":%lld,\"queued\":%lld,\"sessions\":%lld,\"total\":%lld}",
		   (long long)kv->tokens_running, (long long)kv->tokens_queued, (long long)kv->tokens_sessions,
		   (long long)(kv->tokens_running + kv->tokens_queued + kv->tokens_sessions));
	buf_printf(out,
	           ",\"fragmentation\":{\"ratio\":%.6g,\"alarm\":%s,\"alarm_above\":%g,\"well_below\":%g,"
	           "\"positions_used\":%lld,\"positions_unused\":%lld,\"partial_tails\":%d,\"shared_tails\":%d}"
	           ",\"drift_pages\":%lld",
	           kv->fragmentation, kv->alarm ? "true" : "false", ENGINE_FRAGMENTATION_ALARM,
	           ENGINE_FRAGMENTATION_WELL, (long long)kv->positions_used, (long long)kv->positions_unused, kv->tails,
	           kv->tails_shared, (long long)kv->drift_pages);
}

static void write_counters(struct buf *out, const struct engine_stats *s, const char *policy)
{
	buf_printf(out,
	           ",\"prefix_index\":{\"policy\":\"%s\",\"pages\":%d,\"tails\":%d,\"ghosts\":%d,\"queries\":%llu,"
	           "\"hits\":%llu,"
	           "\"hit_rate\":%.6g,\"inserted\":%llu,\"revived\":%llu,\"collisions\":%llu}",
	           policy, s->prefix_pages, s->prefix_tails, s->prefix_ghosts, (unsigned long long)s->prefix_queries,
	           (unsigned long long)s->prefix_hits,
	           s->prefix_queries ? (double)s->prefix_hits / (double)s->prefix_queries : 0.0,
	           (unsigned long long)s->prefix_inserted, (unsigned long long)s->prefix_revived,
	           (unsigned long long)s->prefix_collisions);
	buf_printf(out,
		   ",\"evictions\":{\"prompt\":%llu,\"decode\":%llu},\"queued_holds_dropped\":%llu",
		   (unsigned long long)(s->prefix_evictions - s->prefix_evictions_decode),
		   (unsigned long long)s->prefix_evictions_decode,
		   (unsigned long long)s->holds_dropped);
	buf_printf(out,
	           ",\"parked\":{\"pages\":%d,\"turns\":%llu,\"resumed\":%llu,\"dropped\":%llu},\"context_policies\":{",
	           s->parked_pages, (unsigned long long)s->parked, (unsigned long long)s->parked_resumed,
	           (unsigned long long)s->parked_dropped);
	for (size_t i = 0; engine_context_policy(i); i++)
		buf_printf(out, "%s\"%s\":{\"requests\":%llu,\"evicted_tokens\":%llu,\"merged_tokens\":%llu}",
			   i ? "," : "", engine_context_policy(i), (unsigned long long)s->context_requests[i],
			   (unsigned long long)s->context_evicted[i], (unsigned long long)s->context_merged[i]);
	buf_printf(out,
		   "},\"page_in\":{\"kept\":%llu,\"back\":%llu,\"lost\":%llu,\"recomputed\":%llu,"
		   "\"recomputed_tokens\":%llu,\"choices\":%llu,\"bounds_bytes\":%llu}",
		   (unsigned long long)s->attic_kept, (unsigned long long)s->attic_back,
		   (unsigned long long)s->attic_lost, (unsigned long long)s->attic_again,
		   (unsigned long long)s->attic_again_tokens, (unsigned long long)s->attic_choices,
		   (unsigned long long)s->attic_bytes);
	buf_puts(out, ",\"context_triggers\":{");
	for (int i = ENGINE_TRIGGER_NONE; i < ENGINE_TRIGGERS; i++)
		buf_printf(out, "%s\"%s\":%llu", i ? "," : "", i ? engine_trigger_name((enum engine_trigger)i) : "none",
			   (unsigned long long)s->context_triggered[i]);
	buf_putc(out, '}');
	buf_printf(out, ",\"preemptions\":{\"prompt\":%llu,\"decode\":%llu,\"cap\":%llu}",
	           (unsigned long long)s->preempted[ENGINE_ROOM_PROMPT],
	           (unsigned long long)s->preempted[ENGINE_ROOM_DECODE],
	           (unsigned long long)s->preempted[ENGINE_ROOM_CAP]);
}

static void write_tier(struct buf *out, const struct engine_tier *t)
{
	buf_printf(out,
	           "{\"kind\":\"%s\",\"type\":\"%s\",\"io\":\"%s\",\"state\":\"%s\",\"off_reason\":\"%s\","
	           "\"reconnects\":%llu,\"pays\":%s,\"pages\":%d,"
	           "\"max_pages\":%d,\"writing\":%d,\"loading\":%d,\"bytes\":%llu,\"bytes_used\":%llu,\"index_bytes\":%"
	           "llu",
	           t->kind, t->type, t->io, t->off ? "off" : "on", t->off_reason, (unsigned long long)t->reconnects,
	           t->pays ? "true" : "false", t->pages, t->max_pages, t->writing, t->loading,
	           (unsigned long long)t->cap_bytes, (unsigned long long)t->used_bytes,
	           (unsigned long long)t->index_bytes);
	buf_printf(out, ",\"stored\":%llu,\"present\":%llu,\"evicted\":%llu,\"fetched\":%llu",
	           (unsigned long long)t->stored, (unsigned long long)t->present, (unsigned long long)t->evicted,
	           (unsigned long long)t->fetched);
	buf_printf(
		out,
		",\"dropped\":{\"unpaid\":%llu,\"off\":%llu,\"busy\":%llu,\"rate\":%llu,\"full\":%llu,\"failed\":%llu}",
		(unsigned long long)t->dropped[ENGINE_TIER_DROP_UNPAID],
		(unsigned long long)t->dropped[ENGINE_TIER_DROP_OFF],
		(unsigned long long)t->dropped[ENGINE_TIER_DROP_BUSY],
		(unsigned long long)t->dropped[ENGINE_TIER_DROP_RATE],
		(unsigned long long)t->dropped[ENGINE_TIER_DROP_FULL],
		(unsigned long long)t->dropped[ENGINE_TIER_DROP_FAILED]);
	buf_printf(out,
	           ",\"loads\":{\"done\":%llu,\"failed\":%llu,\"absent\":%llu,\"corrupt\":%llu,\"cancelled\":%llu}",
	           (unsigned long long)t->loaded, (unsigned long long)t->load_failed, (unsigned long long)t->absent,
	           (unsigned long long)t->corrupt, (unsigned long long)t->cancelled);
	buf_printf(out, ",\"kept_exact\":{\"sinks\":%llu,\"tails\":%llu,\"values\":%llu}",
	           (unsigned long long)t->wide_sinks, (unsigned long long)t->wide_tails,
	           (unsigned long long)t->wide_values);
	buf_printf(out,
	           ",\"bytes_written\":%llu,\"bytes_read\":%llu,\"read_bytes_per_second\":%.6g,\"write_bytes_per_"
	           "second\":%.6g}",
	           (unsigned long long)t->bytes_written, (unsigned long long)t->bytes_read, t->read_bytes_per_s,
	           t->write_bytes_per_s);
}

static void write_tiers(struct buf *out, const struct engine_tiers *t)
{
	buf_puts(out, ",\"tiers\":[");
	for (int32_t i = 0; i < t->n; i++) {
		if (i > 0)
			buf_putc(out, ',');
		write_tier(out, &t->tier[i]);
	}
	buf_printf(out,
	           "],\"fetches\":{\"under_way\":%d,\"begun\":%llu,\"cancelled\":%llu,\"overlapped\":%llu,"
	           "\"prefill_tokens_per_second\":%.6g}",
	           t->fetching, (unsigned long long)t->fetches, (unsigned long long)t->fetches_cancelled,
	           (unsigned long long)t->fetches_overlapped, t->prefill_tokens_per_s);
}

/* Room below the pool for conversations larger than it, where there is any. */
static void write_overflow(struct buf *out, const struct engine_overflow *o)
{
	if (o->ram_bytes + o->disk_bytes == 0 && !o->disk_off)
		return;
	buf_printf(out,
	           ",\"overflow\":{\"max_tokens\":%d,\"requests\":%d,\"pages\":%d,\"moved_pages\":%llu,"
	           "\"lost_requests\":%llu,"
	           "\"wide_refused\":%llu,\"ram\":{\"bytes\":%llu,\"bytes_used\":%llu},\"disk\":{\"state\":\"%s\","
	           "\"reason\":",
	           o->max_tokens, o->requests, o->pages, (unsigned long long)o->moved_pages,
	           (unsigned long long)o->lost_requests, (unsigned long long)o->wide_refused,
	           (unsigned long long)o->ram_bytes, (unsigned long long)o->ram_used_bytes,
	           o->disk_off     ? "off"
	           : o->disk_bytes ? "on"
	                           : "none");
	buf_json_string(out, o->off_reason, strlen(o->off_reason));
	buf_printf(
		out, ",\"bytes\":%llu,\"bytes_used\":%llu,\"bytes_read\":%llu,\"bytes_written\":%llu,\"waits\":%llu}}",
		(unsigned long long)o->disk_bytes, (unsigned long long)o->disk_used_bytes,
		(unsigned long long)o->bytes_read, (unsigned long long)o->bytes_written, (unsigned long long)o->waits);
}

static void write_limit(struct buf *out, const char *name, uint64_t limit)
{
	if (limit)
		buf_printf(out, "\"%s\":%llu", name, (unsigned long long)limit);
	else
		buf_printf(out, "\"%s\":null", name);
}

static void write_key(const struct app *a, const struct engine_tenant_usage *u, struct buf *out)
{
	buf_printf(out,
	           "{\"key\":\"%s\",\"running\":%d,\"waiting\":%d,\"sessions\":%d,\"pages\":%lld,\"kv_bytes\":%llu,"
	           "\"requests\":%llu,\"prompt_tokens\":%llu,\"cached_tokens\":%llu,\"generated_tokens\":%llu,"
	           "\"refused\":%llu,\"limits\":{",
	           app_key_name(a, u->id), u->n_running, u->n_waiting, u->n_sessions, (long long)u->n_pages,
	           (unsigned long long)u->kv_bytes, (unsigned long long)u->requests,
	           (unsigned long long)u->prompt_tokens, (unsigned long long)u->cached_tokens,
	           (unsigned long long)u->generated_tokens, (unsigned long long)u->refused);
	write_limit(out, "max_requests", (uint64_t)u->limits.max_requests);
	buf_putc(out, ',');
	write_limit(out, "max_sessions", (uint64_t)u->limits.max_sessions);
	buf_putc(out, ',');
	write_limit(out, "kv_memory", u->limits.kv_bytes);
	buf_puts(out, "}}");
}

static void write_keys(const struct app *a, int32_t tenant, struct buf *out)
{
	bool all = app_is_admin(a, tenant), first = true;
	buf_puts(out, ",\"keys\":[");
	for (int32_t i = 0; i < a->auth.n; i++) {
		struct engine_tenant_usage u;
		if ((!all && i != tenant) || !auth_find(&a->auth, i))
			continue;
		engine_tenant_usage(a->engine, i, &u);
		if (u.id < 0)
			continue;
		if (!first)
			buf_putc(out, ',');
		first = false;
		write_key(a, &u, out);
	}
	buf_putc(out, ']');
}

static void reply_kv(struct app *a, struct http_exchange *x, const struct engine_event *ev)
{
	struct buf body = BUF_INIT;
	struct engine_stats stats;
	engine_stats(a->engine, &stats);
	buf_printf(&body, "{\"object\":\"kv\"");
	write_pool(&body, ev->kv, engine_info(a->engine), &stats);
	write_holders(&body, ev->kv);
	write_counters(&body, &stats, engine_kv_policy_find(a->config->kv_policy));
	write_tiers(&body, &stats.tiers);
	write_overflow(&body, &stats.overflow);
	write_keys(a, http_principal(x), &body);
	buf_puts(&body, ",\"sessions\":{");
	write_session_list(a, ev, &body);
	buf_putc(&body, '}');
	reply_json(x, 200, &body);
}

void api_kv(struct http_exchange *x, void *app)
{
	struct app *a = app;
	struct engine_session_page page;
	struct failure f;
	int32_t tenant = http_principal(x);
	if (engine_state(a->engine) != ENGINE_READY && !app_accepts(a, &f)) {
		reply_failure(x, &f);
		return;
	}
	if (!read_session_page(x, SESSIONS_LIMIT, &page))
		return;
	uint64_t id = call_start(a, x, reply_kv);
	if (id)
		engine_kv_report(a->engine, id, app_is_admin(a, tenant) ? ENGINE_ALL_TENANTS : tenant, &page);
}
