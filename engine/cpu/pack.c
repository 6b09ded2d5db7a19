/*
 * Repacking of GGUF blocks into the tiles that fast.h describes. The integers and scales are kept as they are; only
 * their places change, so a product differs from the reference by the quantisation of the activations alone.
 * Block layouts: as in model/quant.c, whose dequantisers the tests compare with.
 */
#include <string.h>

#include "engine/cpu/fast.h"

enum { BLOCK_MAX = 256, GROUPS_MAX = 16 };

/* A block taken apart. */
struct raw {
	uint8_t q[BLOCK_MAX];          /* integers plus the format's offset; Q8_0: the signed bytes themselves */
	/* halves; x = d * (q - offset) + min, times scale and min_scale where there are */
	uint16_t d, min;
	int8_t scale[GROUPS_MAX];      /* super-blocks: one per group */
	int8_t min_scale[GROUPS_MAX];
};

static uint16_t read16(const uint8_t *p)
{
	return (uint16_t)(p[0] | p[1] << 8);
}

static uint32_t read32(const uint8_t *p)
{
	return (uint32_t)read16(p) | (uint32_t)read16(p + 2) << 16;
}

static void low_high_nibbles(const uint8_t *qs, uint8_t *q)
{
	for (int i = 0; i < 16; i++) {
		q[i] = qs[i] & 15;
		q[i + 16] = qs[i] >> 4;
	}
}

static void fifth_bits(uint32_t bits, uint8_t *q)
{
	for (int i = 0; i < 32; i++)
		q[i] |= (uint8_t)((bits >> i & 1) << 4);
}

static void read_q4_0(const uint8_t *b, struct raw *r)
{
	r->d = read16(b);
	low_high_nibbles(b + 2, r->q);
}

static void read_q4_1(const uint8_t *b, struct raw *r)
{
	r->d = read16(b);
	r->min = read16(b + 2);
	low_high_nibbles(b + 4, r->q);
}

static void read_q5_0(const uint8_t *b, struct raw *r)
{
	r->d = read16(b);
	low_high_nibbles(b + 6, r->q);
	fifth_bits(read32(b + 2), r->q);
}

static void read_q5_1(const uint8_t *b, struct raw *r)
{
	r->d = read16(b);
	r->min = read16(b + 2);
	low_high_nibbles(b + 8, r->q);
	fifth_bits(read32(b + 4), r->q);
}

static void read_q8_0(const uint8_t *b, struct raw *r)
{
	r->d = read16(b);
	memcpy(r->q, b + 2, 32);
}

/* Two bits of each element, as Q2_K and Q3_K keep them: 4 runs of 32 elements share 32 bytes, twice. */
static void two_bits(const uint8_t *qs, uint8_t *q)
{
	for (int i = 0; i < 256; i++)
		q[i] = qs[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
}

static void read_q2_k(const uint8_t *b, struct raw *r)
{
	two_bits(b + 16, r->q);
	for (int g = 0; g < 16; g++) {
		r->scale[g] = b[g] & 15;
		r->min_scale[g] = (int8_t)(b[g] >> 4);
	}
	r->d = read16(b + 80);
	r->min = read16(b + 82) ^ 0x8000; /* the minimum is subtracted */
}

static void read_q3_k(const uint8_t *b, struct raw *r)
{
	const uint8_t *s = b + 96;
	two_bits(b + 32, r->q);
	for (int i = 0; i < 256; i++)
		r->q[i] |= (uint8_t)((b[i % 32] >> (i / 32) & 1) << 2);
	for (int g = 0; g < 16; g++) {
		int low = g < 8 ? s[g] & 15 : s[g - 8] >> 4;
		int high = s[8 + g % 4] >> (g / 4 * 2) & 3;
		r->scale[g] = (int8_t)((low | high << 4) - 32);
	}
	r->d = read16(b + 108);
}

/* Eight 6-bit scales and minima in 12 bytes. */
static void read_k_scales(const uint8_t *s, struct raw *r)
{
	for (int g = 0; g < 4; g++) {
		r->scale[g] = s[g] & 63;
		r->min_scale[g] = s[g + 4] & 63;
		r->scale[g + 4] = (int8_t)((s[g + 8] & 15) | s[g] >> 6 << 4);
		r->min_scale[g + 4] = (int8_t)(s[g + 8] >> 4 | s[g + 4] >> 6 << 4);
	}
}

/* Runs of 64 elements: the low nibbles of 32 bytes, then their high nibbles. */
static void k_nibbles(const uint8_t *qs, uint8_t *q)
{
	for (int i = 0; i < 256; i++)
		q[i] = qs[i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15;
}

static void read_q4_k(const uint8_t *b, struct raw *r)
{
	r->d = read16(b);
	r->min = read16(b + 2) ^ 0x8000;
	read_k_scales(b + 4, r);
	k_nibbles(b + 16, r->q);
}

static void read_q5_k(const uint8_t *b, struct raw *r)
{
	r->d = read16(b);
	r->min = read16(b + 2) ^ 0x8000;
	read_k_scales(b + 4, r);
	k_nibbles(b + 48, r->q);
	for (int i = 0; i < 256; i++)
		r->q[i] |= (uint8_t)((b[16 + i % 32] >> (i / 32) & 1) << 4);
}

static void read_q6_k(const uint8_t *b, struct raw *r)
{
	for (int i = 0; i < 256; i++) {
		int half = i / 128, run = i / 32 % 4, e = i % 32;
		int low = b[half * 64 + run % 2 * 32 + e] >> (run / 2 * 4) & 15;
		int high = b[128 + half * 32 + e] >> (run * 2) & 3;
		r->q[i] = (uint8_t)(low | high << 4);
	}
	memcpy(r->scale, b + 192, 16);
	r->d = read16(b + 208);
}

struct format_row {
	struct pack_format format;
	void (*read)(const uint8_t *block, struct raw *r);
};

static const struct format_row rows[] = {
        /* type, planes, groups, has_min, super */
        {{QUANT_F32, PLANES_F32, 0, false, false}, NULL},
        {{QUANT_F16, PLANES_F16, 0, false, false}, NULL},
        {{QUANT_BF16, PLANES_BF16, 0, false, false}, NULL},
        {{QUANT_Q4_0, PLANES_4, 1, false, false}, read_q4_0},
        {{QUANT_Q4_1, PLANES_4, 1, true, false}, read_q4_1},
        {{QUANT_Q5_0, PLANES_4_1, 1, false, false}, read_q5_0},
        {{QUANT_Q5_1, PLANES_4_1, 1, true, false}, read_q5_1},
        {{QUANT_Q8_0, PLANES_8, 1, false, false}, read_q8_0},
        {{QUANT_Q2_K, PLANES_2, 2, true, true}, read_q2_k},
        {{QUANT_Q3_K, PLANES_2_1, 2, false, true}, read_q3_k},
        {{QUANT_Q4_K, PLANES_4, 1, true, true}, read_q4_k},
        {{QUANT_Q5_K, PLANES_4_1, 1, true, true}, read_q5_k},
        {{QUANT_Q6_K, PLANES_4_2, 2, false, true}, read_q6_k},
};

static const struct format_row *find_row(enum quant_type type)
{
	for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
		if (rows[i].format.type == type)
			return &rows[i];
	return NULL;
}

const struct pack_format *pack_format(enum quant_type type)
{
	const struct format_row *row = find_row(type);
	return row ? &row->format : NULL;
}

bool pack_is_float(const struct pack_format *f)
{
	return f->groups == 0;
}

/* Vectors of 4 * lanes bytes that a unit's planes take. */
static int plane_vectors(enum pack_planes planes)
{
	static const int8_t n[] = {[PLANES_8] = 8,   [PLANES_4] = 4, [PLANES_4_1] = 5,
	                           [PLANES_4_2] = 6, [PLANES_2] = 2, [PLANES_2_1] = 3};
	return n[planes];
}

static size_t element_bytes(enum pack_planes planes)
{
	return planes == PLANES_F32 ? 4 : 2;
}

/* Bytes of a vector, to which the scales of a span are padded. */
static size_t vector_bytes(int lanes)
{
	return 4 * (size_t)lanes;
}

/* Bytes of the scales of a span. */
static size_t span_scale_bytes(const struct pack_format *f, int64_t n_units, int lanes)
{
	size_t per_output = (size_t)f->groups * (f->super ? 1 : 2) * (f->has_min ? 2 : 1) * (size_t)n_units;
	per_output += f->super ? f->has_min ? 4 : 2 : 0;
	size_t vector = vector_bytes(lanes);
	return (per_output * (size_t)lanes + vector - 1) / vector * vector;
}

static size_t span_bytes(const struct pack_format *f, int64_t n_units, int lanes)
{
	return span_scale_bytes(f, n_units, lanes) +
	       (size_t)n_units * (size_t)plane_vectors(f->planes) * vector_bytes(lanes);
}

enum status pack_layout(struct weight *w, int lanes, int tile_floats)
{
	const struct pack_format *f = w->format;
	w->tile_outs = pack_is_float(f) ? tile_floats : lanes;
	w->n_tiles = (w->desc.n_out + w->tile_outs - 1) / w->tile_outs;
	if (pack_is_float(f)) {
		w->n_units = 0;
		int64_t n_in = f->planes == PLANES_BF16 ? (w->desc.n_in + 1) & ~INT64_C(1) : w->desc.n_in;
		w->tile_bytes = (size_t)n_in * (size_t)tile_floats * element_bytes(f->planes);
	} else {
		w->n_units = w->desc.n_in / UNIT;
		int64_t rest = w->n_units % SPAN_UNITS;
		w->tile_bytes = (size_t)(w->n_units / SPAN_UNITS) * span_bytes(f, SPAN_UNITS, lanes) +
		                (rest ? span_bytes(f, rest, lanes) : 0);
	}
	return __builtin_mul_overflow(w->tile_bytes, (size_t)w->n_tiles, &w->bytes) ? STATUS_INVALID : STATUS_OK;
}

/* Places the 32 integers of a unit, for lane `lane`, in its planes. */
static void place_integers(char *planes, enum pack_planes kind, int lanes, int lane, const uint8_t *q)
{
	uint8_t *out = (uint8_t *)planes + lane * 4;
	int vector = 4 * lanes;
	for (int i = 0; i < UNIT; i++) {
		int j = i / 4, byte = i % 4;
		switch (kind) {
		case PLANES_8:
			out[j * vector + byte] = q[i];
			break;
		case PLANES_2_1:
			out[2 * vector + byte] |= (uint8_t)((q[i] >> 2 & 1) << j);
			/* fall through */
		case PLANES_2:
			out[j / 4 * vector + byte] |= (uint8_t)((q[i] & 3) << (j % 4 * 2));
			break;
		case PLANES_4_1:
			out[4 * vector + byte] |= (uint8_t)((q[i] >> 4 & 1) << j);
			out[j % 4 * vector + byte] |= (uint8_t)((q[i] & 15) << (j / 4 * 4));
			break;
		case PLANES_4_2:
			out[(4 + j / 4) * vector + byte] |= (uint8_t)((q[i] >> 4 & 3) << (j % 4 * 2));
			/* fall through */
		default: /* PLANES_4 */
			out[j % 4 * vector + byte] |= (uint8_t)((q[i] & 15) << (j / 4 * 4));
		}
	}
}

static char *place_half(char *scales, int lanes, int lane, uint16_t half)
{
	memcpy(scales + lane * 2, &half, 2);
	return scales + lanes * 2;
}

static char *place_byte(char *scales, int lanes, int lane, int8_t value)
{
	scales[lane] = (char)value;
	return scales + lanes;
}

/* Places the scales of a unit; r holds the unit's block, in which it is the `unit`th. */
static char *place_scales(const struct pack_format *f, const struct raw *r, int unit, char *scales, int lanes, int lane)
{
	if (!f->super) {
		scales = place_half(scales, lanes, lane, r->d);
		return f->has_min ? place_half(scales, lanes, lane, r->min) : scales;
	}
	for (int g = unit * f->groups; g < (unit + 1) * f->groups; g++) {
		scales = place_byte(scales, lanes, lane, r->scale[g]);
		if (f->has_min)
			scales = place_byte(scales, lanes, lane, r->min_scale[g]);
	}
	return scales;
}

/* One output's row of blocks, into its lane of a tile. */
static void pack_quantised_row(const struct weight *w, const struct format_row *row, const uint8_t *block, char *tile,
                               int lanes, int lane)
{
	const struct pack_format *f = &row->format;
	int block_units = (int)w->desc.format->block_elems / UNIT; /* 1, or those of a span */
	size_t unit_planes = (size_t)plane_vectors(f->planes) * vector_bytes(lanes);
	char *scales = NULL, *planes = tile;
	struct raw r = {0};
	for (int64_t u = 0; u < w->n_units; u++, planes += unit_planes) {
		if (u % SPAN_UNITS == 0) {
			int64_t left = w->n_units - u;
			scales = planes;
			planes += span_scale_bytes(f, left < SPAN_UNITS ? left : SPAN_UNITS, lanes);
		}
		if (u % block_units == 0) {
			row->read(block, &r);
			block += w->desc.format->block_bytes;
			if (f->super)
				scales = place_half(scales, lanes, lane, r.d);
			if (f->super && f->has_min)
				scales = place_half(scales, lanes, lane, r.min);
		}
		scales = place_scales(f, &r, (int)(u % block_units), scales, lanes, lane);
		place_integers(planes, f->planes, lanes, lane, r.q + u % block_units * UNIT);
	}
}

static void pack_float_row(const struct weight *w, const char *row, char *tile, int lane)
{
	size_t n = element_bytes(w->format->planes), step = (size_t)w->tile_outs * n;
	char *out = tile + (size_t)lane * n;
	if (w->format->planes == PLANES_BF16) {
		for (int64_t k = 0; k < w->desc.n_in; k++, row += n)
			memcpy(tile + (k / 2 * w->tile_outs + lane) * 4 + k % 2 * 2, row, n);
		return;
	}
	for (int64_t k = 0; k < w->desc.n_in; k++, row += n, out += step)
		memcpy(out, row, n);
}

void pack_tiles(const struct weight *w, int lanes, int64_t begin, int64_t end)
{
	const struct format_row *format = find_row(w->desc.format->type);
	size_t row_bytes = cpu_row_bytes(&w->desc);
	for (int64_t t = begin; t < end; t++) {
		char *tile = w->tiles + (size_t)t * w->tile_bytes;
		for (int lane = 0; lane < w->tile_outs; lane++) {
			int64_t out = t * w->tile_outs + lane;
			if (out >= w->desc.n_out)
				break;
			const char *row = (const char *)w->desc.data + (size_t)out * row_bytes;
			if (pack_is_float(w->format))
				pack_float_row(w, row, tile, lane);
			else
				pack_quantised_row(w, format, (const uint8_t *)row, tile, lanes, lane);
		}
	}
}
