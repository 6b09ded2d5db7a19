#include "engine/base/hmac.h"

#include <string.h>

enum { BLOCK = 64 }; /* of the hash function, which the key is filled up to */

void hmac_init(struct hmac *h, const void *key, size_t n_key)
{
	uint8_t padded[BLOCK] = {0}, pad[BLOCK];
	if (n_key > BLOCK) {
		struct sha256 s;
		sha256_init(&s);
		sha256_update(&s, key, n_key);
		sha256_final(&s, padded);
	} else if (n_key > 0) {
		memcpy(padded, key, n_key);
	}
	for (int i = 0; i < BLOCK; i++)
		pad[i] = padded[i] ^ 0x36;
	sha256_init(&h->inner);
	sha256_update(&h->inner, pad, BLOCK);
	for (int i = 0; i < BLOCK; i++)
		pad[i] = padded[i] ^ 0x5c;
	sha256_init(&h->outer);
	sha256_update(&h->outer, pad, BLOCK);
}

void hmac_update(struct hmac *h, const void *data, size_t n)
{
	sha256_update(&h->inner, data, n);
}

void hmac_final(struct hmac *h, uint8_t tag[SHA256_BYTES])
{
	uint8_t digest[SHA256_BYTES];
	sha256_final(&h->inner, digest);
	sha256_update(&h->outer, digest, sizeof digest);
	sha256_final(&h->outer, tag);
}

bool hmac_equal(const uint8_t a[SHA256_BYTES], const uint8_t b[SHA256_BYTES])
{
	volatile uint8_t differs = 0;
	for (int i = 0; i < SHA256_BYTES; i++)
		differs |= (uint8_t)(a[i] ^ b[i]);
	return differs == 0;
}
