/*
 * The last of the kernel sources: defines TABLE, the table that holds the functions of the others, with those of
 * kernels_wide.h where that was included.
 */
#pragma once

#include "engine/cpu/kernels_pages_table.h"

const struct cpu_kernels TABLE = {
        .name = TABLE_NAME,
        .detail = TABLE_DETAIL,
        .lanes = LANES,
        .tile_floats = FLOAT_VECTORS * LANES,
        .rows_quant = QUANT_ROWS,
        .tiles_quant = QUANT_TILES,
        .rows_float = FLOAT_ROWS,
        .pages = {&PAGES_TABLE, &PAGES_OTHER},
        .quantize = quantize,
        .refine = refine,
        .narrow = HAS_BF16 ? narrow : NULL,
        .tile = tile,
        .tile_add_unit = tile_add_unit,
#ifdef HAS_WIDE
        .widen = widen,
        .tile_wide = tile_wide,
#endif
        .rms_norm = rms_norm,
        .glu = glu,
        .softcap = softcap,
        .rope = rope,
        .peak = peak,
        .attn_fold = attn_fold,
        .attn_finish = attn_finish,
};
