/* The figures of the tiers, as the server sees them. */
#include <assert.h>

#include "engine/engine_internal.h"

static_assert((int)KV_TIER_RAM == ENGINE_TIER_RAM && (int)KV_TIER_DISK == ENGINE_TIER_DISK &&
                      (int)KV_TIER_DISK_WIDE == ENGINE_TIER_DISK_WIDE && (int)KV_TIER_REMOTE == ENGINE_TIER_REMOTE,
              "both count the tiers in one order");

static struct engine_tier describe(const struct kv_tiers_stats *s, enum kv_tier_kind kind)
{
	const struct kv_tier_stats *t = &s->tier[kind];
	return (struct engine_tier){
	        .kind = t->kind,
	        .type = t->type,
	        .io = t->io,
	        .off = t->off,
	        .off_reason = t->off_reason,
	        .reconnects = t->reconnects,
	        .pays = s->pays[kind],
	        .cap_bytes = t->cap_bytes,
	        .used_bytes = t->used_bytes,
	        .index_bytes = t->index_bytes,
	        .pages = t->n_pages,
	        .max_pages = t->max_pages,
	        .writing = t->n_writing,
	        .loading = t->n_loading,
	        .stored = t->put[KV_PUT_STORED],
	        .present = t->put[KV_PUT_PRESENT],
	        .dropped = {
	                [ENGINE_TIER_DROP_UNPAID] = s->unpaid[kind],
	                [ENGINE_TIER_DROP_OFF] = t->put[KV_PUT_OFF],
	                [ENGINE_TIER_DROP_BUSY] = t->put[KV_PUT_BUSY],
	                [ENGINE_TIER_DROP_RATE] = t->put[KV_PUT_RATE],
	                [ENGINE_TIER_DROP_FULL] = t->put[KV_PUT_FULL],
	                [ENGINE_TIER_DROP_FAILED] = t->put[KV_PUT_FAILED],
	        },
	        .loaded = t->loads[KV_LOAD_DONE],
	        .load_failed = t->loads[KV_LOAD_FAILED],
	        .absent = t->loads[KV_LOAD_ABSENT],
	        .corrupt = t->loads[KV_LOAD_CORRUPT],
	        .cancelled = t->cancelled,
	        .fetched = s->fetched[kind],
	        .evicted = t->evicted,
	        .wide_sinks = t->wide_sinks,
	        .wide_tails = t->wide_tails,
	        .wide_values = t->wide_values,
	        .bytes_written = t->bytes_written,
	        .bytes_read = t->bytes_read,
	        .read_bytes_per_s = t->read_bytes_per_s,
	        .write_bytes_per_s = t->write_bytes_per_s,
	};
}

void engine_tiers_describe(const struct kv_tiers *t, struct engine_tiers *out)
{
	struct kv_tiers_stats s;
	*out = (struct engine_tiers){0};
	if (!t)
		return;
	kv_tiers_stats(t, &s);
	for (int kind = 0; kind < KV_TIER_KINDS; kind++) {
		if (s.has[kind])
			out->tier[out->n++] = describe(&s, (enum kv_tier_kind)kind);
	}
	out->fetches = s.fetches;
	out->fetches_cancelled = s.fetches_cancelled;
	out->fetches_overlapped = s.fetches_overlapped;
	out->fetching = s.n_fetching;
	out->prefill_tokens_per_s = s.prefill_tokens_per_s;
}

void engine_overflow_describe(const struct kv_overflow *o, struct engine_overflow *out)
{
	struct kv_overflow_stats s;
	*out = (struct engine_overflow){.off_reason = ""};
	if (!o)
		return;
	kv_overflow_stats(o, &s);
	*out = (struct engine_overflow){
	        .max_tokens = kv_overflow_now(o)->max_tokens,
	        .ram_bytes = s.ram_bytes,
	        .ram_used_bytes = s.ram_used_bytes,
	        .disk_bytes = s.disk_bytes,
	        .disk_used_bytes = s.disk_used_bytes,
	        .requests = s.n_sequences,
	        .pages = s.n_pages,
	        .moved_pages = s.pages_spilled,
	        .lost_requests = s.sequences_lost,
	        .wide_refused = s.wide_refused,
	        .bytes_read = s.bytes_read,
	        .bytes_written = s.bytes_written,
	        .waits = s.waits,
	        .disk_off = s.disk_off,
	        .off_reason = s.off_reason,
	};
}
