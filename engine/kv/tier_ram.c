/*
 * The tier in host memory. Pages of different sizes (wide and narrow ones) share one slab without holes: it is cut into
 * units, and a page takes as many as it needs, wherever they lie. Copies happen in the worker's thread: they take
 * microseconds.
 */
#include <stdlib.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/kv/tier_impl.h"

enum {
	NONE = EVICT_NONE,
	UNIT_BYTES = 4096,
	/* Pages that one poll copies: a step never waits longer for it. */
	LOADS_PER_POLL = 16,
};

struct ram {
	struct kv_tier base;
	enum kv_form type;
	char *slab;        /* [n_units][UNIT_BYTES] */
	int32_t *next;     /* [n_units] next unit of the page, or of the free list */
	int32_t n_units, n_free_units, first_free_unit;
	char *wide, *narrow; /* on its way: an image, and a page in a narrower form than the pool's */
};

static int32_t units_for(size_t bytes)
{
	return (int32_t)((bytes + UNIT_BYTES - 1) / UNIT_BYTES);
}

static size_t stored_bytes(const struct ram *r, const struct kv_tier_entry *e)
{
	const struct kv_layout *l = &r->base.device.layout;
	return e->form == KV_FORM_F16 ? kv_image_bytes(l, e->wide) : kv_codec_bytes(l, e->form);
}

/* Whether a page is kept as it is although the tier is a narrow one. */
static bool stays_wide(struct ram *r, const struct kv_page_name *page)
{
	struct kv_tier_stats *s = &r->base.stats;
	/* The rest of a tail is what was there before, and it will be written on: neither is worth a scale. */
	if (page->first)
		s->wide_sinks++;
	else if (page->n_tokens < KV_PAGE_TOKENS)
		s->wide_tails++;
	return page->first || page->n_tokens < KV_PAGE_TOKENS;
}

/* The device page in its narrow form, to r->narrow: by the device where it can, so that half as much is read. */
static enum status pack(struct ram *r, int32_t page, bool *packed)
{
	const struct kv_tier_device *d = &r->base.device;
	if (d->backend->ops->page_pack)
		return d->backend->ops->page_pack(d->backend, d->slab, &d->layout, page, r->type, r->narrow, packed);
	enum status st = kv_tier_read_page(&r->base, page, false, r->wide);
	*packed = st == STATUS_OK && kv_codec_pack(&d->layout, r->base.order, r->type, r->wide, r->narrow);
	return st;
}

/* The page in r->narrow, to where a load wants it. */
static enum kv_tier_end unpack(struct ram *r, enum kv_form form, const struct kv_tier_load *l)
{
	const struct kv_tier_device *d = &r->base.device;
	if (d->backend->ops->page_unpack && l->to != KV_NO_PAGE) {
		enum status st = d->backend->ops->page_unpack(d->backend, d->slab, &d->layout, l->to, form, r->narrow);
		return st == STATUS_OK ? KV_LOAD_DONE : KV_LOAD_FAILED;
	}
	kv_codec_unpack(&d->layout, r->base.order, form, r->narrow, r->wide);
	return kv_tier_deliver(&r->base, l, false, r->wide);
}

/* Reads a device page as it will be stored: its form, and where it is then. */
static enum status read_page(struct ram *r, struct kv_tier_entry *e, int32_t page, const char **bytes)
{
	bool packed = false;
	if (r->type != KV_FORM_F16 && !stays_wide(r, &e->page)) {
		enum status st = pack(r, page, &packed);
		if (st != STATUS_OK)
			return st;
		r->base.stats.wide_values += !packed;
	}
	e->form = packed ? r->type : KV_FORM_F16;
	*bytes = packed ? r->narrow : r->wide;
	return packed ? STATUS_OK : kv_tier_read_page(&r->base, page, e->wide, r->wide);
}

static void copy_in(struct ram *r, struct kv_tier_entry *e, const char *bytes, size_t n)
{
	int32_t *link = &e->at;
	for (size_t at = 0; at < n; at += UNIT_BYTES) {
		int32_t unit = r->first_free_unit;
		size_t part = n - at < UNIT_BYTES ? n - at : UNIT_BYTES;
		r->first_free_unit = r->next[unit];
		r->n_free_units--;
		memcpy(r->slab + (size_t)unit * UNIT_BYTES, bytes + at, part);
		*link = unit;
		link = &r->next[unit];
	}
	*link = NONE;
}

/* Copies bytes [from, to) of a stored page to where they belong in `bytes`. */
static void copy_out(const struct ram *r, const struct kv_tier_entry *e, char *bytes, size_t from, size_t to)
{
	int32_t unit = e->at;
	size_t at = 0;
	for (; at + UNIT_BYTES <= from; at += UNIT_BYTES)
		unit = r->next[unit];
	while (from < to) {
		/* Units that stand one after the other are one copy. */
		size_t first = (size_t)unit * UNIT_BYTES + (from - at), n = at + UNIT_BYTES - from;
		for (; from + n < to && r->next[unit] == unit + 1; n += UNIT_BYTES, at += UNIT_BYTES)
			unit++;
		n = n < to - from ? n : to - from;
		memcpy(bytes + from, r->slab + first, n);
		from += n;
		at += UNIT_BYTES;
		unit = r->next[unit];
	}
}

static enum kv_tier_put put(struct kv_tier *t, int32_t entry, int32_t device_page)
{
	struct ram *r = (struct ram *)t;
	struct kv_tier_entry *e = &t->entries[entry];
	const char *bytes;
	int64_t start = clock_now_ns(clock_system());
	e->wide = kv_image_is_wide(&t->device.layout, device_page);
	if (read_page(r, e, device_page, &bytes) != STATUS_OK)
		return KV_PUT_FAILED;
	size_t n = stored_bytes(r, e);
	while (r->n_free_units < units_for(n)) {
		if (!kv_tier_evict(t))
			return KV_PUT_FULL;
	}
	copy_in(r, e, bytes, n);
	kv_tier_release(t, entry);
	t->stats.bytes_written += n;
	kv_tier_measure(&t->stats.write_bytes_per_s, t->device.layout.page_bytes, clock_now_ns(clock_system()) - start);
	return KV_PUT_STORED;
}

static void leave(struct kv_tier *t, int32_t entry)
{
	struct ram *r = (struct ram *)t;
	for (int32_t unit = t->entries[entry].at, next; unit != NONE; unit = next) {
		next = r->next[unit];
		r->next[unit] = r->first_free_unit;
		r->first_free_unit = unit;
		r->n_free_units++;
	}
}

static int32_t n_parts(const struct kv_tier *t, int32_t entry)
{
	return kv_image_n_parts(&t->device.layout, t->entries[entry].wide);
}

/* Some layers of a page that is kept in a narrower form. */
static enum kv_tier_end load_narrow_part(struct ram *r, const struct kv_tier_entry *e, const struct kv_tier_load *l)
{
	const struct kv_tier_device *d = &r->base.device;
	struct kv_image_part part = kv_image_part(&d->layout, kv_image_n_parts(&d->layout, e->wide), l->part);
	struct kv_codec_span scales, codes;
	kv_codec_spans(&d->layout, part.first_layer, part.n_layers, &scales, &codes);
	copy_out(r, e, r->narrow, scales.begin, scales.end);
	copy_out(r, e, r->narrow, codes.begin, codes.end);
	kv_codec_unpack_layers(&d->layout, r->base.order, e->form, r->narrow, part.first_layer, part.n_layers, r->wide);
	return kv_tier_deliver(&r->base, l, false, r->wide);
}

/* Of a page that is kept as it is what the load wants: straight to its place where that is memory of the host. */
static enum kv_tier_end load_as_is(struct ram *r, const struct kv_tier_entry *e, const struct kv_tier_load *l)
{
	const struct kv_tier_device *d = &r->base.device;
	struct kv_image_part part = {.end = stored_bytes(r, e)};
	if (l->part != KV_WHOLE)
		part = kv_image_part(&d->layout, kv_image_n_parts(&d->layout, e->wide), l->part);
	if (r->base.host_memory && l->to != KV_NO_PAGE && !e->wide) {
		copy_out(r, e, (char *)d->slab + (size_t)l->to * d->layout.page_stride, part.begin, part.end);
		return KV_LOAD_DONE;
	}
	copy_out(r, e, r->wide, part.begin, part.end);
	return kv_tier_deliver(&r->base, l, e->wide, r->wide);
}

static enum kv_tier_end load(struct ram *r, const struct kv_tier_load *l)
{
	struct kv_tier *t = &r->base;
	const struct kv_tier_entry *e = &t->entries[l->entry];
	int64_t start = clock_now_ns(clock_system());
	size_t n = stored_bytes(r, e), all = t->device.layout.page_bytes;
	enum kv_tier_end end;
	if (e->form == KV_FORM_F16) {
		end = load_as_is(r, e, l);
	} else if (l->part != KV_WHOLE) {
		end = load_narrow_part(r, e, l);
	} else {
		copy_out(r, e, r->narrow, 0, n);
		end = unpack(r, e->form, l);
	}
	if (end != KV_LOAD_DONE)
		return end;
	if (l->part != KV_WHOLE) {
		struct kv_image_part part = kv_image_part(&t->device.layout, n_parts(t, l->entry), l->part);
		n = n * (part.end - part.begin) / all;
		all = part.end - part.begin;
	}
	t->stats.bytes_read += n;
	kv_tier_measure(&t->stats.read_bytes_per_s, all, clock_now_ns(clock_system()) - start);
	return KV_LOAD_DONE;
}

static enum kv_tier_end load_now(struct kv_tier *t, const struct kv_tier_load *l)
{
	return load((struct ram *)t, l);
}

static void advance(struct kv_tier *t)
{
	int n = 0;
	for (int i = 0; i < KV_TIER_MAX_LOADS && n < LOADS_PER_POLL; i++) {
		struct kv_tier_load *l = &t->loads[i];
		if (l->entry == NONE || l->ended)
			continue;
		if (!l->cancelled)
			n++;
		kv_tier_end_load(t, l, l->cancelled ? KV_LOAD_FAILED : load((struct ram *)t, l));
	}
}

static void stats(const struct kv_tier *t, struct kv_tier_stats *out)
{
	const struct ram *r = (const struct ram *)t;
	out->used_bytes = (uint64_t)(r->n_units - r->n_free_units) * UNIT_BYTES;
}

static void destroy(struct kv_tier *t)
{
	struct ram *r = (struct ram *)t;
	kv_tier_fini(t);
	free(r->narrow);
	free(r->wide);
	free(r->next);
	free(r->slab);
	free(r);
}

enum status kv_tier_ram_create(const struct kv_tier_device *device, const struct clock *clock, uint64_t bytes,
                               enum kv_form type, struct kv_tier **out, struct error *err)
{
	static const struct kv_tier_ops ops = {
		.put = put,
		.n_parts = n_parts,
		.load_now = load_now,
		.advance = advance,
		.leave = leave,
		.stats = stats,
		.destroy = destroy,
	};
	size_t narrow = kv_codec_bytes(&device->layout, type), wide = device->layout.page_bytes;
	uint64_t n_units = bytes / UNIT_BYTES;
	if (n_units > INT32_MAX)
		n_units = INT32_MAX;
	/* A narrow page may be the larger one: with heads of a few dimensions the scales outweigh what is saved. */
	int32_t most = (int32_t)(n_units / (uint64_t)units_for(narrow < wide ? narrow : wide));
	if (n_units < (uint64_t)units_for(kv_image_bytes(&device->layout, true)) || most < 1)
		return error_set_param(err, STATUS_INVALID, "kv-ram", "a RAM tier of %llu bytes holds no page of %zu",
		                       (unsigned long long)bytes, wide);
	struct ram *r = calloc(1, sizeof *r);
	struct backend_info info = {.kv_order = {.known = true}};
	if (device->backend->ops->info)
		device->backend->ops->info(device->backend, &info);
	if (type != KV_FORM_F16 && !info.kv_order.known) {
		free(r);
		return error_set_param(err, STATUS_UNSUPPORTED, "kv-ram-dtype",
		                       "kv-ram-dtype: %s has pages that can only be kept as f16", info.name);
	}
	if (!r || kv_tier_init(&r->base, &ops, device, clock, most, NULL) != STATUS_OK) {
		free(r);
		return error_set(err, STATUS_NOMEM, "no memory for a RAM tier of %llu bytes",
		                 (unsigned long long)bytes);
	}
	r->type = type;
	r->n_units = r->n_free_units = (int32_t)n_units;
	r->slab = malloc((size_t)n_units * UNIT_BYTES);
	r->next = malloc((size_t)n_units * sizeof *r->next);
	r->wide = malloc(kv_image_bytes(&device->layout, true));
	r->narrow = malloc(narrow);
	if (!r->slab || !r->next || !r->wide || !r->narrow) {
		destroy(&r->base);
		return error_set(err, STATUS_NOMEM, "no memory for a RAM tier of %llu bytes",
		                 (unsigned long long)bytes);
	}
	for (int32_t i = 0; i < r->n_units; i++)
		r->next[i] = i + 1 < r->n_units ? i + 1 : NONE;
	r->base.stats.kind = "ram";
	r->base.stats.type = kv_codec_elements(&device->layout, type);
	r->base.stats.cap_bytes = n_units * UNIT_BYTES;
	*out = &r->base;
	return STATUS_OK;
}
