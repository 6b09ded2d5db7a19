/* HMAC-SHA-256 (RFC 2104, FIPS 198-1): a tag that only who has the key can make. */
#pragma once

#include <stdbool.h>

#include "engine/base/sha256.h"

struct hmac {
	struct sha256 inner, outer;
};

void hmac_init(struct hmac *h, const void *key, size_t n_key);
void hmac_update(struct hmac *h, const void *data, size_t n);
/* Writes the tag; the state must be initialised again before further use. */
void hmac_final(struct hmac *h, uint8_t tag[SHA256_BYTES]);
/* Whether two tags are equal, in a time that does not depend on where they differ. */
bool hmac_equal(const uint8_t a[SHA256_BYTES], const uint8_t b[SHA256_BYTES]);
