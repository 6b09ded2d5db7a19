/* The kernels for the NEON that every 64-bit ARM has. */
#include "engine/cpu/simd_neon.h"

#include "engine/cpu/kernels_matmul.h"
#include "engine/cpu/kernels_rows.h"
#include "engine/cpu/kernels_attention.h"
#include "engine/cpu/kernels_narrow.h"

#define TABLE cpu_kernels_neon
#define TABLE_NAME "cpu-neon"
#define TABLE_DETAIL "NEON"
#define PAGES_TABLE cpu_pages_neon
#define PAGES_OTHER cpu_pages_neon_bf16
#include "engine/cpu/kernels_table.h"
