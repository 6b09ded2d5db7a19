/*
 * Attention over narrow KV (narrow.h; the codes of keys are [head_dim][16], those of values [16][head_dim]). Scales
 * stay apart: scores are multiplied by those of keys, weights by those of values, so codes are exact as halves,
 * bfloat16s and floats. Where few queries share a KV head, codes become what is multiplied as they are read; where many
 * do, they become that once for all of them, in the first-level cache, just before they are computed with. The products
 * are the same. Bytes may also be multiplied as they are (kernels_bytes.h). Included by the sources of each instruction
 * set, behind kernels_attention.h.
 */
#pragma once

#include <float.h>

#include "engine/cpu/kernels_attention.h"
#include "engine/cpu/narrow.h"

/*
 * What a code becomes is too small by this: a half has the bits of E4M3 with an exponent that is 8 too small, subnormal
 * ones included.
 */
INLINE float code_unit(enum kv_form form)
{
	return form == KV_FORM_INT8 ? 1 : 256;
}

INLINE vf code_values(enum kv_form form, const uint8_t *code)
{
	return form == KV_FORM_INT8 ? vf_load_s8(code) : vf_load_e4m3(code);
}

#ifdef __AVX512BF16__
/*
 * The bfloat16s that codes become, by table: the code's lower seven bits (of int8, those of its magnitude) say the two
 * bytes but for the sign, which is the code's highest bit. The instructions look 64 codes up at once, where conversions
 * make 16.
 */
struct unpacker {
	vb low[2], high[2];
	/* the order in which 64 codes are looked up, so that vb_zip_first() and _last() make ascending pairs */
	vb keys, values;
	vb quads;	 /* codes of keys [4 dimensions][16] as [16][4 dimensions] */
};

static void unpacker_init(enum kv_form form, struct unpacker *u)
{
	uint8_t low[128], high[128], keys[64], values[64], quads[64];
	for (int i = 0; i < 128; i += LANES) {
		uint8_t code[LANES];
		uint16_t x[LANES];
		for (int k = 0; k < LANES; k++)
			code[k] = (uint8_t)(i + k);
		vf_store_bf16_n(x, code_values(form, code), LANES);
		for (int k = 0; k < LANES; k++) {
			low[i + k] = (uint8_t)x[k];
			high[i + k] = (uint8_t)(x[k] >> 8);
		}
	}
	for (int i = 0; i < 64; i++) {
		/* Element `at` of the 64 stands at i: eight of the first half, eight of the second, in turns. */
		int at = i % 16 / 8 * 32 + i / 16 * 8 + i % 8, pair = at / 2, second = at % 2;
		keys[i] = (uint8_t)(pair / 16 * 32 + second * 16 + pair % 16); /* of [4 dimensions][16] */
		values[i] = (uint8_t)(second * 32 + pair);                     /* of [2 tokens][32] */
		quads[i] = (uint8_t)(i % 4 * 16 + i / 4);
	}
	for (int i = 0; i < 2; i++) {
		u->low[i] = vb_load(low + 64 * i);
		u->high[i] = vb_load(high + 64 * i);
	}
	u->keys = vb_load(keys);
	u->values = vb_load(values);
	u->quads = vb_load(quads);
}

/* out[0], out[1]: the bfloat16s of 64 codes. */
INLINE void look_up(const struct unpacker *u, enum kv_form form, vb codes, vb order, vb *out)
{
	codes = vb_permute(order, codes);
	vb index = form == KV_FORM_INT8 ? vb_abs(codes) : codes;
	vb low = vb_look_up(index, u->low), high = vb_or_and(vb_look_up(index, u->high), codes, vb_set1(-128));
	out[0] = vb_zip_first(low, high);
	out[1] = vb_zip_last(low, high);
}

/* K and V as kernels_pages_bf16.h has them. */
INLINE void unpack_page(const struct unpacker *u, enum kv_form form, const struct narrow_block *from, int32_t head_dim,
                        unpacked *to)
{
	const int64_t n = (int64_t)head_dim * KV_PAGE_TOKENS;
	const uint8_t *k = from->code, *v = from->code + n;
	vb pair[2];
	int64_t i = 0;
	for (; i + 64 <= n; i += 64) {
		look_up(u, form, vb_load(k + i), u->keys, pair);
		vb_store(to + i, pair[0]);
		vb_store(to + i + 32, pair[1]);
	}
	if (i + 32 <= n) {
		look_up(u, form, vb_load_bytes_n(k + i, 32), u->keys, pair);
		vb_store(to + i, pair[0]);
		i += 32;
	}
	if (i < n)
		vf_store_bf16_n(to + i, code_values(form, k + i), LANES);
	to += n;
	for (int t = 0; t < KV_PAGE_TOKENS; t += 2, v += 2 * head_dim, to += 2 * head_dim) {
		int32_t d = 0;
		for (; d + 32 <= head_dim; d += 32) {
			vb codes = vb_halves(vb_load_bytes_n(v + d, 32), vb_load_bytes_n(v + head_dim + d, 32));
			look_up(u, form, codes, u->values, pair);
			vb_store(to + 2 * d, pair[0]);
			vb_store(to + 2 * d + 32, pair[1]);
		}
		if (d < head_dim) {
			int left = head_dim - d;
			vb codes = vb_halves(vb_load_bytes_n(v + d, left), vb_load_bytes_n(v + head_dim + d, left));
			look_up(u, form, codes, u->values, pair);
			vb_store_bytes_n(to + 2 * d, pair[0], left < 16 ? 4 * left : 64);
			if (left > 16)
				vb_store_bytes_n(to + 2 * d + 32, pair[1], 4 * (left - 16));
		}
	}
}
_Static_assert((int)LANES == (int)KV_PAGE_TOKENS, "the keys of a page in one dimension are a vector");

/* ---- Products with codes: qk() and pv() of kernels_pages_bf16.h, whose k and v are the codes of pages ---- */

enum { CODE_QUERIES = 4, CODE_DIMS = 64 }; /* head_dim is a multiple of CODE_DIMS */

INLINE void qk_codes(const struct unpacker *u, enum kv_form form, int n_queries, int n_pages, const kv_factor *q,
                     const uint16_t *const *k, int32_t head_dim, float *score, struct fetcher *f)
{
	vf sum[CODE_QUERIES][4];
	UNROLL
	for (int i = 0; i < n_queries; i++)
		UNROLL
		for (int p = 0; p < n_pages; p++)
			sum[i][p] = vf_zero();
	for (int32_t d = 0; d < head_dim; d += 4) {
		fetch(f, 4);
		UNROLL
		for (int p = 0; p < n_pages; p++) {
			vb pair[2];
			look_up(u, form, vb_load((const uint8_t *)k[p] + d * KV_PAGE_TOKENS), u->keys, pair);
			UNROLL
			for (int half = 0; half < 2; half++)
				UNROLL
				for (int i = 0; i < n_queries; i++)
					sum[i][p] = vf_dot_bf16(sum[i][p], pair[half],
				                                q + i * FACTOR_STRIDE(head_dim) + d + 2 * half);
		}
	}
	UNROLL
	for (int i = 0; i < n_queries; i++)
		UNROLL
		for (int p = 0; p < n_pages; p++)
			vf_store(score + i * ATTN_BLOCK + p * LANES, sum[i][p]);
}

/*
 * Four vectors of dimensions from `at` on, over tokens [from, n). One beside them that is in their pages has weight
 * zero, and codes are numbers whatever they are.
 */
INLINE void pv_codes(const struct unpacker *u, enum kv_form form, int n_queries, const kv_factor *weight,
                     const uint16_t *const *v, int from, int n, int32_t head_dim, int32_t at, float *acc,
                     struct fetcher *f)
{
	vf sum[CODE_QUERIES][4];
	UNROLL
	for (int i = 0; i < n_queries; i++)
		UNROLL
		for (int k = 0; k < 4; k++)
			sum[i][k] = vf_load(acc + i * head_dim + at + k * LANES);
	for (int t = from & ~1; t < n; t += 2) {
		const uint8_t *codes =
			(const uint8_t *)v[t / KV_PAGE_TOKENS] + (int64_t)(t % KV_PAGE_TOKENS) * head_dim + at;
		fetch(f, 4);
		UNROLL
		for (int half = 0; half < 2; half++) {
			vb value[2];
			look_up(u, form, vb_load_halves(codes + 32 * half, codes + head_dim + 32 * half), u->values,
			        value);
			UNROLL
			for (int i = 0; i < n_queries; i++)
				UNROLL
				for (int k = 0; k < 2; k++)
					sum[i][2 * half + k] = vf_dot_bf16(
						sum[i][2 * half + k], value[k],
						weight + i * FACTOR_STRIDE(ATTN_BLOCK) + t);
		}
	}
	UNROLL
	for (int i = 0; i < n_queries; i++)
		UNROLL
		for (int k = 0; k < 4; k++)
			vf_store(acc + i * head_dim + at + k * LANES, sum[i][k]);
}

/* attend_block() over codes. */
INLINE void attend_codes(const struct attn_job *j, enum kv_form form, int n_queries, int i, int from, int n,
                         struct block *b)
{
	const int32_t dim = j->head_dim;
	const kv_factor *q = (const kv_factor *)j->q + i * FACTOR_STRIDE(dim);
	const struct unpacker u = *b->unpacker;
	float *score = j->score + (int64_t)i * ATTN_BLOCK, *acc = j->acc + (int64_t)i * dim;
	int n_pages = (n + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS, page = from / KV_PAGE_TOKENS;
	struct fetcher f = b->fetch;
	for (; page + QK_PAGES <= n_pages; page += QK_PAGES)
		qk_codes(&u, form, n_queries, QK_PAGES, q, b->k + page, dim, score + page * KV_PAGE_TOKENS, &f);
	for (; page < n_pages; page++)
		qk_codes(&u, form, n_queries, 1, q, b->k + page, dim, score + page * KV_PAGE_TOKENS, &f);
	for (int m = 0; m < n_queries; m++)
		softmax_block(score + m * ATTN_BLOCK, from, n, b->k_scale, b->v_scale, j->softcap, NULL, j->max + i + m,
			      j->sum + i + m, acc + (int64_t)m * dim, dim, weights_of(j, b, i + m));
	for (int32_t at = 0; at < dim; at += CODE_DIMS)
		pv_codes(&u, form, n_queries, (const kv_factor *)(const void *)score, b->v, from, n, dim, at, acc, &f);
	b->fetch = f;
}

#define ATTEND_CODES(form, n)                                                                                          \
	static void attend_##form##_##n(const struct attn_job *j, int i, int from, int end, struct block *b)           \
	{                                                                                                              \
		attend_codes(j, KV_FORM_##form, n, i, from, end, b);                                                   \
	}
ATTEND_CODES(FP8_E4M3, 1)
ATTEND_CODES(FP8_E4M3, 2)
ATTEND_CODES(FP8_E4M3, 3)
ATTEND_CODES(FP8_E4M3, 4)

#include "engine/cpu/kernels_bytes.h"

/* What takes the codes of a job's pages; NULL: they are unpacked first. */
static attend_fn *const *attend_codes_of(const struct attn_job *j, enum kv_form form)
{
	static attend_fn *const by_look_up[] = {NULL, attend_FP8_E4M3_1, attend_FP8_E4M3_2, attend_FP8_E4M3_3,
						attend_FP8_E4M3_4};
	if (has_byte_products(j, form))
		return attend_by_bytes;
	return j->n_queries <= CODE_QUERIES && j->head_dim % CODE_DIMS == 0 ? by_look_up : NULL;
}

/* Before the pages of a job are gone through. */
static void prepare_queries(const struct attn_job *j, enum kv_form form)
{
	for (int i = 0; has_byte_products(j, form) && i < j->n_heads * j->n_queries; i++)
		make_byte_query(j, i);
}
#else
struct unpacker {
	char nothing;
};

static void unpacker_init(enum kv_form form, struct unpacker *u)
{
	(void)form;
	u->nothing = 0;
}

ATTEND_TABLE(int8, ELEMENTS_INT8)
ATTEND_TABLE(e4m3, ELEMENTS_E4M3)

/* As above. */
static attend_fn *const *attend_codes_of(const struct attn_job *j, enum kv_form form)
{
	if (are_unpacked(j))
		return NULL;
	return form == KV_FORM_INT8 ? attend_int8 : attend_e4m3;
}

static void prepare_queries(const struct attn_job *j, enum kv_form form)
{
	(void)j, (void)form;
}

/* K [head_dim][16] and V [16][head_dim]. */
INLINE void unpack_page(const struct unpacker *u, enum kv_form form, const struct narrow_block *from, int32_t head_dim,
                        unpacked *to)
{
	(void)u;
	elements_to_floats(form == KV_FORM_INT8 ? ELEMENTS_INT8 : ELEMENTS_E4M3,
			   (const uint16_t *)(const void *)from->code, 2 * (int64_t)head_dim * KV_PAGE_TOKENS, to);
}
_Static_assert((int)KV_PAGE_TOKENS % (int)LANES == 0, "codes are whole vectors");
#endif

static void narrow_store(enum kv_form form, const float *k, const float *v, int32_t head_dim, int32_t token,
                         struct narrow_block *to)
{
	to->k_scale[token] = kv_form_pack(form, k, head_dim, FLT_MAX, to->code + token, KV_PAGE_TOKENS);
	to->v_scale[token] =
		kv_form_pack(form, v, head_dim, FLT_MAX, to->code + (int64_t)head_dim * (KV_PAGE_TOKENS + token), 1);
}

/*
 * The same K and V as in the page's wide copy, where those of this block are at `to`; head_dim <= WATCH_MAX_DIM. Rare:
 * element by element.
 */
static void narrow_widen(enum kv_form form, const struct narrow_block *from, int32_t head_dim, uint16_t *to)
{
	const int64_t n = (int64_t)head_dim * KV_PAGE_TOKENS;
	float k[WATCH_MAX_DIM], v[WATCH_MAX_DIM];
	for (int32_t t = 0; t < KV_PAGE_TOKENS; t++) {
		for (int32_t d = 0; d < head_dim; d++) {
			uint8_t kc = from->code[d * KV_PAGE_TOKENS + t], vc = from->code[n + (int64_t)t * head_dim + d];
			k[d] = from->k_scale[t] * (form == KV_FORM_INT8 ? (float)(int8_t)kc : quant_fp8_to_float(kc));
			v[d] = from->v_scale[t] * (form == KV_FORM_INT8 ? (float)(int8_t)vc : quant_fp8_to_float(vc));
		}
		kv_store(k, v, head_dim, t, to, to + n);
	}
}

/* See watch.h. */
static int32_t peak(const float *x, int64_t n)
{
	vf most = vf_zero();
	int32_t bits[LANES], top = 0;
	/* As integers: a maximum of floats may lose a NaN. */
	for (int64_t i = 0; i < n; i += LANES) {
		vf v = vf_abs(i + LANES <= n ? vf_load(x + i) : vf_load_n(x + i, (int)(n - i)));
		most = vf_bits_max(most, v);
	}
	memcpy(bits, &most, sizeof bits);
	for (int i = 0; i < LANES; i++)
		top = bits[i] > top ? bits[i] : top;
	return top;
}

/*
 * The page that stands for positions from `at` on: its block of the job's first KV head, or its wide copy's; `wide`
 * says which. In place of those before all windows, which may be gone, the first one behind.
 */
static const char *narrow_page(const struct attn_job *j, int32_t at, bool *wide)
{
	const struct kv_layout *l = j->layout;
	int32_t page = j->block_table[(at < j->first[0] ? j->first[0] : at) / KV_PAGE_TOKENS - j->first_page];
	const char *copy = narrow_wide_page(l, j->slab, page);
	*wide = copy != NULL;
	if (copy)
		return copy + ((size_t)j->layer * (size_t)l->n_head_kv + (size_t)j->head_kv) * 2 * (size_t)j->head_dim *
		                      KV_PAGE_TOKENS * sizeof(uint16_t);
	return j->slab + (size_t)page * l->page_stride + narrow_offset(l, j->layer, j->head_kv);
}

/* Pages of a block, from position `at` on, that hold positions below `end`. */
struct narrow_pages {
	int n;
	uint32_t wide; /* a bit for each that has a wide copy, which stands for it */
	const char *page[BLOCK_PAGES];
};

static struct narrow_pages find_narrow_pages(const struct attn_job *j, int32_t at, int32_t end)
{
	struct narrow_pages p = {0};
	for (; p.n < BLOCK_PAGES && at + p.n * KV_PAGE_TOKENS < end; p.n++) {
		bool wide;
		p.page[p.n] = narrow_page(j, at + p.n * KV_PAGE_TOKENS, &wide);
		p.wide |= (uint32_t)wide << p.n;
	}
	return p;
}

INLINE const struct narrow_block *block_of(const char *page, int head, int32_t head_dim)
{
	return (const struct narrow_block *)(const void *)(page + (size_t)head * narrow_block_bytes(head_dim));
}

INLINE void load_scales(enum kv_form form, const struct narrow_block *block, bool wide, float *k_scale, float *v_scale)
{
	const vf unit = vf_set1(code_unit(form));
	for (int i = 0; i < KV_PAGE_TOKENS; i += LANES) {
		vf_store(k_scale + i, wide ? vf_set1(1) : vf_mul(vf_load(block->k_scale + i), unit));
		vf_store(v_scale + i, wide ? vf_set1(1) : vf_mul(vf_load(block->v_scale + i), unit));
	}
}

/* K and V of page `p` of a block and a head, unpacked. */
INLINE const uint16_t *open_page(const struct attn_job *j, const struct unpacker *u, enum kv_form form,
				 const struct narrow_pages *pages, int p, int head)
{
	const char *page = pages->page[p];
	if (pages->wide >> p & 1)
		return unpack_elements(
			j, (const uint16_t *)(const void *)page + head * 2 * (int64_t)j->head_dim * KV_PAGE_TOKENS, p);
	unpack_page(u, form, block_of(page, head, j->head_dim), j->head_dim, unpacked_page(j, p));
	return (const uint16_t *)(const void *)unpacked_page(j, p);
}

/* The codes of a block's pages, but for those with a wide copy, which nobody reads as codes. */
INLINE void use_codes(const struct attn_job *j, const struct narrow_pages *pages, int head, struct block *b)
{
	for (int p = 0; p < pages->n; p++) {
		b->k[p] = (const uint16_t *)(const void *)block_of(pages->page[p], head, j->head_dim)->code;
		b->v[p] = b->k[p] + (int64_t)j->head_dim * KV_PAGE_TOKENS / 2;
	}
}

/* All pages of a block, unpacked. */
INLINE void use_unpacked(const struct attn_job *j, const struct unpacker *u, enum kv_form form,
			 const struct narrow_pages *pages, int head, struct block *b)
{
	for (int p = 0; p < pages->n; p++) {
		b->k[p] = open_page(j, u, form, pages, p, head);
		b->v[p] = b->k[p] + unpacked_size(j);
	}
}

/*
 * Products of codes are other sums than those of 16 bits. Which of them a query has in a block depends on the pages
 * that it sees there: a wide copy that comes behind it, because its step goes on so far, changes nothing for it.
 */
INLINE void run_narrow(const struct attn_job *j, enum kv_form form)
{
	float k_scale[ATTN_BLOCK], v_scale[ATTN_BLOCK];
	struct unpacker u;
	struct block b = {.k_scale = k_scale, .v_scale = v_scale, .unpacker = &u};
	struct fetcher *f = &b.fetch;
	struct narrow_pages pages = find_narrow_pages(j, j->from, j->to);
	unpacker_init(form, &u);
	prepare_queries(j, form);
	/* of a copy they are the first half */
	f->page_lines = (int32_t)((size_t)j->n_heads * narrow_block_bytes(j->head_dim) / 64);
	for (int32_t at = j->from; at < j->to; at += ATTN_BLOCK) {
		struct narrow_pages next = find_narrow_pages(j, at + ATTN_BLOCK, j->end);
		for (int p = 0; p < next.n; p++)
			f->pages[p] = (const uint16_t *)(const void *)next.page[p];
		f->n_pages = next.n;
		f->page = 0;
		f->left = f->page_lines;
		f->line = next.n ? next.page[0] : NULL;
		attend_fn *const *attend = attend_codes_of(j, form);
		for (int head = 0; head < j->n_heads; head++) {
			for (int p = 0; p < pages.n; p++)
				load_scales(form, block_of(pages.page[p], head, j->head_dim), pages.wide >> p & 1,
				            k_scale + p * KV_PAGE_TOKENS, v_scale + p * KV_PAGE_TOKENS);
			if (attend) {
				use_codes(j, &pages, head, &b);
				attend_head(j, head, at, &b, attend, pages.wide, false);
			}
			if (!attend || pages.wide) {
				use_unpacked(j, &u, form, &pages, head, &b);
				attend_head(j, head, at, &b, attend_unpacked, attend ? pages.wide : 0, attend != NULL);
			}
		}
		pages = next;
	}
}

static void attn_run_narrow(const struct attn_job *j)
{
	if (j->layout->form == KV_FORM_INT8)
		run_narrow(j, KV_FORM_INT8);
	else
		run_narrow(j, KV_FORM_FP8_E4M3);
}
