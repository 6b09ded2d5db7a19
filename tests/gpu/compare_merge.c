/*
 * What is done to places of pages when they are merged (kv/merge.h): whether they are sound, how far keys are apart,
 * means, and moves, over lists of places in pages of random order, layers that are rotated differently among them.
 */
#include "tests/gpu/compare.h"

#include "engine/kv/merge.h"
#include "engine/kv/tier_codec.h"

enum { LAYERS = 3, PAGES = 9, USED = 6, PLACES = USED * KV_PAGE_TOKENS };

/* The same pages on one of the devices. */
struct side {
	struct backend *b;
	struct kv_layout layout;
	struct kv_order order;
	void *slab;
	struct kv_page_merger *merger;
	int32_t page[USED]; /* some of the slab's, in no order */
	uint16_t *image; /* of the slab */
};

struct table {
	struct pair *p;
	struct side side[2]; /* the device, the reference */
	struct rope_params rope[2];
	float freq[2][128];
};

/* The second layer is rotated otherwise. */
static const struct rope_params *rope_of(const void *arg, int32_t layer)
{
	const struct table *t = arg;
	return &t->rope[layer == 1];
}

static size_t slab_bytes(const struct side *s)
{
	return PAGES * s->layout.page_stride;
}

static uint16_t *element(const struct side *s, int32_t place, int32_t layer, int32_t head, bool value, int32_t d)
{
	const struct kv_layout *l = &s->layout;
	size_t block = s->order.pairs ? (size_t)((layer * l->n_head_kv + head) * 2 + value)
				      : (size_t)((layer * 2 + value) * l->n_head_kv + head);
	int32_t page = s->page[place / KV_PAGE_TOKENS];
	return s->image + (size_t)page * (l->page_stride / sizeof *s->image) +
	       block * KV_PAGE_TOKENS * (size_t)l->head_dim +
	       (size_t)kv_codec_place(value ? s->order.values : s->order.keys, l->head_dim, place % KV_PAGE_TOKENS, d);
}

static uint16_t bits_of(const struct side *s, float x)
{
	return s->layout.type == QUANT_BF16 ? quant_float_to_bf16(x) : quant_float_to_half(x);
}

static double number_at(const struct side *s, int32_t place, int32_t layer, int32_t head, bool value, int32_t d)
{
	uint16_t x = *element(s, place, layer, head, value, d);
	return s->layout.type == QUANT_BF16 ? quant_bf16_to_float(x) : quant_half_to_float(x);
}

static void write_image(struct side *s)
{
	must(s->b->ops->mem_write(s->b, s->slab, s->image, slab_bytes(s)), "mem_write");
}

static void read_image(struct side *s)
{
	must(s->b->ops->mem_read(s->b, s->image, s->slab, slab_bytes(s)), "mem_read");
}

static void open_side(struct table *t, struct side *s, struct backend *b, int32_t n_head_kv, int32_t dim)
{
	struct backend_info info;
	s->b = b;
	b->ops->info(b, &info);
	s->order = info.kv_order;
	must(kv_layout_for(b, &s->layout, LAYERS, n_head_kv, dim), "kv_layout_for");
	must(b->ops->mem_alloc(b, slab_bytes(s), &s->slab), "mem_alloc");
	must(kv_page_merger_create(b, s->slab, &s->layout, rope_of, t, &s->merger), "kv_page_merger_create");
	s->image = malloc(slab_bytes(s));
	if (!s->image)
		give_up("no memory");
	memset(s->image, 0xFF, slab_bytes(s)); /* no numbers around those that are merged */
	for (int i = 0; i < USED; i++)
		s->page[i] = (1 + 2 * i) % PAGES;
}

static void close_side(struct side *s)
{
	kv_page_merger_destroy(s->merger);
	s->b->ops->mem_free(s->b, s->slab, slab_bytes(s));
	free(s->image);
}

/* Neighbours are alike, some more than others. */
static void fill(struct table *t)
{
	const struct kv_layout *l = &t->side[0].layout;
	for (int32_t layer = 0; layer < LAYERS; layer++)
		for (int32_t head = 0; head < l->n_head_kv; head++)
			for (int value = 0; value < 2; value++)
				for (int32_t d = 0; d < l->head_dim; d++) {
					float x = 0;
					for (int32_t i = 0; i < PLACES; i++) {
						float new = random_normal(t->p);
						x = i % 5 == 0 ? new : 0.8f * x + 0.2f * new;
						for (int k = 0; k < 2; k++)
							*element(&t->side[k], i, layer, head, value, d) =
								bits_of(&t->side[k], x);
					}
				}
	for (int k = 0; k < 2; k++)
		write_image(&t->side[k]);
}

static struct kv_spot spot(const struct side *s, int32_t place, double position)
{
	return (struct kv_spot){s->page[place / KV_PAGE_TOKENS], place % KV_PAGE_TOKENS, position};
}

static void compare_all(struct table *t, double off, const char *what)
{
	const struct kv_layout *l = &t->side[0].layout;
	for (int k = 0; k < 2; k++)
		read_image(&t->side[k]);
	for (int32_t place = 0; place < PLACES; place++)
		for (int32_t layer = 0; layer < LAYERS; layer++)
			for (int32_t head = 0; head < l->n_head_kv; head++)
				for (int32_t d = 0; d < 2 * l->head_dim; d++) {
					double got = number_at(&t->side[0], place, layer, head, d >= l->head_dim,
							       d % l->head_dim),
					       want = number_at(&t->side[1], place, layer, head, d >= l->head_dim,
								d % l->head_dim);
					row_result(fabs(got - want), off * (1 + fabs(want)),
						   "%s: place %d, layer %d, head %d, %d: %g instead of %g", what, place,
						   layer, head, d, got, want);
				}
}

static void compare_soundness(struct table *t)
{
	static const float bad[] = {NAN, INFINITY, -INFINITY};
	const struct kv_layout *l = &t->side[0].layout;
	struct kv_spot spots[PLACES];
	bool is_bad[PLACES] = {false}, sound[PLACES];
	for (int i = 0; i < 12; i++) {
		int32_t place = random_int(t->p, 0, PLACES - 1), layer = random_int(t->p, 0, LAYERS - 1),
			head = random_int(t->p, 0, l->n_head_kv - 1), d = random_int(t->p, 0, l->head_dim - 1);
		is_bad[place] = true;
		for (int k = 0; k < 2; k++)
			*element(&t->side[k], place, layer, head, i % 2, d) = bits_of(&t->side[k], bad[i % 3]);
	}
	for (int k = 0; k < 2; k++) {
		struct side *s = &t->side[k];
		struct kv_merger *m = kv_page_merger_ops(s->merger);
		write_image(s);
		for (int32_t i = 0; i < PLACES; i++)
			spots[i] = spot(s, i, i);
		must(m->are_sound(m, spots, PLACES, sound), "are_sound");
		for (int32_t i = 0; i < PLACES; i++)
			row_result(sound[i] == is_bad[i], 0, "place %d is %ssound", i, sound[i] ? "" : "not ");
	}
}

/* Places 3i and 3i + 1 or 3i + 2, which stand for some tokens at positions near and far. */
static int32_t make_pairs(struct table *t, struct kv_pair pairs[2][PLACES])
{
	const double largest = t->p->large ? 100000 : 3000;
	int32_t n = 0;
	double position = random_int(t->p, 0, 7);
	for (int32_t i = 0; i + 2 < PLACES; i += 3, n++) {
		int32_t other = i + random_int(t->p, 1, 2);
		double a = position, apart = i % 4 == 0 ? largest * random_int(t->p, 1, 9) / 10
							: (double)random_int(t->p, 0, 60) / 7;
		int32_t n_a = random_int(t->p, 1, 40), n_b = random_int(t->p, 1, 40);
		for (int k = 0; k < 2; k++)
			pairs[k][n] = (struct kv_pair){spot(&t->side[k], i, a), spot(&t->side[k], other, a + apart),
						       n_a, n_b, (a * n_a + (a + apart) * n_b) / (n_a + n_b)};
		position += apart + 1;
	}
	return n;
}

static void compare_pairs(struct table *t, double off)
{
	static struct kv_pair pairs[2][PLACES];
	float apart[2][PLACES], again[PLACES];
	const int32_t n = make_pairs(t, pairs);
	for (int k = 0; k < 2; k++) {
		struct kv_merger *m = kv_page_merger_ops(t->side[k].merger);
		must(m->apart(m, pairs[k], n, apart[k]), "apart");
	}
	for (int32_t i = 0; i < n; i++)
		row_result(fabs((double)apart[0][i] - (double)apart[1][i]), off, "pair %d is %g apart instead of %g", i,
			   (double)apart[0][i], (double)apart[1][i]);
	/* One of them by itself is as far apart as among the others. */
	struct kv_merger *m = kv_page_merger_ops(t->side[0].merger);
	for (int32_t i = 0; i < n; i += 5)
		must(m->apart(m, &pairs[0][i], 1, &again[i]), "apart");
	for (int32_t i = 0; i < n; i += 5)
		row_result(again[i] != apart[0][i], 0, "pair %d by itself is %g apart", i, (double)again[i]);
	for (int k = 0; k < 2; k++) {
		m = kv_page_merger_ops(t->side[k].merger);
		must(m->join(m, pairs[k], n), "join");
	}
	compare_all(t, off, "joined");
}

/* All but the first few go forwards, as far as these leave room, and nothing comes to the last. */
static void compare_moves(struct table *t)
{
	for (int k = 0; k < 2; k++) {
		struct side *s = &t->side[k];
		struct kv_move moves[PLACES];
		struct kv_merger *m = kv_page_merger_ops(s->merger);
		int32_t to = 0;
		for (int32_t i = 1; i < PLACES; i++) {
			if (i % 3 == 1 && i <= 4)
				continue;
			moves[to] = (struct kv_move){spot(s, i, 0), spot(s, to, 0)};
			to++;
		}
		for (; to < PLACES; to++)
			moves[to] = (struct kv_move){{KV_NO_PAGE, 0, 0}, spot(s, to, 0)};
		must(m->move(m, moves, PLACES), "move");
	}
}

/* Of the largest numbers there are, turned, means stay numbers. */
static void compare_largest(struct table *t, double off)
{
	static struct kv_pair pairs[2][PLACES];
	const struct kv_layout *l = &t->side[0].layout;
	const struct side *s = &t->side[0];
	for (int32_t place = 0; place < PLACES; place++)
		for (int32_t layer = 0; layer < LAYERS; layer++)
			for (int32_t head = 0; head < l->n_head_kv; head++)
				for (int32_t d = 0; d < 2 * l->head_dim; d++) {
					uint16_t sign = random_bits(t->p) & 1 ? 0x8000 : 0;
					for (int k = 0; k < 2; k++)
						*element(&t->side[k], place, layer, head, d >= l->head_dim,
							 d % l->head_dim) =
							sign | (t->side[k].layout.type == QUANT_BF16 ? 0x7F7F : 0x7BFF);
				}
	const int32_t n = make_pairs(t, pairs);
	for (int k = 0; k < 2; k++) {
		struct kv_merger *m = kv_page_merger_ops(t->side[k].merger);
		write_image(&t->side[k]);
		must(m->join(m, pairs[k], n), "join");
		read_image(&t->side[k]);
	}
	for (int32_t i = 0; i + 2 < PLACES; i += 3)
		for (int32_t d = 0; d < 2 * l->head_dim; d++)
			row_result(!isfinite(number_at(s, i, d % LAYERS, 0, d >= l->head_dim, d % l->head_dim)), 0,
				   "the mean of the largest is no number");
	/* Some devices hold bfloat16s where halves end. */
	if (l->type == QUANT_F16 && t->side[1].layout.type == QUANT_F16)
		compare_all(t, off, "the largest, joined");
}

static void merges(struct pair *p, const char *elements, int32_t n_head_kv, int32_t dim, const int32_t n_dims[2])
{
	char name[64];
	snprintf(name, sizeof name, "merging %d heads of %d%s", n_head_kv, dim, elements);
	row_begin(name);
	struct table *t = calloc(1, sizeof *t);
	if (!t)
		give_up("no memory");
	t->p = p;
	for (int i = 0; i < 2; i++) {
		for (int32_t k = 0; k < n_dims[i] / 2; k++)
			t->freq[i][k] = (float)pow(i ? 1000000 : 10000, -2.0 * k / n_dims[i]);
		t->rope[i] = (struct rope_params){
			.pairing = i ? ROPE_HALVES : ROPE_INTERLEAVED,
			.n_dims = n_dims[i],
			.inv_freq = t->freq[i],
			.magnitude = 1,
		};
	}
	open_side(t, &t->side[0], p->device, n_head_kv, dim);
	open_side(t, &t->side[1], p->reference, n_head_kv, dim);
	/* Means are rounded to a last bit that a sum in another order may change. */
	const bool same = t->side[0].layout.type == t->side[1].layout.type,
		   bf16 = t->side[0].layout.type == QUANT_BF16;
	const double off = !same ? 3e-2 : bf16 ? 8e-3 : 1e-3;
	fill(t);
	compare_pairs(t, off);
	compare_moves(t);
	compare_all(t, off, "moved");
	compare_soundness(t);
	compare_largest(t, off);
	close_side(&t->side[0]);
	close_side(&t->side[1]);
	free(t);
	row_end();
}

void compare_merge(struct pair *p)
{
	struct backend_info info[2];
	struct backend *b[] = {p->device, p->reference};
	for (int i = 0; i < 2; i++)
		b[i]->ops->info(b[i], &info[i]);
	if (!info[0].adds_to_logits || !info[1].adds_to_logits)
		return;
	const int32_t any = 8 * random_int(p, 2, 32);
	merges(p, "", 2, 64, (int32_t[]){64, 64});
	merges(p, "", p->large ? 8 : 1, 128, (int32_t[]){128, 64});
	merges(p, "", 3, 24, (int32_t[]){16, 24});
	merges(p, "", 1, 256, (int32_t[]){256, 2});
	merges(p, "", random_int(p, 1, 5), any, (int32_t[]){any / 4 * 2, any});
	struct own_elements own;
	const char *chosen = choose_other_elements(p, &own);
	if (!chosen)
		return;
	merges(p, chosen, 2, 64, (int32_t[]){64, 64});
	merges(p, chosen, 1, 24, (int32_t[]){24, 8});
	choose_own_elements(p, &own);
}
