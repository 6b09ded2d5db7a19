/*
 * Merging where the KV lies: vectors of pages in memory that the host can read, of every inner order, or by what the
 * backend has for it (spots_sound() and so on).
 */
#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "engine/kv/merge.h"
#include "engine/kv/tier_codec.h"
#include "engine/model/quant.h"

enum { KEY, VALUE };

/* Cosines and sines that turn keys from one position to another, by one set of frequencies. */
struct turn {
	const struct rope_params *rope;
	double by; /* positions */
	float *cs; /* [n_dims / 2][2] */
};

struct kv_page_merger {
	struct kv_merger ops;
	struct backend *backend;
	char *slab;
	struct kv_layout layout;
	bool pairs;			 /* see struct kv_order */
	const struct rope_params **rope; /* [n_layer] */
	int32_t *place[2];		 /* [KV_PAGE_TOKENS][head_dim] of elements in a block of keys, and of values */
	float *value;			 /* [65536] of an element */
	float *a, *b;			 /* [head_dim] */
	struct turn turn[2];
};

static struct kv_page_merger *self(struct kv_merger *m)
{
	return (struct kv_page_merger *)m;
}

/* The block of a layer and head in a spot's page. */
static uint16_t *block_of(const struct kv_page_merger *m, const struct kv_spot *s, int32_t layer, int32_t head,
			  int what)
{
	const struct kv_layout *l = &m->layout;
	size_t block = m->pairs ? ((size_t)layer * (size_t)l->n_head_kv + (size_t)head) * 2 + (size_t)what
				: ((size_t)layer * 2 + (size_t)what) * (size_t)l->n_head_kv + (size_t)head;
	char *page = m->slab + (size_t)s->page * l->page_stride;
	return (uint16_t *)(void *)page + block * KV_PAGE_TOKENS * (size_t)l->head_dim;
}

static const int32_t *places_of(const struct kv_page_merger *m, const struct kv_spot *s, int what)
{
	return m->place[what] + s->token * m->layout.head_dim;
}

static void load(const struct kv_page_merger *m, const struct kv_spot *s, int32_t layer, int32_t head, int what,
		 float *to)
{
	const uint16_t *block = block_of(m, s, layer, head, what);
	const int32_t *at = places_of(m, s, what);
	for (int32_t d = 0; d < m->layout.head_dim; d++)
		to[d] = m->value[block[at[d]]];
}

/*
 * A mean of finite values is within their range; turned, an element of it may be beyond, where it is held at the end,
 * so that it stays a number.
 */
static uint16_t element(const struct kv_page_merger *m, float x)
{
	const bool wide = m->layout.type == QUANT_BF16;
	const float most = wide ? 0x1.FEp127f : KV_HALF_MAX; /* of bfloat16s and of halves */
	float held = x > most ? most : x < -most ? -most : x;
	return wide ? quant_float_to_bf16(held) : quant_float_to_half(held);
}

static void store(const struct kv_page_merger *m, const struct kv_spot *s, int32_t layer, int32_t head, int what,
		  const float *from)
{
	uint16_t *block = block_of(m, s, layer, head, what);
	const int32_t *at = places_of(m, s, what);
	for (int32_t d = 0; d < m->layout.head_dim; d++)
		block[at[d]] = element(m, from[d]);
}

static bool is_sound(const struct kv_page_merger *m, const struct kv_spot *s)
{
	const struct kv_layout *l = &m->layout;
	const uint16_t exponent = l->type == QUANT_BF16 ? 0x7F80 : 0x7C00;
	bool sound = true;
	for (int32_t layer = 0; layer < l->n_layer && sound; layer++)
		for (int32_t head = 0; head < l->n_head_kv; head++)
			for (int what = KEY; what <= VALUE; what++) {
				const uint16_t *block = block_of(m, s, layer, head, what);
				const int32_t *at = places_of(m, s, what);
				for (int32_t d = 0; d < l->head_dim; d++)
					sound &= (block[at[d]] & exponent) != exponent;
			}
	return sound;
}

/*
 * A key that was rotated to some position and is to be rotated to one `by` later: that is a rotation by the difference.
 */
static void turn_key(const struct turn *t, float *k)
{
	int32_t half = t->rope->n_dims / 2, step = t->rope->pairing == ROPE_INTERLEAVED ? 2 : 1;
	int32_t apart = t->rope->pairing == ROPE_INTERLEAVED ? 1 : half;
	for (int32_t i = 0; t->by != 0 && i < half; i++) {
		float *x = k + i * step, c = t->cs[2 * i], s = t->cs[2 * i + 1], x0 = x[0], x1 = x[apart];
		x[0] = fmaxf(-FLT_MAX, fminf(FLT_MAX, x0 * c - x1 * s)); /* bfloat16s are as large as floats */
		x[apart] = fmaxf(-FLT_MAX, fminf(FLT_MAX, x0 * s + x1 * c));
	}
}

/*
 * The turn by so many positions for keys of a layer, in one of two places; layers with the same frequencies share it.
 */
static const struct turn *turn_by(struct kv_page_merger *m, int which, int32_t layer, double by)
{
	struct turn *t = &m->turn[which];
	const struct rope_params *rope = m->rope[layer];
	if (t->rope == rope && t->by == by)
		return t;
	t->rope = rope;
	t->by = by;
	for (int32_t i = 0; i < rope->n_dims / 2; i++) {
		double angle = by * (double)rope->inv_freq[i];
		t->cs[2 * i] = (float)cos(angle);
		t->cs[2 * i + 1] = (float)sin(angle);
	}
	return t;
}

static float apart(struct kv_page_merger *m, const struct kv_spot *a, const struct kv_spot *b)
{
	const struct kv_layout *l = &m->layout;
	double sum = 0;
	for (int32_t layer = 0; layer < l->n_layer; layer++) {
		const struct turn *t = turn_by(m, 0, layer, b->position - a->position);
		for (int32_t head = 0; head < l->n_head_kv; head++) {
			float ab = 0, aa = 0, bb = 0;
			load(m, a, layer, head, KEY, m->a);
			load(m, b, layer, head, KEY, m->b);
			turn_key(t, m->a);
			for (int32_t d = 0; d < l->head_dim; d++) {
				ab += m->a[d] * m->b[d];
				aa += m->a[d] * m->a[d];
				bb += m->b[d] * m->b[d];
			}
			double norms = sqrt((double)aa) * sqrt((double)bb);
			sum += norms > 0 && isfinite(norms) ? fmax(-1, fmin(1, (double)ab / norms)) : 0;
		}
	}
	return (float)(1 - sum / ((double)l->n_layer * l->n_head_kv));
}

static void join(struct kv_page_merger *m, const struct kv_pair *p)
{
	const struct kv_spot *a = &p->a, *b = &p->b;
	const struct kv_layout *l = &m->layout;
	float part = (float)((double)p->n_a / ((double)p->n_a + p->n_b));
	for (int32_t layer = 0; layer < l->n_layer; layer++) {
		const struct turn *turn_a = turn_by(m, 0, layer, p->position - a->position),
				  *turn_b = turn_by(m, 1, layer, p->position - b->position);
		for (int32_t head = 0; head < l->n_head_kv; head++)
			for (int what = KEY; what <= VALUE; what++) {
				load(m, a, layer, head, what, m->a);
				load(m, b, layer, head, what, m->b);
				if (what == KEY) {
					turn_key(turn_a, m->a);
					turn_key(turn_b, m->b);
				}
				for (int32_t d = 0; d < l->head_dim; d++)
					m->a[d] = part * m->a[d] + (1 - part) * m->b[d];
				store(m, a, layer, head, what, m->a);
			}
	}
}

static void move(struct kv_page_merger *m, const struct kv_spot *from, const struct kv_spot *to)
{
	const struct kv_layout *l = &m->layout;
	for (int32_t layer = 0; layer < l->n_layer; layer++)
		for (int32_t head = 0; head < l->n_head_kv; head++)
			for (int what = KEY; what <= VALUE; what++) {
				const uint16_t *source = block_of(m, from, layer, head, what);
				uint16_t *target = block_of(m, to, layer, head, what);
				const int32_t *at = places_of(m, from, what), *there = places_of(m, to, what);
				for (int32_t d = 0; d < l->head_dim; d++)
					target[there[d]] = source[at[d]];
			}
}

static void clear(struct kv_page_merger *m, const struct kv_spot *s)
{
	for (int32_t d = 0; d < m->layout.head_dim; d++)
		m->a[d] = 0;
	for (int32_t layer = 0; layer < m->layout.n_layer; layer++)
		for (int32_t head = 0; head < m->layout.n_head_kv; head++)
			for (int what = KEY; what <= VALUE; what++)
				store(m, s, layer, head, what, m->a);
}

/* ---- By the host ---- */

static enum status host_are_sound(struct kv_merger *m, const struct kv_spot *spots, int32_t n, bool *sound)
{
	for (int32_t i = 0; i < n; i++)
		sound[i] = is_sound(self(m), &spots[i]);
	return STATUS_OK;
}

static enum status host_apart(struct kv_merger *m, const struct kv_pair *pairs, int32_t n, float *to)
{
	for (int32_t i = 0; i < n; i++)
		to[i] = apart(self(m), &pairs[i].a, &pairs[i].b);
	return STATUS_OK;
}

static enum status host_join(struct kv_merger *m, const struct kv_pair *pairs, int32_t n)
{
	for (int32_t i = 0; i < n; i++)
		join(self(m), &pairs[i]);
	return STATUS_OK;
}

static enum status host_move(struct kv_merger *m, const struct kv_move *moves, int32_t n)
{
	for (int32_t i = 0; i < n; i++) {
		if (moves[i].from.page < 0)
			clear(self(m), &moves[i].to);
		else
			move(self(m), &moves[i].from, &moves[i].to);
	}
	return STATUS_OK;
}

/* ---- By the backend ---- */

static enum status device_are_sound(struct kv_merger *ops, const struct kv_spot *spots, int32_t n, bool *sound)
{
	struct kv_page_merger *m = self(ops);
	return m->backend->ops->spots_sound(m->backend, m->slab, &m->layout, spots, n, sound);
}

static enum status device_apart(struct kv_merger *ops, const struct kv_pair *pairs, int32_t n, float *to)
{
	struct kv_page_merger *m = self(ops);
	return m->backend->ops->spots_apart(m->backend, m->slab, &m->layout, m->rope, pairs, n, to);
}

static enum status device_join(struct kv_merger *ops, const struct kv_pair *pairs, int32_t n)
{
	struct kv_page_merger *m = self(ops);
	return m->backend->ops->spots_join(m->backend, m->slab, &m->layout, m->rope, pairs, n);
}

static enum status device_move(struct kv_merger *ops, const struct kv_move *moves, int32_t n)
{
	struct kv_page_merger *m = self(ops);
	return m->backend->ops->spots_move(m->backend, m->slab, &m->layout, moves, n);
}

/* ---- Life ---- */

static int32_t *make_places(enum kv_block_order order, int32_t dim)
{
	int32_t *at = malloc((size_t)dim * KV_PAGE_TOKENS * sizeof *at);
	for (int32_t token = 0; at && token < KV_PAGE_TOKENS; token++)
		for (int32_t d = 0; d < dim; d++)
			at[token * dim + d] = kv_codec_place(order, dim, token, d);
	return at;
}

enum status kv_page_merger_create(struct backend *b, void *slab, const struct kv_layout *l,
				  const struct rope_params *(*rope_of)(const void *arg, int32_t layer), const void *arg,
				  struct kv_page_merger **out)
{
	static const struct kv_merger by_hand = {host_are_sound, host_apart, host_join, host_move};
	static const struct kv_merger by_backend = {device_are_sound, device_apart, device_join, device_move};
	struct backend_info info;
	b->ops->info(b, &info);
	const bool by_host = info.host_memory && info.kv_order.known, by_device = b->ops->spots_join;
	if (!(by_host || by_device) || !info.adds_to_logits || l->form != KV_FORM_F16)
		return STATUS_UNSUPPORTED;
	struct kv_page_merger *m = calloc(1, sizeof *m);
	if (!m)
		return STATUS_NOMEM;
	size_t dim = (size_t)l->head_dim;
	*m = (struct kv_page_merger){
		.ops = by_host ? by_hand : by_backend,
		.backend = b,
		.slab = slab,
		.layout = *l,
		.pairs = info.kv_order.pairs,
		.rope = malloc((size_t)l->n_layer * sizeof(struct rope_params *)),
		.place = {make_places(info.kv_order.keys, l->head_dim), make_places(info.kv_order.values, l->head_dim)},
		.value = malloc(65536 * sizeof(float)),
		.a = malloc(dim * sizeof(float)),
		.b = malloc(dim * sizeof(float)),
		.turn = {{.cs = malloc(dim * sizeof(float))}, {.cs = malloc(dim * sizeof(float))}},
	};
	if (!m->rope || !m->place[KEY] || !m->place[VALUE] || !m->value || !m->a || !m->b || !m->turn[0].cs ||
	    !m->turn[1].cs) {
		kv_page_merger_destroy(m);
		return STATUS_NOMEM;
	}
	for (int32_t layer = 0; layer < l->n_layer; layer++)
		m->rope[layer] = rope_of(arg, layer);
	for (uint32_t i = 0; i < 65536; i++)
		m->value[i] =
			l->type == QUANT_BF16 ? quant_bf16_to_float((uint16_t)i) : quant_half_to_float((uint16_t)i);
	*out = m;
	return STATUS_OK;
}

void kv_page_merger_destroy(struct kv_page_merger *m)
{
	if (!m)
		return;
	free(m->rope);
	free(m->place[KEY]);
	free(m->place[VALUE]);
	free(m->value);
	free(m->a);
	free(m->b);
	free(m->turn[0].cs);
	free(m->turn[1].cs);
	free(m);
}

struct kv_merger *kv_page_merger_ops(struct kv_page_merger *m)
{
	return &m->ops;
}
