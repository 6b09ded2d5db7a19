#include "engine/kv/overflow.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/log.h"
#include "engine/kv/overflow_disk.h"

/* A block of a group should be worth a transfer of its own. */
enum { MIN_GROUP_PAGES = 16, MAX_GROUP_PAGES = 64 };
_Static_assert((int)MIN_GROUP_PAGES % (int)KV_PART_PAGES == 0, "so that parts begin where the same bits come of it");

struct kv_overflow {
	struct backend *backend;
	struct kv_layout layout;        /* of the pool */
	size_t piece;                   /* bytes of a page's layer */
	struct kv_overflow_plan plan;
	char *ram;                      /* [n_layer][ram_groups][group_pages] pieces; then wide copies */
	size_t ram_bytes;
	struct kv_wide wide;            /* what get() gives of a layer's copies */
	int32_t *wide_slot; /* [ram_groups + disk_groups][group_pages] of each page, or -1; NULL: not a narrow pool */
	int32_t *free_wide, n_free_wide;
	struct overflow_disk *disk;     /* NULL: none */
	const char *off_reason;         /* of a disk that has failed */
	int32_t *free_ram, *free_disk;  /* slots; those of the disk stand behind those in memory */
	int32_t n_free_ram, n_free_disk;
	int32_t n_reserved;             /* groups, by all sequences */
	int32_t *order;                 /* [disk_groups] slots of the step, less ram_groups */
	int32_t *table;                 /* [ram_groups * group_pages] what get() gives of a run in memory */
	int32_t *in_order;              /* [group_pages] 0, 1, ..: of a block */
	struct kv_overflow_stats stats;
};

/* ---- The plan ---- */

static int32_t pages_of(const struct kv_overflow_plan *p)
{
	int64_t pages = (int64_t)p->resident_pages + ((int64_t)p->ram_groups + p->disk_groups) * p->group_pages;
	return pages < INT32_MAX / KV_PAGE_TOKENS ? (int32_t)pages : INT32_MAX / KV_PAGE_TOKENS;
}

/*
 * Groups of `group` bytes in `bytes`; no more than what int32_t page numbers reach, where a page is one layer of one.
 */
static int32_t groups_in(uint64_t bytes, uint64_t group, const struct kv_layout *l, int32_t group_pages)
{
	uint64_t n = bytes / group, most = INT32_MAX / 2 / ((uint64_t)l->n_layer * (uint64_t)group_pages);
	return (int32_t)(n < most ? n : most);
}

/* A layer of a page's wide copy, which has the elements of a page that is not narrow. */
static size_t wide_piece(const struct kv_layout *l)
{
	return 2 * (size_t)l->n_head_kv * (size_t)l->head_dim * KV_PAGE_TOKENS * sizeof(uint16_t);
}

/* One for the first page of each of some conversations, and some for values without a narrow form. */
static int32_t wide_slots(const struct kv_layout *l, int32_t n_groups)
{
	return l->form == KV_FORM_F16 ? 0 : n_groups / 4 + 4;
}

enum status kv_overflow_plan(const struct kv_layout *l, int32_t pool_pages, int32_t step_tokens, uint64_t ram_bytes,
                             uint64_t disk_bytes, struct kv_overflow_plan *out, struct error *err)
{
	int32_t group = MIN_GROUP_PAGES, resident = pool_pages / 2;
	while (group < MAX_GROUP_PAGES && group <= pool_pages / 32)
		group *= 2;
	/*
	 * What is computed in a step stands behind a whole group, a last full page, and one that a write may begin in.
	 */
	int32_t step_pages = resident - group - 2;
	uint64_t piece = l->page_bytes / (uint64_t)l->n_layer, in_ram = piece * (uint64_t)group * (uint64_t)l->n_layer;
	uint64_t on_disk = overflow_disk_stride((size_t)piece * (size_t)group) * (uint64_t)l->n_layer;
	if (step_pages < 1)
		return error_set(err, STATUS_INVALID,
		                 "conversations larger than the KV cache pass through it in groups of %" PRId32
		                 " pages, for which it is too small: it has %" PRId32 " pages, and takes %" PRId32,
		                 group, pool_pages, 2 * (group + 3));
	*out = (struct kv_overflow_plan){
	        .group_pages = group,
	        .resident_pages = resident,
	        .step_rows = step_tokens / KV_PAGE_TOKENS < step_pages ? step_tokens : step_pages * KV_PAGE_TOKENS,
	        .disk_groups = groups_in(disk_bytes, on_disk, l, group),
	};
	uint64_t wide = wide_piece(l) * (uint64_t)l->n_layer;
	out->wide_slots = wide_slots(l, groups_in(ram_bytes, in_ram, l, group) + out->disk_groups);
	wide *= (uint64_t)out->wide_slots;
	out->ram_groups = ram_bytes > wide ? groups_in(ram_bytes - wide, in_ram, l, group) : 0;
	out->ram_bytes = (size_t)(in_ram * (uint64_t)out->ram_groups + wide);
	out->disk_bytes = on_disk * (uint64_t)out->disk_groups;
	if (out->ram_groups + out->disk_groups == 0)
		return error_set(err, STATUS_INVALID,
		                 "%" PRIu64 " bytes for conversations larger than the KV cache are too few: %" PRId32
		                 " pages, the fewest that are moved together, take %" PRIu64,
		                 ram_bytes > disk_bytes ? ram_bytes : disk_bytes, group,
		                 disk_bytes ? on_disk : in_ram + wide);
	out->max_tokens = pages_of(out) * KV_PAGE_TOKENS;
	return STATUS_OK;
}

int32_t kv_overflow_groups_for(const struct kv_overflow_plan *p, int32_t n_tokens)
{
	int32_t more = kv_pages_for(n_tokens) - p->resident_pages;
	return more > 0 ? (more + p->group_pages - 1) / p->group_pages : 0;
}

/* ---- Slots ---- */

/* The disk may have failed since. */
static void look_at_disk(struct kv_overflow *o)
{
	const char *why = o->disk && !o->off_reason ? overflow_disk_failed(o->disk) : NULL;
	if (!why)
		return;
	o->off_reason = why;
	o->plan.disk_groups = 0;
	o->plan.max_tokens = pages_of(&o->plan) * KV_PAGE_TOKENS;
	o->n_free_disk = 0;
}

const struct kv_overflow_plan *kv_overflow_now(const struct kv_overflow *o)
{
	look_at_disk((struct kv_overflow *)o);
	return &o->plan;
}

static bool is_in_ram(const struct kv_overflow *o, int32_t slot)
{
	return slot < o->plan.ram_groups;
}

static int32_t take_slot(struct kv_overflow *o)
{
	if (o->n_free_ram > 0)
		return o->free_ram[--o->n_free_ram];
	look_at_disk(o);
	return o->n_free_disk > 0 ? o->free_disk[--o->n_free_disk] : -1;
}

bool kv_overflow_reserve(struct kv_overflow *o, struct kv_spill *s, int32_t n)
{
	if (n <= s->n_reserved)
		return true;
	look_at_disk(o);
	if (n - s->n_reserved > o->plan.ram_groups + o->plan.disk_groups - o->n_reserved)
		return false;
	if (n > s->cap_groups) {
		struct kv_spill_group *groups = realloc(s->groups, (size_t)n * sizeof *groups);
		if (!groups)
			return false;
		s->groups = groups;
		s->cap_groups = n;
	}
	o->n_reserved += n - s->n_reserved;
	s->n_reserved = n;
	s->store = o;
	return true;
}

/* The wide copies of a group's pages. */
static int32_t *wide_of(const struct kv_overflow *o, int32_t slot)
{
	return o->wide_slot + (size_t)slot * (size_t)o->plan.group_pages;
}

static void forget_wide(struct kv_overflow *o, int32_t slot)
{
	for (int32_t p = 0; o->wide_slot && p < o->plan.group_pages; p++) {
		int32_t *wide = wide_of(o, slot) + p;
		if (*wide >= 0)
			o->free_wide[o->n_free_wide++] = *wide;
		*wide = -1;
	}
}

void kv_overflow_release(struct kv_spill *s)
{
	struct kv_overflow *o = s->store;
	if (!o)
		return;
	for (int32_t i = 0; i < s->n_groups; i++) {
		int32_t slot = s->groups[i].slot;
		forget_wide(o, slot);
		if (is_in_ram(o, slot)) {
			o->free_ram[o->n_free_ram++] = slot;
		} else if (!o->off_reason) {
			overflow_disk_forget(o->disk, slot - o->plan.ram_groups);
			o->free_disk[o->n_free_disk++] = slot;
		}
	}
	o->n_reserved -= s->n_reserved;
	o->stats.n_pages -= s->n_groups * o->plan.group_pages;
	o->stats.n_sequences -= s->n_groups > 0;
	free(s->groups);
	*s = (struct kv_spill){0};
}

void kv_overflow_count(const struct kv_spill *s, int32_t *ram, int32_t *disk)
{
	*ram = *disk = 0;
	for (int32_t i = 0; i < s->n_groups; i++)
		*(is_in_ram(s->store, s->groups[i].slot) ? ram : disk) += s->store->plan.group_pages;
}

/* ---- Up ---- */

/* Where the pieces of a layer begin in memory. */
static char *layer_in_ram(const struct kv_overflow *o, int32_t layer)
{
	return o->ram + (size_t)layer * (size_t)o->plan.ram_groups * (size_t)o->plan.group_pages * o->piece;
}

/* Copies of a layer for pages whose numbers count from this group on; NULL: there are none in this pool. */
static struct kv_wide *wide_from(struct kv_overflow *o, int32_t slot, int32_t layer)
{
	if (!o->wide_slot)
		return NULL;
	o->wide.slot = wide_of(o, slot);
	o->wide.offset = (size_t)layer * wide_piece(&o->layout);
	return &o->wide;
}

/* As many groups as stand in memory one after the other. */
static void run_in_ram(struct kv_overflow *o, const struct kv_spill *s, int32_t layer, int32_t page,
                       struct kv_far_run *out)
{
	int32_t n = 0, per_group = o->plan.group_pages;
	for (int32_t g = page / per_group; g < s->n_groups && is_in_ram(o, s->groups[g].slot); g++) {
		for (int32_t p = n == 0 ? page % per_group : 0; p < per_group; p++)
			o->table[n++] = s->groups[g].slot * per_group + p;
	}
	*out = (struct kv_far_run){n, layer_in_ram(o, layer), o->table, wide_from(o, 0, layer)};
}

static void lose(struct kv_overflow *o, struct kv_spill *s)
{
	o->stats.sequences_lost += !s->lost;
	s->lost = true;
}

static bool get(struct kv_far *far, int32_t layer, int32_t page, struct kv_far_run *out)
{
	struct kv_spill *s = (struct kv_spill *)((char *)far - offsetof(struct kv_spill, far));
	struct kv_overflow *o = s->store;
	const struct kv_spill_group *g = &s->groups[page / o->plan.group_pages];
	int32_t at = page % o->plan.group_pages, slot = g->slot - o->plan.ram_groups;
	if (s->lost)
		return false;
	if (is_in_ram(o, g->slot)) {
		run_in_ram(o, s, layer, page, out);
		return true;
	}
	const char *block;
	if (g->rank >= 0) {
		block = overflow_disk_get(o->disk, layer, g->rank);
	} else {
		block = overflow_disk_buffer(o->disk, slot);
		if (block)
			block += (size_t)layer * overflow_disk_stride(o->piece * (size_t)o->plan.group_pages);
	}
	if (!block) {
		lose(o, s);
		return false;
	}
	*out = (struct kv_far_run){o->plan.group_pages - at, block, o->in_order + at, wide_from(o, g->slot, layer)};
	return true;
}

void kv_overflow_step(struct kv_overflow *o, struct kv_spill *const *s, int32_t n)
{
	int32_t n_order = 0;
	look_at_disk(o);
	if (o->disk && !o->off_reason)
		overflow_disk_settle(o->disk);
	for (int32_t i = 0; i < n; i++) {
		for (int32_t g = 0; g < s[i]->n_groups; g++) {
			struct kv_spill_group *group = &s[i]->groups[g];
			int32_t slot = group->slot - o->plan.ram_groups;
			group->rank = -1;
			if (slot < 0)
				continue;
			if (o->off_reason)
				lose(o, s[i]);
			else if (!overflow_disk_buffer(o->disk, slot))
				o->order[group->rank = n_order++] = slot;
		}
	}
	if (o->disk && !o->off_reason)
		overflow_disk_schedule(o->disk, o->order, n_order);
}

/* ---- Down ---- */

/* Copies a group's pages to where they go; a buffer of the disk's, or NULL: memory. */
static bool copy_group(struct kv_overflow *o, const struct kv_pool *pool, const int32_t *pages, int32_t slot,
		       char *buffer)
{
	const struct backend_ops *ops = o->backend->ops;
	const char *slab = kv_pool_slab(pool);
	size_t group = o->piece * (size_t)o->plan.group_pages;
	char *to = buffer ? buffer : layer_in_ram(o, 0) + (size_t)slot * group;
	size_t stride = buffer ? overflow_disk_stride(group) : (size_t)o->plan.ram_groups * group;
	if (ops->page_layers)
		return ops->page_layers(o->backend, slab, &o->layout, pages, o->plan.group_pages, to, stride) ==
		       STATUS_OK;
	for (int32_t layer = 0; layer < o->layout.n_layer; layer++, to += stride)
		for (int32_t p = 0; p < o->plan.group_pages; p++)
			memcpy(to + (size_t)p * o->piece,
			       slab + (size_t)pages[p] * o->layout.page_stride + (size_t)layer * o->piece, o->piece);
	return true;
}

/* Keeps the wide copy of page p of a group, if the pool's page has one. False: it could not be read. */
static bool keep_wide(struct kv_overflow *o, int32_t slot, int32_t p, const char *slab, int32_t page)
{
	const struct kv_wide *w = o->layout.wide;
	if (!o->wide_slot || !w || w->slot[page] < 0)
		return true;
	if (o->n_free_wide == 0) {
		o->stats.wide_refused++;
		return true;
	}
	int32_t to = wide_of(o, slot)[p] = o->free_wide[--o->n_free_wide];
	return o->backend->ops->mem_read(o->backend, (char *)o->wide.slab + (size_t)to * o->wide.stride,
					 slab + w->offset + (size_t)w->slot[page] * w->stride, w->bytes) == STATUS_OK;
}

bool kv_overflow_spill(struct kv_overflow *o, struct kv_spill *s, struct kv_seq *seq, struct kv_pool *pool)
{
	int32_t slot = s->lost ? -1 : take_slot(o), first = seq->n_gone;
	char *buffer = NULL;
	if (slot >= 0 && !is_in_ram(o, slot))
		buffer = overflow_disk_begin_write(o->disk, slot - o->plan.ram_groups);
	if (slot < 0 || (!is_in_ram(o, slot) && !buffer)) {
		lose(o, s); /* the slot was the disk's, which is no more */
		return false;
	}
	bool copied = copy_group(o, pool, seq->pages + first, slot, buffer);
	if (buffer)
		overflow_disk_end_write(o->disk, slot - o->plan.ram_groups);
	for (int32_t p = 0; copied && p < o->plan.group_pages; p++)
		copied = keep_wide(o, slot, p, kv_pool_slab(pool), seq->pages[first + p]);
	o->stats.n_sequences += s->n_groups == 0;
	s->groups[s->n_groups++] = (struct kv_spill_group){slot, -1};
	s->far = (struct kv_far){s->n_groups * o->plan.group_pages, get};
	o->stats.n_pages += o->plan.group_pages;
	if (!copied) { /* the group goes back with the others */
		lose(o, s);
		return false;
	}
	kv_seq_move_out(pool, seq, first + o->plan.group_pages);
	o->stats.pages_spilled += (uint64_t)o->plan.group_pages;
	return true;
}

/* ---- Life ---- */

static enum status supported(const struct backend *b, struct error *err)
{
	struct backend_info info;
	b->ops->info(b, &info);
	if (!b->ops->attention_part || !(info.host_memory || (b->ops->host_alloc && b->ops->page_layers)))
		return error_set(err, STATUS_UNSUPPORTED,
		                 "the device %s cannot compute conversations larger than its KV cache", info.name);
	return STATUS_OK;
}

/* The lists of slots and the tables. */
static bool make_lists(struct kv_overflow *o)
{
	const struct kv_overflow_plan *p = &o->plan;
	o->free_ram = calloc((size_t)p->ram_groups + 1, sizeof *o->free_ram);
	o->free_disk = calloc((size_t)p->disk_groups + 1, sizeof *o->free_disk);
	o->order = calloc((size_t)p->disk_groups + 1, sizeof *o->order);
	o->table = calloc((size_t)p->ram_groups * (size_t)p->group_pages + 1, sizeof *o->table);
	o->in_order = calloc((size_t)p->group_pages, sizeof *o->in_order);
	if (!o->free_ram || !o->free_disk || !o->order || !o->table || !o->in_order)
		return false;
	/* The lowest first. */
	while (o->n_free_ram < p->ram_groups) {
		o->free_ram[o->n_free_ram] = p->ram_groups - 1 - o->n_free_ram;
		o->n_free_ram++;
	}
	while (o->n_free_disk < p->disk_groups) {
		o->free_disk[o->n_free_disk] = p->ram_groups + p->disk_groups - 1 - o->n_free_disk;
		o->n_free_disk++;
	}
	for (int32_t i = 0; i < p->group_pages; i++)
		o->in_order[i] = i;
	return true;
}

/* The slots for wide copies, behind the groups in memory. */
static bool make_wide(struct kv_overflow *o)
{
	size_t n_pages = ((size_t)o->plan.ram_groups + (size_t)o->plan.disk_groups) * (size_t)o->plan.group_pages;
	size_t stride = wide_piece(&o->layout) * (size_t)o->layout.n_layer;
	if (o->plan.wide_slots == 0)
		return true;
	o->wide_slot = malloc(n_pages * sizeof *o->wide_slot);
	o->free_wide = calloc((size_t)o->plan.wide_slots, sizeof *o->free_wide);
	if (!o->wide_slot || !o->free_wide)
		return false;
	for (size_t i = 0; i < n_pages; i++)
		o->wide_slot[i] = -1;
	while (o->n_free_wide < o->plan.wide_slots) {
		o->free_wide[o->n_free_wide] = o->plan.wide_slots - 1 - o->n_free_wide;
		o->n_free_wide++;
	}
	o->wide = (struct kv_wide){.slab = layer_in_ram(o, o->layout.n_layer), .stride = stride, .bytes = stride};
	return true;
}

static enum status take_memory(struct kv_overflow *o, struct error *err)
{
	void *ram = NULL;
	const struct backend_ops *ops = o->backend->ops;
	size_t bytes = o->plan.ram_bytes;
	if (!make_lists(o) ||
	    (bytes > 0 && (ops->host_alloc ? ops->host_alloc : ops->mem_alloc)(o->backend, bytes, &ram) != STATUS_OK))
		return error_set(err, STATUS_NOMEM,
		                 "no memory for conversations larger than the KV cache: they were to have %zu bytes",
		                 bytes);
	o->ram = ram;
	o->ram_bytes = bytes;
	return make_wide(o) ? STATUS_OK
	                    : error_set(err, STATUS_NOMEM, "no memory for conversations larger than the KV cache");
}

static enum status open_disk(struct kv_overflow *o, const struct kv_overflow_options *options, struct error *err)
{
	const struct overflow_disk_options d = {
	        .dir = options->dir,
	        .n_slots = o->plan.disk_groups,
	        .n_layer = o->layout.n_layer,
	        .block_bytes = o->piece * (size_t)o->plan.group_pages,
	        .stall_ms = options->stall_ms,
	};
	struct error why;
	enum status st = overflow_disk_create(&d, &o->disk, &why);
	if (st == STATUS_OK)
		return st;
	if (o->plan.ram_groups == 0)
		return error_set(err, st, "%s", why.message);
	log_msg(LOG_WARN, "kv_overflow", "conversations larger than the KV cache have no disk: %s", why.message);
	o->plan.disk_groups = 0;
	o->plan.max_tokens = pages_of(&o->plan) * KV_PAGE_TOKENS;
	return STATUS_OK;
}

enum status kv_overflow_create(struct backend *b, struct kv_pool *pool, const struct kv_overflow_options *options,
                               struct kv_overflow **out, struct error *err)
{
	const struct kv_layout *l = kv_pool_layout(pool);
	struct kv_overflow *o = NULL;
	enum status st = supported(b, err);
	if (st != STATUS_OK)
		return st;
	o = calloc(1, sizeof *o);
	if (!o)
		return error_set(err, STATUS_NOMEM, "no memory for conversations larger than the KV cache");
	o->backend = b;
	o->layout = *l;
	o->piece = l->page_bytes / (size_t)l->n_layer;
	st = kv_overflow_plan(l, kv_pool_n_pages(pool), options->step_tokens, options->ram_bytes,
	                      options->dir ? options->disk_bytes : 0, &o->plan, err);
	if (st == STATUS_OK && o->plan.disk_groups > 0)
		st = open_disk(o, options, err);
	if (st == STATUS_OK)
		st = take_memory(o, err);
	if (st != STATUS_OK) {
		kv_overflow_destroy(o);
		return st;
	}
	o->stats.ram_bytes = o->ram_bytes;
	*out = o;
	return STATUS_OK;
}

void kv_overflow_destroy(struct kv_overflow *o)
{
	if (!o)
		return;
	overflow_disk_destroy(o->disk);
	const struct backend_ops *ops = o->backend->ops;
	if (o->ram)
		(ops->host_alloc ? ops->host_free : ops->mem_free)(o->backend, o->ram, o->ram_bytes);
	free(o->free_ram);
	free(o->free_disk);
	free(o->order);
	free(o->table);
	free(o->in_order);
	free(o->wide_slot);
	free(o->free_wide);
	free(o);
}

void kv_overflow_stats(const struct kv_overflow *o, struct kv_overflow_stats *out)
{
	struct overflow_disk_stats disk = {0};
	const uint64_t group = (uint64_t)o->plan.group_pages, layers = (uint64_t)o->layout.n_layer;
	const uint64_t on_disk = overflow_disk_stride(o->piece * (size_t)group) * layers;
	look_at_disk((struct kv_overflow *)o);
	if (o->disk)
		overflow_disk_stats(o->disk, &disk);
	*out = o->stats;
	out->wide_slots = o->plan.wide_slots;
	out->wide_used = o->plan.wide_slots - o->n_free_wide;
	out->ram_used_bytes = (uint64_t)(o->plan.ram_groups - o->n_free_ram) * group * o->layout.page_bytes +
	                      (uint64_t)out->wide_used * o->wide.stride;
	out->disk_bytes = (uint64_t)o->plan.disk_groups * on_disk;
	out->disk_used_bytes = (uint64_t)(o->plan.disk_groups - o->n_free_disk) * on_disk;
	out->bytes_read = disk.bytes_read;
	out->bytes_written = disk.bytes_written;
	out->waits = disk.waits;
	out->disk_off = o->off_reason != NULL;
	out->off_reason = o->off_reason ? o->off_reason : "";
}
