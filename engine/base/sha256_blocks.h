/*
 * The inside of SHA-256: ways to take blocks of 64 bytes into a state. All give the same; sha256.c chooses one when
 * first asked.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* FIPS 180-4, section 4.2.2. */
extern const uint32_t sha256_k[64];

struct sha256_way {
	const char *name;
	bool (*usable)(void); /* whether this machine can */
	void (*blocks)(uint32_t h[8], const uint8_t *p, size_t n_blocks);
};

/* The fastest first; the last one is plain C and usable everywhere. NULL behind it. */
const struct sha256_way *sha256_way(size_t i);

#if defined(__x86_64__)
#define SHA256_X86
extern const struct sha256_way sha256_way_x86; /* the SHA extension */
#elif defined(__aarch64__) && defined(__linux__) && (!defined(__clang__) || __clang_major__ >= 16)
/* Older clangs know the instructions only where the whole file is compiled for them. */
#define SHA256_ARM
extern const struct sha256_way sha256_way_arm; /* the SHA-2 instructions of ARMv8 */
#endif
