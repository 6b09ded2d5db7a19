/* The kernels for AVX2; compiled with flags of its own, and run only where fast.c found the instructions. */
#include "engine/cpu/simd_avx2.h"

#include "engine/cpu/kernels_matmul.h"
#include "engine/cpu/kernels_wide.h"
#include "engine/cpu/kernels_rows.h"
#include "engine/cpu/kernels_attention.h"
#include "engine/cpu/kernels_narrow.h"

#define TABLE cpu_kernels_avx2
#define TABLE_NAME "cpu-avx2"
#define TABLE_DETAIL "AVX2, FMA, F16C"
#define PAGES_TABLE cpu_pages_avx2
#define PAGES_OTHER cpu_pages_avx2_bf16
#include "engine/cpu/kernels_table.h"
