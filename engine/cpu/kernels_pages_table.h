/* Defines PAGES_TABLE, the table of the functions that depend on how pages lie and on what their elements are. */
#pragma once

const struct cpu_pages PAGES_TABLE = {
        .type = KV_TYPE,
        .keys = KV_KEYS,
        .values = KV_VALUES,
        .item_queries = ITEM_QUERIES,
        .kv_store = kv_store,
        .attn_query = attn_query,
        .attn_run = attn_run,
        .attn_bound = attn_bound,
        .attn_run_narrow = attn_run_narrow,
        .narrow_store = narrow_store,
        .narrow_widen = narrow_widen,
};
