#include "tests/unit/unit.h"

#include <stdio.h>

#include "engine/base/hmac.h"

static void tag_of(const char *key, size_t n_key, const char *data, size_t n, char hex[2 * SHA256_BYTES + 1])
{
	struct hmac h;
	uint8_t tag[SHA256_BYTES];
	hmac_init(&h, key, n_key);
	/* In two parts: how it is cut makes no difference. */
	hmac_update(&h, data, n / 2);
	hmac_update(&h, data + n / 2, n - n / 2);
	hmac_final(&h, tag);
	for (int i = 0; i < SHA256_BYTES; i++)
		snprintf(hex + 2 * i, 3, "%02x", tag[i]);
}

/* Test cases 2, 1 and 6 of RFC 4231: a short key, one of bytes that are no text, and one longer than a block. */
static void tags_are_those_of_the_standard(void **state)
{
	(void)state;
	char hex[2 * SHA256_BYTES + 1], key[131];
	tag_of("Jefe", 4, "what do ya want for nothing?", 28, hex);
	assert_string_equal(hex, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
	memset(key, 0x0b, 20);
	tag_of(key, 20, "Hi There", 8, hex);
	assert_string_equal(hex, "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
	memset(key, 0xaa, sizeof key);
	tag_of(key, sizeof key, "Test Using Larger Than Block-Size Key - Hash Key First", 54, hex);
	assert_string_equal(hex, "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

static void one_bit_makes_a_difference(void **state)
{
	(void)state;
	uint8_t a[SHA256_BYTES] = {1, 2, 3}, b[SHA256_BYTES] = {1, 2, 3};
	assert_true(hmac_equal(a, b));
	b[SHA256_BYTES - 1] ^= 0x80;
	assert_false(hmac_equal(a, b));
}

UNIT_MAIN(cmocka_unit_test(tags_are_those_of_the_standard), cmocka_unit_test(one_bit_makes_a_difference))
