/*
 * The request field kv_cache, which says how a long conversation goes on, and what answers tell of it:
 *
 *     "kv_cache": {"policy": "streaming", "start_size": 4, "recent_size": 1024, "max_cache_size": 2048,
 *                  "trigger": {"tokens": 4096, "free_pages": 100, "entropy": 1.5}, "dtype": "f16"}
 *
 * or "policy": "evict" with "cache_length_shrink_ratio" and "aggregation", or "quest", or "merge"; "diagnostics" with
 * any. All of its fields may be left out. Unlike those of a request, unknown ones are refused: one that was ignored
 * would keep a conversation otherwise than its client believes. An answer to a request with the field has one of that
 * name as well; so has any under another policy than full. In a stream it stands in the chunk that ends the first
 * choice.
 */
#pragma once

#include "engine/engine.h"
#include "server/json.h"

/* *given: whether the body has it. Which sizes go together is the engine's to say, when it gets the request. */
enum status kv_cache_read(const struct json *body, const struct engine_info *info, struct engine_context *out,
                          bool *given, struct error *err);
struct compacted;

/*
 * Appends ",\"kv_cache\":{...}"; nothing while the engine has not told, and when it was not asked for and all was kept.
 * compacted: what a summary has done to the conversation before it was read, or NULL.
 */
void kv_cache_write(struct buf *out, const struct engine_context_usage *u, const struct compacted *compacted,
                    bool asked);
