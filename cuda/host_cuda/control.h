/*
 * What a test sets in host_cuda, in C. The environment has the same for whole programs:
 *
 *   KVASIR_HOST_CUDA_ORDER=SEED    threads, blocks and streams take turns by chance, from this seed (default: in order)
 *   KVASIR_HOST_CUDA_FAIL=LIST     fail runtime calls:
 *                                  "cudaMalloc:3:cudaErrorMemoryAllocation,launch:10:cudaErrorIllegalAddress"
 *   KVASIR_HOST_CUDA_MEMORY=BYTES  memory of the device (default 2 GiB)
 *   KVASIR_HOST_CUDA_DEVICES=N     devices there are (default 1)
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Forgets errors, failures that were asked for and the report, and takes the settings of the environment again. */
void host_cuda_reset(void);
/* 0: natural order; else a seed. */
void host_cuda_order(uint64_t seed);
/*
 * As KVASIR_HOST_CUDA_FAIL: the n-th call from now of a function, of "launch", or, with "*", of any of them fails.
 * Returns 0 when `list` does not parse.
 */
int host_cuda_fail(const char *list);
void host_cuda_devices(int n);
void host_cuda_memory(size_t bytes);
/* The last error in a kernel or misuse of the runtime, one line; "" when there was none. Valid until the next. */
const char *host_cuda_report(void);
/* How many calls of a function, of "launch", or of any ("*"), there were since the last reset. */
uint64_t host_cuda_calls(const char *function);
/* Device and pinned memory that is allocated. */
size_t host_cuda_allocated(void);

#ifdef __cplusplus
}
#endif
