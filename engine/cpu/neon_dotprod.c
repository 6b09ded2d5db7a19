/*
 * The kernels for NEON with products of bytes; compiled with flags of its own, and run only where isa.c found the
 * instructions.
 */
#include "engine/cpu/simd_neon.h"

#include "engine/cpu/kernels_matmul.h"
#include "engine/cpu/kernels_rows.h"
#include "engine/cpu/kernels_attention.h"
#include "engine/cpu/kernels_narrow.h"

#define TABLE cpu_kernels_neon_dotprod
#define TABLE_NAME "cpu-neon-dotprod"
#define TABLE_DETAIL "NEON, DotProd"
#define PAGES_TABLE cpu_pages_neon_dotprod
#define PAGES_OTHER cpu_pages_neon_bf16
#include "engine/cpu/kernels_table.h"
