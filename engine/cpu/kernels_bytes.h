/*
 * Attention over int8 KV by products of bytes (VNNI): four times as many in an instruction as of floats, and codes need
 * not become anything else. Queries become bytes too, with a scale each, and weights unsigned ones, with a scale for
 * each block and query, that of the largest in it. Sums of products are exact, so that it makes no difference which
 * queries go together. On SmolLM2-135M the mean divergence from exact KV is 0.0021 with them, and 0.0015 where products
 * are of bfloat16s. Queries that see a page with a wide copy have the block that it is in with bfloat16s.
 *
 * Included by kernels_narrow.h.
 */
#pragma once

/* Behind the head_dim bfloat16s of a query, in what is left of its room. */
struct byte_query {
	float scale;
	int32_t minus; /* what the keys' being unsigned adds to a product, negative */
	int8_t code[];
};
_Static_assert(sizeof(struct byte_query) + CODE_DIMS <= 2 * (size_t)CODE_DIMS, "it fits");

INLINE struct byte_query *byte_query(const struct attn_job *j, int i)
{
	return (struct byte_query *)(void *)((char *)j->q + ((int64_t)i * 4 + 2) * j->head_dim);
}

/* A query of zeros has the scale zero; of one with a number that is none, the scale is none. */
static void make_byte_query(const struct attn_job *j, int i)
{
	const uint16_t *x = (const uint16_t *)j->q + (int64_t)i * FACTOR_STRIDE(j->head_dim);
	struct byte_query *to = byte_query(j, i);
	vf most = vf_zero();
	int32_t sum = 0;
	for (int32_t d = 0; d < j->head_dim; d += LANES)
		most = vf_bits_max(most, vf_abs(vf_load_bf16(x + d)));
	float max = vf_bits_hmax(most);
	const vf by = vf_set1(max >= 0x1p-100f ? 127 / max : 0);
	for (int32_t d = 0; d < j->head_dim; d += LANES)
		vf_store_s8(to->code + d, vf_mul(vf_load_bf16(x + d), by));
	for (int32_t d = 0; d < j->head_dim; d++)
		sum += to->code[d];
	to->minus = -sum * (1 << S8_SHIFT);
	to->scale = max < 0x1p-100f ? 0 : max / 127;
}

/*
 * Scores of n_pages pages, times the scales of keys, and the largest of each query. Loops over dimensions and tokens
 * end behind their bodies: where they may have no rounds at all, compilers copy all sums in each.
 */
INLINE void qk_bytes(const struct unpacker *u, const struct byte_query *const *q, int n_queries, int n_pages,
		     const uint16_t *const *k, const float *k_scale, int32_t head_dim, float *score, vf *top,
		     struct fetcher *f)
{
	vsum sum[QK_QUERIES][4];
	UNROLL
	for (int m = 0; m < n_queries; m++)
		UNROLL
		for (int p = 0; p < n_pages; p++)
			sum[m][p] = vsum_zero();
	int32_t d = 0;
	do {
		UNROLL
		for (int p = 0; p < n_pages; p++) {
			fetch(f, 1); /* more at a time wait for each other */
			vb key = vb_prepare_s8(
				vb_permute(u->quads, vb_load((const uint8_t *)k[p] + d * KV_PAGE_TOKENS)));
			UNROLL
			for (int m = 0; m < n_queries; m++)
				sum[m][p] = vsum_dot_s8(sum[m][p], key, q[m]->code + d);
		}
		d += 4;
	} while (d < head_dim);
	UNROLL
	for (int m = 0; m < n_queries; m++)
		UNROLL
		for (int p = 0; p < n_pages; p++) {
			vf x = vf_mul(vsum_to_float(sum[m][p], q[m]->minus), vf_set1(q[m]->scale));
			x = vf_mul(x, vf_load(k_scale + p * LANES));
			vf_store(score + m * ATTN_BLOCK + p * LANES, x);
			top[m] = vf_max(top[m], x);
		}
}

/* The weights of a block become bytes in the place of `score`, and their scale is behind them. */
INLINE void make_byte_weights(const vf *w, float *score)
{
	enum { N = ATTN_BLOCK / LANES };
	uint8_t *code = (uint8_t *)(void *)score;
	vf most = vf_zero();
	for (int k = 0; k < N; k++)
		most = vf_bits_max(most, vf_abs(w[k])); /* as integers: a maximum of floats may lose a NaN */
	float max = vf_bits_hmax(most);
	const vf by = vf_set1(max >= 0x1p-100f ? 255 / max : 0);
	for (int k = 0; k < N; k++)
		vf_store_u8(code + k * LANES, vf_mul(w[k], by));
	score[ATTN_BLOCK / sizeof(float)] = max < 0x1p-100f ? 0 : max / 255;
}

/*
 * What softmax_of() does for a block of which all is seen, without a cap, of scores that have the scales of keys and
 * are not above `top`.
 */
INLINE void softmax_whole(const struct attn_job *j, const struct block *b, int i, float top, float *score, float *acc)
{
	enum { N = ATTN_BLOCK / LANES };
	float *max = j->max + i, *sum = j->sum + i;
	vf w[N], total = vf_zero();
	top = top > *max ? top : *max;
	for (int k = 0; k < N; k++) {
		w[k] = exp2_vf(vf_sub(vf_load(score + k * LANES), vf_set1(top)));
		total = vf_add(total, w[k]);
		w[k] = vf_mul(w[k], vf_load(b->v_scale + k * LANES));
	}
	if (top != *max) {
		float factor[LANES];
		vf_store(factor, exp2_vf(vf_set1(*max - top)));
		*max = top;
		*sum *= factor[0];
		scale(acc, factor[0], j->head_dim, acc);
	}
	*sum += vf_hsum(total);
	make_byte_weights(w, score);
}

static void softmax_some(const struct attn_job *j, const struct block *b, int i, int from, int n, float *score,
			 float *acc)
{
	vf w[ATTN_BLOCK / LANES];
	softmax_of(score, from, n, NULL, b->v_scale, j->softcap, NULL, true, j->max + i, j->sum + i, acc, j->head_dim,
		   weights_of(j, b, i));
	for (int k = 0; k < ATTN_BLOCK / LANES; k++)
		w[k] = vf_load(score + k * LANES);
	make_byte_weights(w, score);
}

/* Dimensions from `at` on, over tokens [from, n), at least one; others of their pages have the weight zero. */
INLINE void pv_bytes(int n_queries, const float *score, const uint16_t *const *v, int from, int n, int32_t head_dim,
		     int32_t at, float *acc, struct fetcher *f)
{
	vsum sum[QK_QUERIES][4];
	UNROLL
	for (int m = 0; m < n_queries; m++)
		UNROLL
		for (int k = 0; k < 4; k++)
			sum[m][k] = vsum_zero();
	int t = from & ~3;
	do {
		const uint8_t *row =
			(const uint8_t *)v[t / KV_PAGE_TOKENS] + (int64_t)(t % KV_PAGE_TOKENS) * head_dim + at;
		vb a = vb_load(row), b = vb_load(row + head_dim), c = vb_load(row + 2 * head_dim),
		   d = vb_load(row + 3 * head_dim);
		vb ab[2] = {vb_zip_first(a, b), vb_zip_last(a, b)}, cd[2] = {vb_zip_first(c, d), vb_zip_last(c, d)};
		UNROLL
		for (int k = 0; k < 4; k++) {
			fetch(f, 1);
			/* Of each 16 dimensions four from 4 * k on, with four tokens each. */
			vb value = k % 2 ? vb_zip_pairs_last(ab[k / 2], cd[k / 2])
					 : vb_zip_pairs_first(ab[k / 2], cd[k / 2]);
			UNROLL
			for (int m = 0; m < n_queries; m++)
				sum[m][k] = vsum_dot_by_u8(
					sum[m][k], (const uint8_t *)(const void *)(score + m * ATTN_BLOCK) + t, value);
		}
		t += 4;
	} while (t < n);
	UNROLL
	for (int m = 0; m < n_queries; m++) {
		const vf by = vf_set1(score[m * ATTN_BLOCK + ATTN_BLOCK / (int)sizeof(float)]);
		vf x[4];
		UNROLL
		for (int k = 0; k < 4; k++)
			x[k] = vsum_to_float(sum[m][k], 0);
		vf_turn_quarters(x);
		UNROLL
		for (int k = 0; k < 4; k++) {
			float *to = acc + m * head_dim + at + k * LANES;
			vf_store(to, vf_fma(x[k], by, vf_load(to)));
		}
	}
}

/* attend_block() over bytes. */
INLINE void attend_bytes(const struct attn_job *j, int n_queries, int i, int from, int n, struct block *b)
{
	const int32_t dim = j->head_dim;
	const struct unpacker u = *b->unpacker;
	const struct byte_query *q[QK_QUERIES];
	float *score = j->score + (int64_t)i * ATTN_BLOCK, *acc = j->acc + (int64_t)i * dim;
	int n_pages = (n + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS, page = from / KV_PAGE_TOKENS;
	struct fetcher f = b->fetch;
	vf top[QK_QUERIES];
	UNROLL
	for (int m = 0; m < n_queries; m++) {
		q[m] = byte_query(j, i + m);
		top[m] = vf_set1(-INFINITY);
	}
	for (; page + QK_PAGES <= n_pages; page += QK_PAGES)
		qk_bytes(&u, q, n_queries, QK_PAGES, b->k + page, b->k_scale + page * LANES, dim, score + page * LANES,
			 top, &f);
	for (; page < n_pages; page++)
		qk_bytes(&u, q, n_queries, 1, b->k + page, b->k_scale + page * LANES, dim, score + page * LANES, top,
			 &f);
	if (from == 0 && n == ATTN_BLOCK && j->softcap == 0 && !b->weights) {
		float most[QK_QUERIES];
		UNROLL
		for (int m = 0; m < n_queries; m++)
			most[m] = vf_hmax(top[m]);
		for (int m = 0; m < n_queries; m++)
			softmax_whole(j, b, i + m, most[m], score + m * ATTN_BLOCK, acc + (int64_t)m * dim);
	} else {
		for (int m = 0; m < n_queries; m++)
			softmax_some(j, b, i + m, from, n, score + m * ATTN_BLOCK, acc + (int64_t)m * dim);
	}
	for (int32_t at = 0; at < dim; at += CODE_DIMS)
		pv_bytes(n_queries, score, b->v, from, n, dim, at, acc, &f);
	b->fetch = f;
}

#define ATTEND_BYTES(n)                                                                                                \
	static void attend_bytes_##n(const struct attn_job *j, int i, int from, int end, struct block *b)              \
	{                                                                                                              \
		attend_bytes(j, n, i, from, end, b);                                                                   \
	}
ATTEND_BYTES(1)
ATTEND_BYTES(2)
ATTEND_BYTES(3)
ATTEND_BYTES(4)
ATTEND_BYTES(5)
ATTEND_BYTES(6)

static attend_fn *const attend_by_bytes[] = {
	NULL, attend_bytes_1, attend_bytes_2, attend_bytes_3, attend_bytes_4, attend_bytes_5, attend_bytes_6,
};
_Static_assert(sizeof attend_by_bytes / sizeof *attend_by_bytes == QK_QUERIES + 1, "as attend_head() takes them");

static bool has_byte_products(const struct attn_job *j, enum kv_form form)
{
	return form == KV_FORM_INT8 && j->head_dim % CODE_DIMS == 0;
}
