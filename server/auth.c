#include "server/auth.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "config/config.h"
#include "config/option.h"
#include "server/json.h"

static const char default_name[] = "default"; /* of the key of --api-key */

static void digest_of(struct str secret, uint8_t digest[SHA256_BYTES])
{
	struct sha256 s;
	sha256_init(&s);
	sha256_update(&s, secret.p, secret.n);
	sha256_final(&s, digest);
}

void auth_init(struct auth *a, const char *api_key)
{
	struct auth_key *first = &a->keys[0];
	memset(a, 0, sizeof *a);
	a->n = 1;
	a->open = !api_key || !api_key[0];
	memcpy(first->name, default_name, sizeof default_name);
	first->admin = true;
	first->live = !a->open;
	if (first->live)
		digest_of(str_from(api_key), first->digest);
}

/* ---- Presented keys ---- */

static int32_t find_digest(const struct auth *a, const uint8_t digest[SHA256_BYTES])
{
	int32_t found = AUTH_REFUSED;
	for (int32_t i = 0; i < a->n; i++) {
		volatile uint8_t differs = !a->keys[i].live;
		for (int b = 0; b < SHA256_BYTES; b++)
			differs |= (uint8_t)(digest[b] ^ a->keys[i].digest[b]);
		found = differs ? found : i;
	}
	return found;
}

static int32_t find_secret(const struct auth *a, struct str secret)
{
	uint8_t digest[SHA256_BYTES];
	digest_of(secret, digest);
	return find_digest(a, digest);
}

int32_t auth_check(const struct auth *a, struct str authorization, struct str x_api_key)
{
	static const char scheme[] = "Bearer";
	size_t skip = sizeof scheme - 1;
	int32_t found = AUTH_REFUSED;

	if (a->open)
		return 0;
	if (x_api_key.p)
		found = find_secret(a, x_api_key);
	if (found != AUTH_REFUSED || !authorization.p || authorization.n <= skip ||
	    strncasecmp(authorization.p, scheme, skip) != 0 || authorization.p[skip] != ' ')
		return found;
	while (skip < authorization.n && authorization.p[skip] == ' ')
		skip++;
	return find_secret(a, (struct str){authorization.p + skip, authorization.n - skip});
}

const struct auth_key *auth_find(const struct auth *a, int32_t tenant)
{
	if (tenant < 0 || tenant >= a->n || !(a->keys[tenant].live || (a->open && tenant == 0)))
		return NULL;
	return &a->keys[tenant];
}

/* ---- The file of keys ---- */

static const char *const fields[] = {"name",         "key",          "sha256",    "cache_salt",
                                     "max_requests", "max_sessions", "kv_memory", "admin"};

static enum status check_fields(const struct json *entry, struct error *err)
{
	struct json member;
	void *it = NULL;
	enum status st = json_expect(entry, JSON_DICT, err);
	if (st == STATUS_OK && !json_has(entry))
		return json_fail(entry, STATUS_INVALID, err, "must be an object.");
	while (st == STATUS_OK && json_next(entry, &it, &member)) {
		bool known = false;
		for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
			known = known || strcmp(member.key, fields[i]) == 0;
		/* A limit with a typing error in its name would be no limit. */
		if (!known)
			st = json_fail(&member, STATUS_INVALID, err, "is no field of a key.");
	}
	return st;
}

static enum status read_name(const struct json *entry, char name[AUTH_NAME_MAX + 1], struct error *err)
{
	struct json j = json_get(entry, "name");
	struct str s = json_text(&j);
	bool ok = s.p && s.n > 0 && s.n <= AUTH_NAME_MAX;
	for (size_t i = 0; ok && i < s.n; i++)
		ok = (s.p[i] >= 'a' && s.p[i] <= 'z') || (s.p[i] >= 'A' && s.p[i] <= 'Z') ||
		     (s.p[i] >= '0' && s.p[i] <= '9') || s.p[i] == '_' || s.p[i] == '-' || s.p[i] == '.';
	if (!ok)
		return json_fail(entry, STATUS_INVALID, err,
		                 "needs a \"name\" of 1 to %d of the characters A-Z a-z 0-9 _ . -", AUTH_NAME_MAX);
	if (str_is(s, default_name))
		return json_fail(&j, STATUS_INVALID, err, "is \"%s\", which is the name of the key of --api-key.",
		                 default_name);
	memcpy(name, s.p, s.n);
	name[s.n] = '\0';
	return STATUS_OK;
}

static bool read_hex(struct str s, uint8_t digest[SHA256_BYTES])
{
	if (s.n != 2 * SHA256_BYTES)
		return false;
	for (size_t i = 0; i < s.n; i++) {
		char c = s.p[i];
		int v = c >= '0' && c <= '9'   ? c - '0'
		        : c >= 'a' && c <= 'f' ? c - 'a' + 10
		        : c >= 'A' && c <= 'F' ? c - 'A' + 10
		                               : -1;
		if (v < 0)
			return false;
		digest[i / 2] = (uint8_t)(i % 2 ? digest[i / 2] << 4 | v : v);
	}
	return true;
}

static enum status read_secret(const struct json *entry, uint8_t digest[SHA256_BYTES], struct error *err)
{
	struct json key = json_get(entry, "key"), hex = json_get(entry, "sha256");
	struct str s = json_text(&key);
	if (json_has(&key) == json_has(&hex))
		return json_fail(entry, STATUS_INVALID, err, "needs either \"key\" or \"sha256\".");
	if (json_has(&key)) {
		if (!s.p || s.n == 0)
			return json_fail(&key, STATUS_INVALID, err, "must be a string that is not empty.");
		if (!config_key_fits_header(s))
			return json_fail(&key, STATUS_INVALID, err,
			                 "cannot be carried by a header: there is a control character in it, or a "
			                 "space at its end.");
		digest_of(s, digest);
		return STATUS_OK;
	}
	return read_hex(json_text(&hex), digest)
	               ? STATUS_OK
	               : json_fail(&hex, STATUS_INVALID, err, "must be 64 hexadecimal digits.");
}

/*
 * The salt decides with whom KV is shared, and so whose prompts one can guess at by how quickly they are answered: by
 * default nobody's.
 */
static enum status read_salt(const struct json *entry, const char *name, char salt[ENGINE_SALT_MAX + 1],
                             struct error *err)
{
	struct json j = json_get(entry, "cache_salt");
	struct str s = str_from(name);
	enum status st = json_read_text(&j, &s, err);
	if (st != STATUS_OK)
		return st;
	if (s.n > ENGINE_SALT_MAX || memchr(s.p, '\0', s.n))
		return json_fail(&j, STATUS_INVALID, err, "must be at most %d bytes without a NUL.", ENGINE_SALT_MAX);
	memcpy(salt, s.p, s.n);
	salt[s.n] = '\0';
	return STATUS_OK;
}

/* A number of bytes as the options have it: a number, or text such as "512M". */
static enum status read_bytes(const struct json *entry, const char *name, uint64_t *out, struct error *err)
{
	static const struct option row = {OPTION_BYTES, "kv_memory", 0, NULL, 0, 0, 0, INT64_MAX, NULL};
	struct json j = json_get(entry, name);
	int64_t v = 0;
	if (json_kind(&j) == JSON_TEXT) {
		if (option_set(&row, &v, json_text(&j), "", NULL) != STATUS_OK)
			return json_fail(&j, STATUS_INVALID, err, "must be a number of bytes such as 512M or 4G.");
	} else {
		enum status st = json_read_int(&j, 0, INT64_MAX, &v, err);
		if (st != STATUS_OK)
			return st;
	}
	*out = (uint64_t)v;
	return STATUS_OK;
}

static enum status read_count(const struct json *entry, const char *name, int32_t *out, struct error *err)
{
	struct json j = json_get(entry, name);
	int64_t v = 0;
	enum status st = json_read_int(&j, 0, INT32_MAX, &v, err);
	*out = (int32_t)v;
	return st;
}

static enum status read_key(const struct json *entry, struct auth_key *k, struct error *err)
{
	struct engine_tenant_limits *limits = &k->tenant.limits;
	enum status st = check_fields(entry, err);
	struct json admin = json_get(entry, "admin");
	*k = (struct auth_key){.live = true};
	if (st == STATUS_OK)
		st = read_name(entry, k->name, err);
	if (st == STATUS_OK)
		st = read_secret(entry, k->digest, err);
	if (st == STATUS_OK)
		st = read_salt(entry, k->name, k->tenant.salt, err);
	if (st == STATUS_OK)
		st = read_count(entry, "max_requests", &limits->max_requests, err);
	if (st == STATUS_OK)
		st = read_count(entry, "max_sessions", &limits->max_sessions, err);
	if (st == STATUS_OK)
		st = read_bytes(entry, "kv_memory", &limits->kv_bytes, err);
	if (st == STATUS_OK)
		st = json_read_bool(&admin, &k->admin, err);
	return st;
}

/* Puts a key in the place of its name, or in a new one. */
static enum status place_key(struct auth *a, const struct json *entry, struct auth_key *k, struct error *err)
{
	int32_t at = 1;
	while (at < a->n && strcmp(a->keys[at].name, k->name) != 0)
		at++;
	if (at < a->n && a->keys[at].live)
		return json_fail(entry, STATUS_INVALID, err, "has the name \"%s\", which another key has already.",
		                 k->name);
	int32_t twin = find_digest(a, k->digest);
	if (twin != AUTH_REFUSED)
		return json_fail(entry, STATUS_INVALID, err, "has the same secret as the key \"%s\".",
		                 a->keys[twin].name);
	if (at == ENGINE_MAX_TENANTS)
		return json_fail(entry, STATUS_LIMIT, err,
		                 "is one name too many: there may be %d, those counted that were removed.",
		                 ENGINE_MAX_TENANTS - 1);
	k->tenant.id = at;
	memcpy(k->tenant.name, k->name, sizeof k->tenant.name);
	a->keys[at] = *k;
	a->n += at == a->n;
	return STATUS_OK;
}

static enum status read_keys(struct auth *a, const struct json *root, struct error *err)
{
	struct json list = json_get(root, "keys");
	enum status st = json_expect(&list, JSON_LIST, err);
	for (int32_t i = 1; i < a->n; i++)
		a->keys[i].live = false;
	/* Without a key nobody could get in, or, worse, everybody. */
	if (st == STATUS_OK && json_len(&list) == 0)
		st = error_set(err, STATUS_INVALID, "\"keys\" must be an array of at least one key");
	for (size_t i = 0; st == STATUS_OK && i < json_len(&list); i++) {
		struct json entry = json_at(&list, i);
		struct auth_key k;
		st = read_key(&entry, &k, err);
		if (st == STATUS_OK)
			st = place_key(a, &entry, &k, err);
	}
	return st;
}

/* What a parser quotes of the text it could not read may be a secret. */
static void drop_quotation(char *message)
{
	char *near = strstr(message, " near '"), *where = NULL;
	for (char *p = near; p && (p = strstr(p, " (line ")); p++)
		where = p;
	if (near && where)
		memmove(near, where, strlen(where) + 1);
	else if (near)
		*near = '\0';
}

enum status auth_set_keys(struct auth *a, struct str text, const char *where, struct error *err)
{
	struct json_doc *doc = NULL;
	struct json root;
	struct error inner = {0};
	struct auth *next = malloc(sizeof *next);
	if (!next)
		return error_set(err, STATUS_NOMEM, "%s: there is no memory for the keys", where);
	*next = *a;
	enum status st = json_parse(text, "The text", &doc, &root, &inner);
	if (st == STATUS_OK)
		st = read_keys(next, &root, &inner);
	if (st == STATUS_OK) {
		next->open = false;
		*a = *next;
	} else {
		drop_quotation(inner.message);
		error_set_param(err, st, "api-keys", "%s: %s", where, inner.message);
	}
	json_doc_free(doc);
	free(next);
	return st;
}
