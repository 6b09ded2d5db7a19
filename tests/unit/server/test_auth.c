#include "tests/unit/unit.h"

#include <stdio.h>

#include "server/auth.h"

static struct auth a;
static struct error err;
static const struct str none = {NULL, 0};

static enum status set(const char *json)
{
	return auth_set_keys(&a, str_from(json), "keys.json", &err);
}

static int32_t bearer(const char *secret)
{
	char header[256];
	snprintf(header, sizeof header, "Bearer %s", secret);
	return auth_check(&a, str_from(header), none);
}

static void without_keys_everybody_is_tenant_0(void **state)
{
	(void)state;
	auth_init(&a, NULL);
	assert_int_equal(auth_check(&a, none, none), 0);
	assert_int_equal(bearer("whatever"), 0);
	assert_true(auth_find(&a, 0)->admin);
	auth_init(&a, "");
	assert_int_equal(auth_check(&a, none, none), 0);
}

static void each_key_is_a_tenant_with_its_limits(void **state)
{
	(void)state;
	auth_init(&a, "root");
	assert_int_equal(
		set("{\"keys\":[{\"name\":\"alice\",\"key\":\"sk-a\",\"max_requests\":2,\"max_sessions\":3,"
	            "\"kv_memory\":\"1.5M\"},"
	            "{\"name\":\"bob\",\"key\":\"sk-b\",\"cache_salt\":\"team\",\"kv_memory\":4096,\"admin\":true}]}"),
		STATUS_OK);
	assert_int_equal(bearer("root"), 0);
	assert_int_equal(bearer("sk-a"), 1);
	assert_int_equal(auth_check(&a, none, str_from("sk-b")), 2);
	assert_int_equal(auth_check(&a, none, none), AUTH_REFUSED);
	assert_int_equal(bearer("sk-"), AUTH_REFUSED);
	assert_int_equal(bearer(""), AUTH_REFUSED);
	const struct auth_key *k = auth_find(&a, 1);
	assert_string_equal(k->name, "alice");
	assert_string_equal(k->tenant.salt, "alice");
	assert_int_equal(k->tenant.id, 1);
	assert_int_equal(k->tenant.limits.max_requests, 2);
	assert_int_equal(k->tenant.limits.max_sessions, 3);
	assert_int_equal(k->tenant.limits.kv_bytes, 3 << 19);
	assert_false(k->admin);
	k = auth_find(&a, 2);
	assert_string_equal(k->tenant.salt, "team");
	assert_int_equal(k->tenant.limits.kv_bytes, 4096);
	assert_true(k->admin);
	assert_null(auth_find(&a, 3));
	/* The secrets themselves are nowhere. */
	assert_null(memmem(&a, sizeof a, "sk-a", 4));
}

static void a_digest_may_stand_for_the_secret(void **state)
{
	(void)state;
	auth_init(&a, NULL);
	/* FIPS 180-4's example: the digest of "abc". */
	assert_int_equal(set("{\"keys\":[{\"name\":\"x\",\"sha256\":"
			     "\"ba7816bf8f01cfea414140de5dae2223B00361A396177A9CB410FF61F20015AD\"}]}"),
			 STATUS_OK);
	assert_int_equal(bearer("abc"), 1);
	assert_int_equal(bearer("abd"), AUTH_REFUSED);
}

static void a_name_keeps_its_number_when_the_keys_change(void **state)
{
	(void)state;
	auth_init(&a, NULL);
	assert_int_equal(set("{\"keys\":[{\"name\":\"x\",\"key\":\"1\"},{\"name\":\"y\",\"key\":\"2\"}]}"), STATUS_OK);
	assert_int_equal(set("{\"keys\":[{\"name\":\"y\",\"key\":\"3\"},{\"name\":\"z\",\"key\":\"1\"}]}"), STATUS_OK);
	assert_int_equal(bearer("2"), AUTH_REFUSED);
	assert_int_equal(bearer("3"), 2);
	assert_int_equal(bearer("1"), 3);
	assert_null(auth_find(&a, 1));
	assert_int_equal(set("{\"keys\":[{\"name\":\"x\",\"key\":\"9\"}]}"), STATUS_OK);
	assert_int_equal(bearer("9"), 1);
	assert_int_equal(bearer("3"), AUTH_REFUSED);
}

static void what_is_wrong_is_named_and_changes_nothing(void **state)
{
	(void)state;
	static const struct {
		const char *json, *says;
	} cases[] = {
		{"", "empty"},
		{"[]", "object"},
		{"{}", "at least one key"},
		{"{\"keys\":[]}", "at least one key"},
		{"{\"keys\":{}}", "keys must be an array"},
		{"{\"keys\":[7]}", "keys[0] must be an object"},
		{"{\"keys\":[{\"key\":\"s\"}]}", "needs a \"name\""},
		{"{\"keys\":[{\"name\":\"a b\",\"key\":\"s\"}]}", "needs a \"name\""},
		{"{\"keys\":[{\"name\":\"default\",\"key\":\"s\"}]}", "--api-key"},
		{"{\"keys\":[{\"name\":\"a\"}]}", "either \"key\" or \"sha256\""},
		{"{\"keys\":[{\"name\":\"a\",\"key\":\"\"}]}", "not empty"},
		{"{\"keys\":[{\"name\":\"a\",\"sha256\":\"12\"}]}", "64 hexadecimal"},
		{"{\"keys\":[{\"name\":\"a\",\"key\":\"s\",\"max_request\":1}]}", "keys[0].max_request is no field"},
		{"{\"keys\":[{\"name\":\"a\",\"key\":\"s\",\"max_requests\":-1}]}", "keys[0].max_requests"},
		{"{\"keys\":[{\"name\":\"a\",\"key\":\"s\",\"kv_memory\":\"much\"}]}",
	         "keys[0].kv_memory must be a number of bytes"},
		{"{\"keys\":[{\"name\":\"a\",\"key\":\"s\"},{\"name\":\"a\",\"key\":\"t\"}]}",
	         "keys[1] has the name \"a\""},
		{"{\"keys\":[{\"name\":\"a\",\"key\":\"s\"},{\"name\":\"b\",\"key\":\"s\"}]}",
	         "the same secret as the key \"a\""},
		{"{\"keys\":[{\"name\":\"a\",\"key\":\"root\"}]}", "the same secret as the key \"default\""},
	};
	auth_init(&a, "root");
	assert_int_equal(set("{\"keys\":[{\"name\":\"old\",\"key\":\"old\"}]}"), STATUS_OK);
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		assert_int_not_equal(set(cases[i].json), STATUS_OK);
		if (!strstr(err.message, cases[i].says))
			fail_msg("\"%s\" does not say \"%s\"", err.message, cases[i].says);
		assert_int_equal(strncmp(err.message, "keys.json: ", 11), 0);
		assert_int_equal(bearer("old"), 1);
		assert_int_equal(bearer("s"), AUTH_REFUSED);
	}
}

static void no_message_holds_a_secret(void **state)
{
	(void)state;
	static const char *const broken[] = {
		"{\"keys\":[{\"name\":\"a\",\"key\":\"hush-hush\" \"x\"}]}",
		"{\"keys\":[{\"name\":\"a\",\"key\":\"hush-hush}]}",
		"{\"keys\":[{\"name\":\"a\",\"key\":hush-hush}]}",
		"{\"keys\":[{\"name\":\"a\",\"key\":\"hush-hush\",\"sha256\":\"hush-hush\"}]}",
		"{\"keys\":[{\"name\":\"a\",\"sha256\":\"hush-hush\"}]}",
		"{\"keys\":[\"hush-hush\"]}",
	};
	auth_init(&a, NULL);
	for (size_t i = 0; i < sizeof broken / sizeof *broken; i++) {
		assert_int_not_equal(set(broken[i]), STATUS_OK);
		if (strstr(err.message, "hush"))
			fail_msg("\"%s\" tells a secret", err.message);
	}
}

static void names_are_bounded(void **state)
{
	(void)state;
	struct buf json = BUF_INIT;
	buf_puts(&json, "{\"keys\":[");
	for (int i = 1; i < ENGINE_MAX_TENANTS; i++)
		buf_printf(&json, "%s{\"name\":\"n%d\",\"key\":\"k%d\"}", i > 1 ? "," : "", i, i);
	buf_puts(&json, "]}");
	auth_init(&a, NULL);
	assert_int_equal(set(json.data), STATUS_OK);
	assert_int_equal(bearer("k255"), 255);
	assert_int_equal(set("{\"keys\":[{\"name\":\"one-more\",\"key\":\"k\"}]}"), STATUS_LIMIT);
	assert_int_equal(bearer("k255"), 255);
	buf_free(&json);
}

UNIT_MAIN(cmocka_unit_test(without_keys_everybody_is_tenant_0), cmocka_unit_test(each_key_is_a_tenant_with_its_limits),
          cmocka_unit_test(a_digest_may_stand_for_the_secret),
          cmocka_unit_test(a_name_keeps_its_number_when_the_keys_change),
          cmocka_unit_test(what_is_wrong_is_named_and_changes_nothing), cmocka_unit_test(no_message_holds_a_secret),
          cmocka_unit_test(names_are_bounded))
