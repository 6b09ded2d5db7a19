#include "engine/base/sha256.h"

#include <stdatomic.h>
#include <string.h>

#include "engine/base/sha256_blocks.h"

/* FIPS 180-4, section 4.2.2: the first 32 bits of the fractional parts of the cube roots of the first 64 primes. */
const uint32_t sha256_k[64] = {
	0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
	0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
	0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
	0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
	0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
	0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
	0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
	0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t rotr(uint32_t x, int n)
{
	return x >> n | x << (32 - n);
}

static uint32_t read_be(const uint8_t *p)
{
	return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static void write_be(uint8_t *p, uint32_t v)
{
	p[0] = (uint8_t)(v >> 24);
	p[1] = (uint8_t)(v >> 16);
	p[2] = (uint8_t)(v >> 8);
	p[3] = (uint8_t)v;
}

/* Section 6.2.2. */
static void compress(uint32_t h[8], const uint8_t block[64])
{
	uint32_t w[64], v[8];
	for (int t = 0; t < 16; t++)
		w[t] = read_be(block + t * 4);
	for (int t = 16; t < 64; t++) {
		uint32_t s0 = rotr(w[t - 15], 7) ^ rotr(w[t - 15], 18) ^ w[t - 15] >> 3;
		uint32_t s1 = rotr(w[t - 2], 17) ^ rotr(w[t - 2], 19) ^ w[t - 2] >> 10;
		w[t] = w[t - 16] + s0 + w[t - 7] + s1;
	}
	memcpy(v, h, sizeof v);
	/* Instead of eight words that move on by one each round, the names move: after eight rounds they are back. */
	for (int t = 0; t < 64; t += 8) {
#pragma GCC unroll 8
		for (int i = 0; i < 8; i++) {
			uint32_t a = v[(0 - i) & 7], b = v[(1 - i) & 7], c = v[(2 - i) & 7];
			uint32_t e = v[(4 - i) & 7], f = v[(5 - i) & 7], g = v[(6 - i) & 7];
			uint32_t s1 = rotr(e, 6) ^ rotr(e, 11) ^ rotr(e, 25);
			uint32_t t1 = v[(7 - i) & 7] + s1 + ((e & f) ^ (~e & g)) + sha256_k[t + i] + w[t + i];
			uint32_t s0 = rotr(a, 2) ^ rotr(a, 13) ^ rotr(a, 22);
			v[(3 - i) & 7] += t1;
			v[(7 - i) & 7] = t1 + s0 + ((a & b) ^ (a & c) ^ (b & c));
		}
	}
	for (int i = 0; i < 8; i++)
		h[i] += v[i];
}

static void plain_blocks(uint32_t h[8], const uint8_t *p, size_t n_blocks)
{
	for (; n_blocks > 0; n_blocks--, p += 64)
		compress(h, p);
}

static bool everywhere(void)
{
	return true;
}

static const struct sha256_way plain = {"plain C", everywhere, plain_blocks};

const struct sha256_way *sha256_way(size_t i)
{
	static const struct sha256_way *const ways[] = {
#ifdef SHA256_X86
	        &sha256_way_x86,
#elif defined(SHA256_ARM)
	        &sha256_way_arm,
#endif
	        &plain,
	};
	return i < sizeof ways / sizeof *ways ? ways[i] : NULL;
}

/* Threads that ask for the first time together find the same answer. */
static void take_blocks(uint32_t h[8], const uint8_t *p, size_t n_blocks)
{
	static _Atomic(const struct sha256_way *) chosen;
	const struct sha256_way *way = atomic_load_explicit(&chosen, memory_order_relaxed);
	if (!way) {
		size_t i = 0;
		while (!sha256_way(i)->usable())
			i++;
		way = sha256_way(i);
		atomic_store_explicit(&chosen, way, memory_order_relaxed);
	}
	way->blocks(h, p, n_blocks);
}

void sha256_init(struct sha256 *s)
{
	static const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
	                                  0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
	memcpy(s->h, start, sizeof start);
	s->n_bytes = 0;
}

void sha256_update(struct sha256 *s, const void *data, size_t n)
{
	const uint8_t *p = data;
	size_t used = s->n_bytes % 64;
	if (n == 0)
		return;
	s->n_bytes += n;
	if (used) {
		size_t take = n < 64 - used ? n : 64 - used;
		memcpy(s->block + used, p, take);
		p += take;
		n -= take;
		if (used + take < 64)
			return;
		take_blocks(s->h, s->block, 1);
	}
	take_blocks(s->h, p, n / 64);
	if (n % 64)
		memcpy(s->block, p + n - n % 64, n % 64);
}

void sha256_final(struct sha256 *s, uint8_t digest[SHA256_BYTES])
{
	uint64_t bits = s->n_bytes * 8;
	uint8_t pad[72] = {0x80}, length[8];
	size_t used = s->n_bytes % 64;
	write_be(length, (uint32_t)(bits >> 32));
	write_be(length + 4, (uint32_t)bits);
	sha256_update(s, pad, used < 56 ? 56 - used : 120 - used);
	sha256_update(s, length, sizeof length);
	for (int i = 0; i < 8; i++)
		write_be(digest + i * 4, s->h[i]);
}
