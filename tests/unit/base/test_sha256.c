#include "tests/unit/unit.h"

#include <stdio.h>

#include "engine/base/sha256.h"
#include "engine/base/sha256_blocks.h"

static void check(const char *text, size_t repeat, const char *hex)
{
	struct sha256 s;
	uint8_t digest[SHA256_BYTES];
	char got[65];
	sha256_init(&s);
	for (size_t i = 0; i < repeat; i++)
		sha256_update(&s, text, strlen(text));
	sha256_final(&s, digest);
	for (int i = 0; i < SHA256_BYTES; i++)
		snprintf(got + i * 2, 3, "%02x", digest[i]);
	assert_string_equal(got, hex);
}

/* The examples of FIPS 180-4, and what sha256sum says of lengths around the padding's edges. */
static void published_values(void **state)
{
	(void)state;
	check("", 1, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
	check("abc", 1, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
	check("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 1,
	      "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
	check("a", 1000000, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

static void cuts_do_not_matter(void **state)
{
	(void)state;
	uint8_t data[300], whole[SHA256_BYTES], parts[SHA256_BYTES];
	struct sha256 s;
	for (size_t i = 0; i < sizeof data; i++)
		data[i] = (uint8_t)(i * 7);
	for (size_t n = 0; n <= sizeof data; n++) {
		sha256_init(&s);
		sha256_update(&s, data, n);
		sha256_final(&s, whole);
		size_t cut = n / 3;
		sha256_init(&s);
		sha256_update(&s, data, cut);
		sha256_update(&s, data + cut, 0);
		sha256_update(&s, data + cut, n - cut);
		sha256_final(&s, parts);
		assert_memory_equal(whole, parts, sizeof whole);
	}
}

/* Random states and blocks: whatever this machine can do gives what plain C gives. */
static void every_way_gives_the_same(void **state)
{
	(void)state;
	const struct sha256_way *plain = NULL;
	uint64_t rng = 3;
	for (size_t i = 0; sha256_way(i); i++)
		plain = sha256_way(i);
	assert_true(plain->usable());
	for (size_t i = 0; sha256_way(i); i++) {
		const struct sha256_way *way = sha256_way(i);
		if (!way->usable()) {
			print_message("skipped: this machine has no %s\n", way->name);
			continue;
		}
		for (int round = 0; round < 2000; round++) {
			uint8_t data[1 + 5 * 64];
			uint32_t expected[8], got[8];
			size_t n = (size_t)round % 6;
			for (size_t k = 0; k < sizeof data; k++)
				data[k] = (uint8_t)unit_rand(&rng);
			for (int k = 0; k < 8; k++)
				expected[k] = got[k] = (uint32_t)unit_rand(&rng);
			plain->blocks(expected, data + 1, n);
			way->blocks(got, data + 1, n);
			assert_memory_equal(expected, got, sizeof got);
		}
	}
}

UNIT_MAIN(cmocka_unit_test(every_way_gives_the_same), cmocka_unit_test(published_values),
          cmocka_unit_test(cuts_do_not_matter))
