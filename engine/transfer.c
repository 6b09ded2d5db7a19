#include "engine/transfer.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "engine/base/hmac.h"

enum {
	FORMAT = 2,
	BYTE_ORDER_MARK = 0x01020304,
	RECORD_MAGIC = 0x5047564B, /* "KVGP" */
	PART_BYTES = 1 << 20,
};
static const char MAGIC[8] = "KVXPORT";

struct header {
	char magic[8];
	uint32_t byte_order, format;
	struct kv_key identity;
	/* For the error message: identity and version bind. */
	char version[32], model[96], scheme[96], type[16];
	uint64_t page_bytes;
	int32_t n_pages, n_tokens;
	struct session_saved session;
	uint8_t tag[SHA256_BYTES];
};

/* In front of a page's bytes; the last one, number n_pages, has none. */
struct record {
	uint32_t magic;
	int32_t index;
	int32_t n_tokens;
	uint32_t flags; /* enum record_flags */
	struct kv_key key, parent;
	int32_t tokens[KV_PAGE_TOKENS];
	uint8_t tag[SHA256_BYTES];
};
static_assert(sizeof(struct record) == 16 + 5 * SHA256_BYTES, "padding");

enum record_flags {
	RECORD_FIRST = 1,
	RECORD_WIDE = 2 /* the page's bytes are followed by its wide copy's: kv/image.h */
};

struct transfer {
	struct list link;
	uint64_t id;
	uint8_t tag[SHA256_BYTES]; /* the last one */
	int32_t n_pages, at;       /* pages in all, and done */
	/* An export's. */
	bool is_export;
	struct header header;      /* import: as it has come */
	struct kv_weak_page *pages; /* export: [n_pages]. import: those that have joined the index, [n_joined] */
	struct kv_key *keys;       /* export: [n_pages] */
	struct kv_read read;       /* export: of a page that is in a tier */
	struct kv_page_name name;  /* export: that page's */
	/* An import's. */
	struct engine_session_params params;
	struct session *session;   /* once the header is there */
	uint64_t session_serial;
	int32_t n_joined;
	bool lost;                 /* one was evicted or found no room: the rest is of no use */
	struct record record;      /* whose page comes next */
	bool in_page;
	char *bytes;               /* import: [need] of what is expected next. export: what a tier gives */
	size_t have, need;
	bool complete;
};

static int64_t calendar_ms(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_REALTIME, &ts);
	return (int64_t)ts.tv_sec * 1000 + ts.tv_nsec / 1000000;
}

void transfers_init(struct transfers *t)
{
	list_init(&t->all);
	t->n = 0;
}

static struct transfer *find(struct transfers *t, uint64_t id)
{
	list_each(l, next, &t->all) {
		struct transfer *x = list_entry(l, struct transfer, link);
		if (x->id == id)
			return x;
	}
	return NULL;
}

static void drop(struct transfers *t, const struct engine *e, struct transfer *x)
{
	if (e->tiers)
		kv_tiers_read_cancel(e->tiers, &x->read);
	list_remove(&x->link);
	t->n--;
	free(x->pages);
	free(x->keys);
	free(x->bytes);
	free(x);
}

static enum status begin(struct transfers *t, const struct engine *e, uint64_t id, struct transfer **out,
                         struct error *err)
{
	if (!e->options.transfer_key)
		return error_set(err, STATUS_UNSUPPORTED,
		                 "sessions cannot be moved: this daemon was started without --transfer-key");
	if (t->n >= TRANSFERS_MAX)
		return error_set(err, STATUS_LIMIT,
		                 "%d sessions are being moved, the most that may at once; try again later",
		                 TRANSFERS_MAX);
	struct transfer *x = calloc(1, sizeof *x);
	if (!x)
		return error_set(err, STATUS_NOMEM, "no memory to move a session");
	x->id = id;
	list_push_back(&t->all, &x->link);
	t->n++;
	*out = x;
	return STATUS_OK;
}

/* Moves x->tag on over [data, extra); extra may be NULL. */
static void next_tag(const struct engine *e, struct transfer *x, const void *data, size_t n, const void *extra,
                     size_t n_extra)
{
	const char *key = e->options.transfer_key;
	struct hmac h;
	hmac_init(&h, key, strlen(key));
	hmac_update(&h, x->tag, sizeof x->tag);
	hmac_update(&h, data, n);
	hmac_update(&h, extra, n_extra);
	hmac_final(&h, x->tag);
}

static struct kv_tier_device device_of(const struct engine *e)
{
	return (struct kv_tier_device){e->backend, kv_pool_slab(e->pool), e->layout};
}

/* What every stream of this daemon begins with. */
static void fill_header(const struct engine *e, struct header *h)
{
	memset(h, 0, sizeof *h);
	memcpy(h->magic, MAGIC, sizeof h->magic);
	h->byte_order = BYTE_ORDER_MARK;
	h->format = FORMAT;
	h->identity = e->identity;
	snprintf(h->version, sizeof h->version, "%s", KVASIR_VERSION);
	snprintf(h->model, sizeof h->model, "%s", e->info.file_name);
	snprintf(h->scheme, sizeof h->scheme, "%s", e->scheme_text);
	snprintf(h->type, sizeof h->type, "%s", e->info.kv_type);
	h->page_bytes = e->layout.page_bytes;
}

/* ---- Out ---- */

/* How many of the session's pages, from the first on, are in the device or, behind those, in a tier. */
static int32_t count_pages(const struct engine *e, const struct kv_weak *kv)
{
	struct kv_page_name name;
	int32_t n = kv_weak_alive(e->prefix, kv);
	while (e->tiers && n < kv->n_pages && kv_tiers_find(e->tiers, &kv->keys[n], &name))
		n++;
	return n;
}

enum status export_begin(struct transfers *t, struct engine *e, uint64_t id, const struct session_table *sessions,
                         const struct session *s, struct error *err)
{
	struct transfer *x = NULL;
	enum status st = begin(t, e, id, &x, err);
	if (st != STATUS_OK)
		return st;
	x->is_export = true;
	x->n_pages = count_pages(e, &s->kv);
	x->pages = calloc((size_t)x->n_pages + 1, sizeof *x->pages);
	x->keys = calloc((size_t)x->n_pages + 1, sizeof *x->keys);
	x->bytes = e->tiers ? malloc(kv_image_bytes(&e->layout, true)) : NULL;
	if (!x->pages || !x->keys || (e->tiers && !x->bytes)) {
		drop(t, e, x);
		return error_set(err, STATUS_NOMEM, "no memory to export a session");
	}
	if (x->n_pages > 0) {
		memcpy(x->pages, s->kv.pages, (size_t)x->n_pages * sizeof *x->pages);
		memcpy(x->keys, s->kv.keys, (size_t)x->n_pages * sizeof *x->keys);
	}
	fill_header(e, &x->header);
	x->header.n_pages = x->n_pages;
	x->header.n_tokens =
		s->kv.n_tokens < x->n_pages * KV_PAGE_TOKENS ? s->kv.n_tokens : x->n_pages * KV_PAGE_TOKENS;
	session_save(sessions, s, calendar_ms(), &x->header.session);
	x->at = -1;
	return STATUS_OK;
}

static enum status page_is_gone(struct error *err)
{
	return error_set(err, STATUS_BUSY, "a page of the session was lost while it was exported; try again");
}

/* Appends a record, the page's image behind it. */
static enum status append_record(const struct engine *e, struct transfer *x, const struct kv_page_name *name, bool wide,
                                 const void *image, struct buf *out, struct error *err)
{
	struct record r = {.magic = RECORD_MAGIC, .index = x->at};
	size_t n = image ? kv_image_bytes(&e->layout, wide) : 0;
	if (image) {
		r.n_tokens = name->n_tokens;
		r.flags = (name->first ? RECORD_FIRST : 0) | (wide ? RECORD_WIDE : 0);
		r.key = name->key;
		r.parent = name->parent;
		memcpy(r.tokens, name->tokens, (size_t)name->n_tokens * sizeof *r.tokens);
	}
	next_tag(e, x, &r, offsetof(struct record, tag), image, n);
	memcpy(r.tag, x->tag, sizeof r.tag);
	buf_append(out, &r, sizeof r);
	buf_append(out, image, n);
	x->at++;
	return out->failed ? error_set(err, STATUS_NOMEM, "no memory to export a session") : STATUS_OK;
}

/* The page at hand is in a tier, if it is anywhere. *later: it is on its way. */
static enum status export_from_tier(const struct engine *e, struct transfer *x, struct buf *out, bool *later,
                                    struct error *err)
{
	if (!e->tiers)
		return page_is_gone(err);
	if (x->read.state == KV_READ_NONE) {
		enum status st = STATUS_NOT_FOUND;
		if (kv_tiers_find(e->tiers, &x->keys[x->at], &x->name))
			st = kv_tiers_read(e->tiers, &x->read, &x->name, x->bytes);
		if (st != STATUS_OK && st != STATUS_LIMIT)
			return page_is_gone(err);
	}
	*later = x->read.state == KV_READ_NONE || x->read.state == KV_READ_UNDER_WAY;
	if (*later)
		return STATUS_OK;
	bool good = x->read.state == KV_READ_DONE;
	x->read.state = KV_READ_NONE;
	return good ? append_record(e, x, &x->name, x->read.wide, x->bytes, out, err) : page_is_gone(err);
}

/* Appends a page's record and its bytes, or the last record. */
static enum status export_page(const struct engine *e, struct transfer *x, struct buf *out, bool *later,
                               struct error *err)
{
	const struct kv_tier_device device = device_of(e);
	struct kv_page_name name;
	if (x->at == x->n_pages)
		return append_record(e, x, NULL, false, NULL, out, err);
	const struct kv_weak_page *w = &x->pages[x->at];
	if (x->read.state != KV_READ_NONE || kv_prefix_serial(e->prefix, w->page) != w->serial ||
	    !kv_prefix_name(e->prefix, w->page, &name))
		return export_from_tier(e, x, out, later, err);
	bool wide = kv_image_is_wide(&e->layout, w->page);
	char *image = malloc(kv_image_bytes(&e->layout, wide));
	if (!image)
		return error_set(err, STATUS_NOMEM, "no memory to export a session");
	enum status st = kv_image_read(&device, w->page, wide, image);
	if (st != STATUS_OK)
		error_set(err, st = STATUS_DEVICE, "the device did not give a page of the session");
	else
		st = append_record(e, x, &name, wide, image, out, err);
	free(image);
	return st;
}

enum status export_next(struct transfers *t, struct engine *e, uint64_t id, struct buf *out, bool *more, bool *later,
                        struct error *err)
{
	struct transfer *x = find(t, id);
	enum status st = STATUS_OK;
	*more = *later = false;
	if (!x || !x->is_export)
		return error_set(err, STATUS_CANCELLED, "the export has ended");
	if (x->at < 0) {
		next_tag(e, x, &x->header, offsetof(struct header, tag), NULL, 0);
		memcpy(x->header.tag, x->tag, sizeof x->tag);
		buf_append(out, &x->header, sizeof x->header);
		x->at = 0;
	}
	/* A page more than the least: one larger than a part goes out as well. */
	do {
		st = export_page(e, x, out, later, err);
	} while (st == STATUS_OK && !*later && x->at <= x->n_pages && out->len + e->layout.page_bytes <= PART_BYTES);
	*more = st == STATUS_OK && x->at <= x->n_pages;
	*later = *later && out->len == 0;
	if (!*more)
		drop(t, e, x);
	return st;
}

/* ---- In ---- */

enum status import_begin(struct transfers *t, struct engine *e, uint64_t id, const struct engine_session_params *p,
                         struct error *err)
{
	struct transfer *x = NULL;
	enum status st = begin(t, e, id, &x, err);
	if (st != STATUS_OK)
		return st;
	x->params = *p;
	x->need = sizeof x->header;
	/* The longest thing that is expected; nothing is ever taken from the stream's own sizes. */
	size_t most = sizeof(struct record) + kv_image_bytes(&e->layout, true);
	x->bytes = malloc(most > sizeof x->header ? most : sizeof x->header);
	if (!x->bytes) {
		drop(t, e, x);
		return error_set(err, STATUS_NOMEM, "no memory to import a session");
	}
	return STATUS_OK;
}

static enum status differs(struct error *err, const char *what, const char *theirs, const char *ours)
{
	return error_set_param(err, STATUS_INVALID, "body", "the export is of %s '%.95s', but this daemon has '%.95s'",
	                       what, theirs, ours);
}

static enum status check_header(const struct engine *e, struct transfer *x, const struct tenant *tenant,
                                struct error *err)
{
	struct header ours, *h = &x->header;
	memcpy(h, x->bytes, sizeof *h);
	fill_header(e, &ours);
	if (memcmp(h->magic, MAGIC, sizeof h->magic) != 0)
		return error_set_param(err, STATUS_INVALID, "body", "the body is not an export of a session");
	if (h->byte_order != BYTE_ORDER_MARK || h->format != FORMAT)
		return error_set_param(err, STATUS_INVALID, "body",
		                       "the export has another format or byte order than this daemon's");
	next_tag(e, x, h, offsetof(struct header, tag), NULL, 0);
	if (!hmac_equal(x->tag, h->tag))
		return error_set_param(err, STATUS_INVALID, "body",
		                       "the export is damaged, or was made under another --transfer-key");
	/* From here on it is what a daemon with the key wrote; what it says may still not fit. */
	if (strcmp(h->version, ours.version) != 0)
		return differs(err, "version", h->version, ours.version);
	if (strcmp(h->type, ours.type) != 0)
		return differs(err, "KV type", h->type, ours.type);
	if (strcmp(h->scheme, ours.scheme) != 0)
		return differs(err, "backend", h->scheme, ours.scheme);
	if (memcmp(&h->identity, &ours.identity, sizeof ours.identity) != 0 || h->page_bytes != ours.page_bytes)
		return differs(err, "model", h->model, ours.model);
	if (h->n_pages < 0 || h->n_tokens < 0 || h->n_pages != kv_pages_for(h->n_tokens) || h->n_tokens > e->info.n_ctx)
		return error_set_param(err, STATUS_INVALID, "body",
		                       "the export has %" PRId32 " tokens in %" PRId32
		                       " pages, more than the context of %" PRId32 " tokens here",
		                       h->n_tokens, h->n_pages, e->info.n_ctx);
	if (strncmp(h->session.tenant, tenant->name, sizeof tenant->name) != 0)
		return error_set_param(err, STATUS_INVALID, "body", "the export belongs to another API key");
	return STATUS_OK;
}

/* The header is there: so is the session, under whose claim its pages join the index. */
static enum status take_header(struct engine *e, struct transfer *x, struct session_table *sessions, struct error *err)
{
	const struct tenant *tenant = tenant_find(sessions->tenants, x->params.tenant);
	if (!tenant)
		return error_set(err, STATUS_NOMEM, "no memory for another tenant");
	enum status st = check_header(e, x, tenant, err);
	if (st != STATUS_OK)
		return st;
	x->n_pages = x->header.n_pages;
	x->pages = calloc((size_t)x->n_pages + 1, sizeof *x->pages);
	if (!x->pages)
		return error_set(err, STATUS_NOMEM, "no memory to import a session");
	struct session_saved saved = x->header.session;
	memcpy(saved.id, x->params.id, sizeof saved.id);
	/* Only sessions of the server's own live for ever, and an imported one is none. */
	if (saved.heartbeat_ms < 0)
		saved.heartbeat_ms = 0;
	if (saved.ttl_ms < 0)
		saved.ttl_ms = 0;
	st = session_restore(sessions, x->params.tenant, &saved, calendar_ms(), err);
	if (st != STATUS_OK)
		return st;
	x->session = session_find(sessions, x->params.tenant, saved.id);
	x->session_serial = x->session ? x->session->serial : 0;
	x->need = sizeof(struct record);
	return x->session ? STATUS_OK : error_set(err, STATUS_NOT_FOUND, "the session's time has passed");
}

/* A page to load into, or KV_NO_PAGE. The one behind which it will be is not taken for it. */
static int32_t take_page(struct engine *e, int32_t parent, struct kv_holder holder)
{
	int32_t page = kv_pool_get(e->pool, holder);
	if (page != KV_NO_PAGE)
		return page;
	if (parent != KV_NO_PAGE)
		kv_pool_ref(e->pool, parent, holder);
	if (kv_prefix_evict(e->prefix, clock_now_ms(e->clock), EVICT_FOR_PROMPT))
		page = kv_pool_get(e->pool, holder);
	if (parent != KV_NO_PAGE)
		kv_pool_unref(e->pool, parent, holder);
	return page;
}

/* The page joins the index behind the one before it; when it cannot, it is computed again some day. */
static void join(struct engine *e, struct transfer *x, const struct kv_page_name *name, bool wide, const char *image)
{
	const struct kv_tier_device device = device_of(e);
	struct kv_holder holder = {KV_HOLDER_COPY, x->id};
	struct kv_use use = {
		.now_ms = clock_now_ms(e->clock), .n_prompt = x->header.n_tokens, .claim = x->session->claim};
	int32_t parent = KV_NO_PAGE, joined = KV_NO_PAGE;
	if (x->n_joined > 0) {
		const struct kv_weak_page *last = &x->pages[x->n_joined - 1];
		parent = last->page;
		if (kv_prefix_serial(e->prefix, parent) != last->serial) {
			x->lost = true;
			return;
		}
	}
	int32_t page = take_page(e, parent, holder);
	if (page == KV_NO_PAGE) {
		x->lost = true;
		return;
	}
	if (kv_image_write(&device, page, wide, image) == STATUS_OK)
		joined = kv_prefix_adopt(e->prefix, name, parent, page, &use);
	kv_pool_unref(e->pool, page, holder);
	if (joined == KV_NO_PAGE) {
		x->lost = true;
		return;
	}
	x->pages[x->n_joined++] = (struct kv_weak_page){joined, kv_prefix_serial(e->prefix, joined)};
}

static enum status damaged(const struct transfer *x, struct error *err)
{
	return error_set_param(err, STATUS_INVALID, "body", "the export is damaged at page %" PRId32 " of %" PRId32,
	                       x->at, x->n_pages);
}

/* A record is there, whose page comes next; the last one has none. That it is whole shows when its page is there. */
static enum status take_record(struct engine *e, struct transfer *x, struct error *err)
{
	struct record *r = &x->record;
	bool wide, last = x->at == x->n_pages;
	memcpy(r, x->bytes, sizeof *r);
	wide = (r->flags & RECORD_WIDE) && e->layout.wide;
	if (r->magic != RECORD_MAGIC || r->index != x->at || (last && r->flags != 0))
		return damaged(x, err);
	x->in_page = !last;
	x->need = last ? sizeof *r : kv_image_bytes(&e->layout, wide);
	if (!last)
		return STATUS_OK;
	next_tag(e, x, r, offsetof(struct record, tag), NULL, 0);
	x->complete = hmac_equal(x->tag, r->tag);
	return x->complete ? STATUS_OK : damaged(x, err);
}

static enum status take_page_bytes(struct engine *e, struct transfer *x, struct error *err)
{
	const struct record *r = &x->record;
	struct kv_page_name name = {0};
	next_tag(e, x, r, offsetof(struct record, tag), x->bytes, x->need);
	if (!hmac_equal(x->tag, r->tag))
		return damaged(x, err);
	/* Only the last page may have room, and it may hold more than the session saw of it. */
	int32_t n = x->at + 1 < x->n_pages ? KV_PAGE_TOKENS : x->header.n_tokens - (x->n_pages - 1) * KV_PAGE_TOKENS;
	if (r->n_tokens < n || r->n_tokens > KV_PAGE_TOKENS || ((r->flags & RECORD_FIRST) != 0) != (r->index == 0))
		return damaged(x, err);
	name.key = r->key;
	name.parent = r->parent;
	name.n_tokens = r->n_tokens;
	name.first = r->flags & RECORD_FIRST;
	memcpy(name.tokens, r->tokens, (size_t)r->n_tokens * sizeof *r->tokens);
	if (!x->lost)
		join(e, x, &name, x->need > e->layout.page_bytes, x->bytes);
	x->at++;
	x->in_page = false;
	x->need = sizeof *r;
	return STATUS_OK;
}

/* The session is still the one that this import has made; it may have ended meanwhile. */
static struct session *own_session(const struct transfer *x, struct session_table *sessions)
{
	struct session *s = x->session ? session_find(sessions, x->params.tenant, x->params.id) : NULL;
	return s && s->serial == x->session_serial ? s : NULL;
}

/* What is there of its pages is the session's from now on. */
static void keep(struct engine *e, const struct transfer *x, struct session_table *sessions, struct session *s)
{
	struct kv_seq seq = KV_SEQ_INIT;
	int32_t n_tokens = 0;
	/* A turn may have begun before the import was complete: what that leaves counts. */
	if (s->running || s->ended.requests != x->header.session.ended.requests)
		return;
	for (int32_t i = 0; i < x->n_joined; i++) {
		int32_t n = kv_prefix_page_tokens(e->prefix, x->pages[i].page);
		if (kv_prefix_serial(e->prefix, x->pages[i].page) != x->pages[i].serial ||
		    !kv_seq_append(e->pool, &seq, x->pages[i].page))
			break;
		n_tokens += n;
	}
	seq.n_tokens = n_tokens < x->header.n_tokens ? n_tokens : x->header.n_tokens;
	session_keep(sessions, s, &seq);
	if (e->tiers)
		kv_tiers_write_behind(e->tiers, &seq);
	kv_seq_release(e->pool, &seq);
}

static enum status take(struct transfer *x, struct engine *e, struct session_table *sessions, const char *data,
                        size_t n, struct error *err)
{
	while (n > 0) {
		size_t k = x->need - x->have < n ? x->need - x->have : n;
		if (x->complete)
			return error_set_param(err, STATUS_INVALID, "body", "the export has %zu bytes too many", n);
		memcpy(x->bytes + x->have, data, k);
		x->have += k;
		data += k;
		n -= k;
		if (x->have < x->need)
			break;
		x->have = 0;
		if (x->session && !own_session(x, sessions))
			return error_set(err, STATUS_NOT_FOUND, "the session ended while it was imported");
		enum status st = !x->session  ? take_header(e, x, sessions, err)
		                 : x->in_page ? take_page_bytes(e, x, err)
		                              : take_record(e, x, err);
		if (st != STATUS_OK)
			return st;
	}
	return STATUS_OK;
}

enum status import_data(struct transfers *t, struct engine *e, struct session_table *sessions, uint64_t id,
                        const char *data, size_t n, struct session **out, struct error *err)
{
	struct transfer *x = find(t, id);
	*out = NULL;
	if (!x || x->is_export)
		return error_set(err, STATUS_CANCELLED, "the import has ended");
	enum status st = take(x, e, sessions, data, n, err);
	if (st == STATUS_OK && n > 0)
		return STATUS_OK;
	if (st == STATUS_OK && !x->complete)
		st = error_set_param(err, STATUS_INVALID, "body",
		                     "the export ends too early, at page %" PRId32 " of %" PRId32, x->at, x->n_pages);
	*out = own_session(x, sessions);
	if (st == STATUS_OK && !*out)
		st = error_set(err, STATUS_NOT_FOUND, "the session ended while it was imported");
	if (st == STATUS_OK)
		keep(e, x, sessions, *out);
	drop(t, e, x);
	return st;
}

struct session *transfer_cancel(struct transfers *t, const struct engine *e, struct session_table *sessions,
                                uint64_t id)
{
	struct transfer *x = find(t, id);
	if (!x)
		return NULL;
	struct session *s = x->is_export ? NULL : own_session(x, sessions);
	drop(t, e, x);
	return s;
}

void transfers_free(struct transfers *t, const struct engine *e)
{
	list_each(l, next, &t->all)
		drop(t, e, list_entry(l, struct transfer, link));
}
