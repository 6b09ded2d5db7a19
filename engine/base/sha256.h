/* SHA-256 (FIPS 180-4). */
#pragma once

#include <stddef.h>
#include <stdint.h>

enum { SHA256_BYTES = 32 };

struct sha256 {
	uint32_t h[8];
	uint64_t n_bytes;
	uint8_t block[64];
};

void sha256_init(struct sha256 *s);
void sha256_update(struct sha256 *s, const void *data, size_t n);
/* Writes the digest; the state must be initialised again before further use. */
void sha256_final(struct sha256 *s, uint8_t digest[SHA256_BYTES]);
