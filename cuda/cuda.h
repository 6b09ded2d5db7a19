/*
 * The CUDA backend's constructors, rows of the table in engine/backend.c. They are weak: a build without the backend,
 * or without its twin on the CPU, links all the same, and the address is then NULL.
 */
#pragma once

#include "engine/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Backend on GPU number `ordinal`. UNSUPPORTED, with one sentence, when there is no driver, no GPU or no such number.
 */
__attribute__((weak)) enum status cuda_create(int32_t ordinal, struct backend **out, struct error *err);
/* The same kernels on the CPU, checked by the execution model of cuda/host_cuda/. In test builds. */
__attribute__((weak)) enum status cuda_host_create(int32_t ordinal, struct backend **out, struct error *err);

#ifdef __cplusplus
}
#endif
