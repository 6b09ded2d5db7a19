/*
 * Any bytes as the stream of POST /v1/sessions/{id}/import, cut anywhere. The base is an export that is made here; the
 * input says what is changed in it, and tags can be put right again, as by somebody who has the key: else nothing
 * behind the first tag would ever be looked at. Whatever comes, an import ends with a session or with an error that
 * says why, and leaves no page and no transfer behind.
 *
 * Input: flags, a byte for the cuts, then changes of three bytes (offset, offset, value); or, with RAW, the stream
 * itself.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/hmac.h"
#include "engine/kv/prefix.h"
#include "engine/transfer.h"
#include "tests/support/memory_backend.h"

enum { NARROW = 1, RETAG = 2, RAW = 4, CUT_SHORT = 8 };
enum { PAGES = 8, WIDE = 3, TOKENS = 56, RECORD_BYTES = 16 + 5 * SHA256_BYTES, FLAGS_AT = 12, FLAG_WIDE = 2 };
static const char KEY[] = "0123456789abcdef";

/* A daemon, as far as transfers know it. */
struct side {
	struct memory_backend backend;
	struct clock clock;
	struct engine engine;
	struct tenant_table tenants;
	struct session_table sessions;
	struct transfers transfers;
	struct buf stream; /* an export of its own */
	size_t header_bytes;
};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void expect(int holds)
{
	if (!holds)
		abort();
}

static void empty(struct side *s)
{
	while (s->sessions.n_sessions)
		session_remove(&s->sessions, s->sessions.heap[0]);
	while (kv_prefix_evict(s->engine.prefix, clock_now_ms(&s->clock), EVICT_FOR_PROMPT))
		;
	struct kv_wide_counts wide;
	kv_pool_wide_counts(s->engine.pool, &wide);
	expect(kv_pool_n_free(s->engine.pool) == PAGES && wide.n_used == 0 && s->transfers.n == 0);
}

/* A session of TOKENS tokens, exported. */
static void make_stream(struct side *s)
{
	struct engine *e = &s->engine;
	struct engine_session_params p = {.id = "base", .ttl_ms = 86400000, .heartbeat_timeout_ms = 86400000};
	struct session *session;
	struct kv_seq seq = KV_SEQ_INIT;
	struct kv_use use = {.now_ms = 1};
	struct kv_chain chain;
	struct kv_key root = {{7}};
	int32_t tokens[TOKENS];
	bool more = true, later;
	chain = kv_chain_of(&root);
	for (int32_t i = 0; i < TOKENS; i++)
		tokens[i] = i;
	expect(session_create(&s->sessions, &p, &session, NULL) == STATUS_OK);
	expect(kv_seq_prepare(e->pool, &seq, TOKENS) == STATUS_OK);
	seq.n_tokens = TOKENS;
	kv_prefix_put(e->prefix, &chain, tokens, &seq, 0, &use);
	expect(kv_prefix_put_tail(e->prefix, tokens, &seq, &use));
	session_keep(&s->sessions, session, &seq);
	kv_seq_release(e->pool, &seq);
	kv_chain_free(&chain);
	expect(export_begin(&s->transfers, e, 1, &s->sessions, session, NULL) == STATUS_OK);
	while (more)
		expect(export_next(&s->transfers, e, 1, &s->stream, &more, &later, NULL) == STATUS_OK && !later);
}

static struct side *side_of(bool narrow)
{
	static struct side *sides[2];
	struct side *s = sides[narrow];
	if (s)
		return s;
	sides[narrow] = s = calloc(1, sizeof *s);
	expect(s != NULL);
	struct engine *e = &s->engine;
	struct kv_layout layout;
	memory_backend_init(&s->backend);
	clock_manual_init(&s->clock, 1000000000);
	expect(kv_layout_init(&layout, 1, 1, 4, QUANT_F16) == STATUS_OK);
	if (narrow)
		kv_layout_narrow(&layout, KV_FORM_INT8);
	expect(kv_pool_create_narrow(&s->backend.base, &layout, PAGES, narrow ? WIDE : 0, &e->pool, NULL) == STATUS_OK);
	expect(kv_prefix_create(e->pool, "lru", &e->prefix, NULL) == STATUS_OK);
	expect(tenant_table_init(&s->tenants, layout.page_stride) == STATUS_OK);
	expect(session_table_init(&s->sessions, &s->tenants, e->prefix, &s->clock, 30000, 300000, 4) == STATUS_OK);
	transfers_init(&s->transfers);
	e->clock = &s->clock;
	e->backend = &s->backend.base;
	e->layout = *kv_pool_layout(e->pool);
	e->options.transfer_key = KEY;
	e->info.file_name = "model";
	e->info.kv_type = narrow ? "int8" : "F16";
	e->info.n_ctx = 100;
	make_stream(s);
	size_t image[] = {kv_image_bytes(&e->layout, false), kv_image_bytes(&e->layout, true)};
	s->header_bytes = s->stream.len - (kv_pages_for(TOKENS) + 1) * RECORD_BYTES -
	                  (size_t)kv_pages_for(TOKENS) * image[0] -
	                  (narrow ? 2 * (image[1] - image[0]) : 0); /* the first page and the last */
	empty(s);
	return s;
}

/* One tag, at `at` of n bytes from p, over what is before it, the bytes behind it, and the tag before. */
static void seal(uint8_t tag[SHA256_BYTES], char *p, size_t at, size_t n_behind)
{
	struct hmac h;
	hmac_init(&h, KEY, sizeof KEY - 1);
	hmac_update(&h, tag, SHA256_BYTES);
	hmac_update(&h, p, at);
	hmac_update(&h, p + at + SHA256_BYTES, n_behind);
	hmac_final(&h, tag);
	memcpy(p + at, tag, SHA256_BYTES);
}

/* Puts right all tags, as far as the stream goes on like one. */
static void retag(const struct side *s, char *p, size_t n)
{
	uint8_t tag[SHA256_BYTES] = {0};
	size_t at = s->header_bytes;
	if (n < at)
		return;
	seal(tag, p, at - SHA256_BYTES, 0);
	while (n - at >= RECORD_BYTES) {
		uint32_t flags;
		memcpy(&flags, p + at + FLAGS_AT, sizeof flags);
		size_t image = n - at == RECORD_BYTES ? 0 : kv_image_bytes(&s->engine.layout, flags & FLAG_WIDE);
		if (image > n - at - RECORD_BYTES)
			return;
		seal(tag, p + at, RECORD_BYTES - SHA256_BYTES, image);
		at += RECORD_BYTES + image;
	}
}

static void import(struct side *s, const char *p, size_t n, size_t step)
{
	struct engine_session_params params = {.id = "new"};
	struct session *session = NULL;
	struct error err = {0};
	enum status st = import_begin(&s->transfers, &s->engine, 2, &params, &err);
	expect(st == STATUS_OK);
	for (size_t at = 0; st == STATUS_OK && at < n; at += step)
		st = import_data(&s->transfers, &s->engine, &s->sessions, 2, p + at, step < n - at ? step : n - at,
		                 &session, &err);
	if (st == STATUS_OK)
		st = import_data(&s->transfers, &s->engine, &s->sessions, 2, NULL, 0, &session, &err);
	expect(st == STATUS_OK ? session != NULL : err.message[0] != '\0');
	if (st == STATUS_OK) {
		struct engine_session_info out;
		session_describe(&s->sessions, session, s->engine.pool, &out);
		expect(out.n_tokens >= 0 && out.n_tokens <= s->engine.info.n_ctx);
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	if (size < 2)
		return 0;
	uint8_t flags = data[0];
	size_t step = 1 + (size_t)data[1] * 3, n;
	struct side *s = side_of(flags & NARROW);
	const uint8_t *rest = data + 2;
	size -= 2;
	char *p;
	if (flags & RAW) {
		n = size;
		p = malloc(n + 1);
		expect(p != NULL);
		memcpy(p, rest, n);
	} else {
		n = s->stream.len;
		p = malloc(n + 1);
		expect(p != NULL);
		memcpy(p, s->stream.data, n);
		for (; size >= 3; rest += 3, size -= 3)
			p[((size_t)rest[0] << 8 | rest[1]) % n] = (char)rest[2];
		if (flags & CUT_SHORT && size > 0)
			n -= rest[0] < n ? rest[0] : n;
	}
	if (flags & RETAG)
		retag(s, p, n);
	import(s, p, n, step);
	free(p);
	empty(s);
	return 0;
}
