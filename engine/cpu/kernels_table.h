/* The last of the kernel sources: defines TABLE, the table that holds the functions of the others. */
#pragma once

const struct cpu_kernels TABLE = {
        .name = TABLE_NAME,
        .detail = TABLE_DETAIL,
        .lanes = LANES,
        .tile_floats = FLOAT_VECTORS * LANES,
        .rows_quant = QUANT_ROWS,
        .rows_float = FLOAT_ROWS,
        .kv_type = KV_TYPE,
        .kv_keys = KV_KEYS,
        .kv_values = KV_VALUES,
        .quantize = quantize,
        .narrow = HAS_BF16 ? narrow : NULL,
        .tile = tile,
        .rms_norm = rms_norm,
        .swiglu = swiglu,
        .rope = rope,
        .kv_store = kv_store,
        .attn_query = attn_query,
        .attn_run = attn_run,
#ifdef NARROW_KERNELS
        .attn_run_narrow = attn_run_narrow,
        .narrow_store = narrow_store,
#endif
        .attn_fold = attn_fold,
        .attn_finish = attn_finish,
};
