#include "engine/sample/sampler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/sample/select.h"

/* What the penalties know of one token. */
struct seen {
	int32_t window;    /* times among the last penalty_last_n tokens */
	int32_t generated; /* times in the answer */
	bool listed;       /* has an entry in struct penalties' `tokens` */
};

struct penalties {
	bool active;
	struct seen *seen; /* [n_vocab] */
	int32_t *tokens;   /* [n_vocab] tokens met so far, each once */
	int32_t n_tokens;
	int32_t *ring;  /* [last_n] the window, when it is bounded */
	int32_t last_n; /* 0: the window is not bounded */
	int32_t ring_at, ring_used;
};

struct sampler {
	struct sampling_params p;
	int32_t n_vocab;
	uint64_t rng[4];
	struct penalties penalties;
	float *raw;        /* [n_vocab] the logits as they came, when log-probabilities are wanted */
	float *score;      /* [n_vocab] distance from the entropy, when typical_p is on */
	struct sample_edit *edit; /* [cap_edits] for sampler_offload() */
	int32_t cap_edits;
	bool bias_repeats;        /* a token has more than one bias: they are added in order */
	double *block_sum; /* [n_blocks] weight of each block of BLOCK tokens */
	float *block_max;  /* [n_blocks] largest logit of each block, when top_k is on */
	int32_t n_blocks;
};

enum { BLOCK = 256, LANES = 8 };

/* ---- Random numbers: xoshiro256**, its state filled by splitmix64 (Blackman and Vigna, prng.di.unimi.it) ---- */

static uint64_t splitmix64(uint64_t *x)
{
	uint64_t z = *x += 0x9E3779B97F4A7C15ull;
	z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
	z = (z ^ z >> 27) * 0x94D049BB133111EBull;
	return z ^ z >> 31;
}

static uint64_t rotl(uint64_t x, int r)
{
	return x << r | x >> (64 - r);
}

static uint64_t rng_next(uint64_t s[4])
{
	uint64_t result = rotl(s[1] * 5, 7) * 9;
	uint64_t t = s[1] << 17;
	s[2] ^= s[0];
	s[3] ^= s[1];
	s[1] ^= s[2];
	s[0] ^= s[3];
	s[2] ^= t;
	s[3] = rotl(s[3], 45);
	return result;
}

/* Uniform in [0, 1) with 53 bits. */
static double rng_unit(uint64_t s[4])
{
	return (double)(rng_next(s) >> 11) * 0x1p-53;
}

/* ---- Parameters ---- */

void sampling_params_init(struct sampling_params *p)
{
	*p = (struct sampling_params){
		.temperature = 1.0f,
		.top_p = 1.0f,
		.typical_p = 1.0f,
		.repeat_penalty = 1.0f,
		.penalty_last_n = -1,
		.n_logprobs = -1,
	};
}

/* One row per parameter that is a number in a fixed range. */
static const struct range {
	const char *name;
	size_t offset;
	float min, max;
	bool above_min; /* min itself is not allowed */
} ranges[] = {
	{"temperature", offsetof(struct sampling_params, temperature), 0.0f, 1000.0f, false},
	{"top_p", offsetof(struct sampling_params, top_p), 0.0f, 1.0f, false},
	{"min_p", offsetof(struct sampling_params, min_p), 0.0f, 1.0f, false},
	{"typical_p", offsetof(struct sampling_params, typical_p), 0.0f, 1.0f, false},
	{"repeat_penalty", offsetof(struct sampling_params, repeat_penalty), 0.0f, 1000.0f, true},
	{"presence_penalty", offsetof(struct sampling_params, presence_penalty), -2.0f, 2.0f, false},
	{"frequency_penalty", offsetof(struct sampling_params, frequency_penalty), -2.0f, 2.0f, false},
};

enum status sampling_params_check(const struct sampling_params *p, int32_t n_vocab, struct error *err)
{
	for (size_t i = 0; i < sizeof ranges / sizeof ranges[0]; i++) {
		const struct range *r = &ranges[i];
		float v;
		memcpy(&v, (const char *)p + r->offset, sizeof v);
		/* Written so that NaN fails. */
		if (!(v >= r->min && v <= r->max) || (r->above_min && v == r->min))
			return error_set_param(err, STATUS_INVALID, r->name, "%s must be %s %g and at most %g, not %g",
			                       r->name, r->above_min ? "above" : "at least", (double)r->min,
			                       (double)r->max, (double)v);
	}
	if (p->penalty_last_n < -1 || p->penalty_last_n > SAMPLING_MAX_PENALTY_WINDOW)
		return error_set_param(err, STATUS_INVALID, "repeat_last_n",
		                       "repeat_last_n must be between -1 and %d, not %d", SAMPLING_MAX_PENALTY_WINDOW,
		                       p->penalty_last_n);
	if (p->n_logprobs < -1 || p->n_logprobs > SAMPLING_MAX_TOP_LOGPROBS)
		return error_set_param(err, STATUS_INVALID, "top_logprobs",
		                       "top_logprobs must be between 0 and %d, not %d", SAMPLING_MAX_TOP_LOGPROBS,
		                       p->n_logprobs);
	for (size_t i = 0; i < p->n_bias; i++) {
		if (p->bias[i].token < 0 || p->bias[i].token >= n_vocab)
			return error_set_param(err, STATUS_INVALID, "logit_bias",
			                       "logit_bias names token %d, but the vocabulary has %d tokens",
			                       p->bias[i].token, n_vocab);
		if (!(p->bias[i].bias < INFINITY))
			return error_set_param(err, STATUS_INVALID, "logit_bias",
			                       "logit_bias of token %d must be a finite number", p->bias[i].token);
	}
	return STATUS_OK;
}

/* ---- Life ---- */

static bool penalties_init(struct penalties *pen, const struct sampling_params *p, int32_t n_vocab)
{
	bool repeat = p->repeat_penalty != 1.0f && p->penalty_last_n != 0;
	pen->active = repeat || p->presence_penalty != 0.0f || p->frequency_penalty != 0.0f;
	if (!pen->active)
		return true;
	pen->seen = calloc((size_t)n_vocab, sizeof *pen->seen);
	pen->tokens = malloc((size_t)n_vocab * sizeof *pen->tokens);
	if (!pen->seen || !pen->tokens)
		return false;
	if (!repeat || p->penalty_last_n < 0)
		return true;
	pen->last_n = p->penalty_last_n;
	pen->ring = malloc((size_t)pen->last_n * sizeof *pen->ring);
	return pen->ring != NULL;
}

static int compare_tokens(const void *a, const void *b)
{
	const struct logit_bias *x = a, *y = b;
	return (x->token > y->token) - (x->token < y->token);
}

/* Whether a token appears twice; the entries keep their order. False as well when there is no memory to find out. */
static bool each_once(const struct logit_bias *bias, size_t n)
{
	struct logit_bias *sorted = n ? malloc(n * sizeof *sorted) : NULL;
	bool once = n == 0 || sorted;
	if (!sorted)
		return once;
	memcpy(sorted, bias, n * sizeof *sorted);
	qsort(sorted, n, sizeof *sorted, compare_tokens);
	for (size_t i = 1; i < n; i++)
		once = once && sorted[i].token != sorted[i - 1].token;
	free(sorted);
	return once;
}

enum status sampler_create(const struct sampling_params *p, int32_t n_vocab, struct sampler **out)
{
	struct sampler *s = n_vocab > 0 ? calloc(1, sizeof *s) : NULL;
	if (!s)
		return STATUS_NOMEM;
	s->p = *p;
	s->p.bias = NULL;
	s->n_vocab = n_vocab;
	s->bias_repeats = !each_once(p->bias, p->n_bias);
	uint64_t seed = p->seed;
	for (int i = 0; i < 4; i++)
		s->rng[i] = splitmix64(&seed);

	size_t n = (size_t)n_vocab;
	bool ok = penalties_init(&s->penalties, p, n_vocab);
	if (p->n_bias) {
		s->p.bias = malloc(p->n_bias * sizeof *p->bias);
		ok = ok && s->p.bias;
		if (s->p.bias)
			memcpy(s->p.bias, p->bias, p->n_bias * sizeof *p->bias);
	}
	if (p->n_logprobs >= 0)
		ok = ok && (s->raw = malloc(n * sizeof *s->raw));
	if (p->typical_p < 1.0f)
		ok = ok && (s->score = malloc(n * sizeof *s->score));
	s->n_blocks = (int32_t)((n + BLOCK - 1) / BLOCK);
	ok = ok && (s->block_sum = malloc((size_t)s->n_blocks * sizeof *s->block_sum));
	if (p->top_k > 1)
		ok = ok && (s->block_max = malloc((size_t)s->n_blocks * sizeof *s->block_max));
	if (!ok) {
		sampler_destroy(s);
		return STATUS_NOMEM;
	}
	*out = s;
	return STATUS_OK;
}

void sampler_destroy(struct sampler *s)
{
	if (!s)
		return;
	free(s->penalties.seen);
	free(s->penalties.tokens);
	free(s->penalties.ring);
	free(s->p.bias);
	free(s->edit);
	free(s->raw);
	free(s->score);
	free(s->block_sum);
	free(s->block_max);
	free(s);
}

/* ---- Penalties and bias ---- */

void sampler_accept(struct sampler *s, int32_t token, bool generated)
{
	struct penalties *pen = &s->penalties;
	if (!pen->active || token < 0 || token >= s->n_vocab)
		return;
	struct seen *seen = &pen->seen[token];
	if (!seen->listed) {
		seen->listed = true;
		pen->tokens[pen->n_tokens++] = token;
	}
	seen->generated += generated;
	seen->window++;
	if (!pen->last_n)
		return;
	if (pen->ring_used == pen->last_n)
		pen->seen[pen->ring[pen->ring_at]].window--;
	else
		pen->ring_used++;
	pen->ring[pen->ring_at] = token;
	pen->ring_at = pen->ring_at + 1 < pen->last_n ? pen->ring_at + 1 : 0;
}

/*
 * The repeat penalty as in CTRL (arXiv:1909.05858) with llama.cpp's treatment of negative logits: a token in the window
 * is pushed down once, whatever its sign. Presence and frequency penalties as in OpenAI's API: they count the answer's
 * tokens only.
 */
static void apply_penalties(const struct sampler *s, float *logits)
{
	const struct sampling_params *p = &s->p;
	const struct penalties *pen = &s->penalties;
	bool repeat = p->penalty_last_n != 0;
	for (int32_t i = 0; i < pen->n_tokens; i++) {
		const struct seen *seen = &pen->seen[pen->tokens[i]];
		float *x = &logits[pen->tokens[i]];
		if (repeat && seen->window > 0)
			*x = *x > 0.0f ? *x / p->repeat_penalty : *x * p->repeat_penalty;
		if (seen->generated > 0)
			*x -= p->presence_penalty + p->frequency_penalty * (float)seen->generated;
	}
}

static void apply_bias(const struct sampler *s, float *logits)
{
	for (size_t i = 0; i < s->p.n_bias; i++) {
		const struct logit_bias *b = &s->p.bias[i];
		if (b->bias <= -100.0f)
			logits[b->token] = -INFINITY;
		else
			logits[b->token] += b->bias;
	}
}

/* ---- The greedy choice ---- */

/*
 * The largest element, NaN aside; -infinity when there is none above it. Lanes let the compiler use vector registers.
 */
static float max_of(const float *x, int32_t n)
{
	float lane[LANES], best = -INFINITY;
	int32_t i = 0;
	for (int j = 0; j < LANES; j++)
		lane[j] = -INFINITY;
	for (; i + LANES <= n; i += LANES) {
		for (int j = 0; j < LANES; j++)
			lane[j] = x[i + j] > lane[j] ? x[i + j] : lane[j];
	}
	for (int j = 0; j < LANES; j++)
		best = lane[j] > best ? lane[j] : best;
	for (; i < n; i++)
		best = x[i] > best ? x[i] : best;
	return best;
}

/* The first token whose logit is `max`, or 0: all are NaN then. */
static int32_t first_equal(const float *x, int32_t n, float max)
{
	for (int32_t i = 0; i < n; i++) {
		if (x[i] == max)
			return i;
	}
	return 0;
}

/* ---- Weights: probabilities before normalisation ---- */

/*
 * e^x for x <= 0, to about 2e-7 relative, in a form that compilers turn into vector code: x = (k + f) ln 2 with |f| <=
 * 1/2, a polynomial for 2^f (the Taylor series of e^(f ln 2)) and k added to the exponent. Below -87 and of NaN it is
 * 0.
 */
static inline float exp_nonpositive(float x)
{
	/* Masks, as compilers make branches of `?:` here and then no vector code. */
	int32_t bits, in_range = -(int32_t)(x >= -87.0f);
	memcpy(&bits, &x, sizeof bits);
	bits &= in_range;
	memcpy(&x, &bits, sizeof x);
	float k = (x * 1.44269504f + 12582912.0f) -
	          12582912.0f; /* an integer: 1.5 * 2^23 leaves no room for a fraction */
	/* ln 2 in two parts, so that the subtraction loses nothing. */
	float r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
	float e = 0.0416666667f + r * (0.00833333333f + r * 0.00138888889f);
	e = 1.0f + r * (1.0f + r * (0.5f + r * (0.166666667f + r * e)));
	memcpy(&bits, &e, sizeof bits);
	bits = (bits + (int32_t)k * (1 << 23)) & in_range;
	memcpy(&e, &bits, sizeof e);
	return e;
}

/* Replaces logits by weights e^((x - max) / temperature); NaN and -infinity become 0. */
static void weigh(float *x, int32_t n, float max, float temperature)
{
	if (max == INFINITY) {
		for (int32_t i = 0; i < n; i++)
			x[i] = x[i] == INFINITY ? 1.0f : 0.0f;
		return;
	}
	for (int32_t i = 0; i < n; i++)
		x[i] = exp_nonpositive((x[i] - max) / temperature);
}

/* Tokens in block b. */
static int32_t block_tokens(const struct sampler *s, int32_t b)
{
	int32_t left = s->n_vocab - b * BLOCK;
	return left < BLOCK ? left : BLOCK;
}

/* The sum of all weights; keeps the sum of each block for draw(). */
static double sum_weights(struct sampler *s, const float *w)
{
	double total = 0.0;
	for (int32_t b = 0; b < s->n_blocks; b++) {
		int32_t i = b * BLOCK, n = block_tokens(s, b);
		double lane[LANES] = {0}, sum = 0.0;
		int32_t j = 0;
		for (; j + LANES <= n; j += LANES) {
			for (int k = 0; k < LANES; k++)
				lane[k] += (double)w[i + j + k];
		}
		for (; j < n; j++)
			sum += (double)w[i + j];
		for (int k = 0; k < LANES; k++)
			sum += lane[k];
		s->block_sum[b] = sum;
		total += sum;
	}
	return total;
}

/* ---- Filters ---- */

/*
 * The k-th largest of the blocks' largest logits: at least k tokens reach it, and few others do, so that the exact
 * selection has little left to look at.
 */
static float top_k_bound(struct sampler *s, const float *logits, int32_t k)
{
	float bound = INFINITY;
	for (int32_t b = 0; b < s->n_blocks; b++)
		s->block_max[b] = max_of(logits + b * BLOCK, block_tokens(s, b));
	select_best(s->block_max, NULL, s->n_blocks, k, 0.0f, s->block_max, NAN);
	for (int32_t b = 0; b < s->n_blocks; b++)
		bound = s->block_max[b] < bound ? s->block_max[b] : bound;
	return bound;
}

static void filter_top_k(struct sampler *s, float *logits)
{
	int32_t k = s->p.top_k;
	if (k <= 0 || k >= s->n_vocab)
		return;
	if (k <= s->n_blocks / 2) {
		float bound = top_k_bound(s, logits, k);
		for (int32_t i = 0; i < s->n_vocab; i++)
			logits[i] = logits[i] >= bound ? logits[i] : -INFINITY;
	}
	select_best(logits, NULL, s->n_vocab, k, 0.0f, logits, -INFINITY);
}

/* Locally typical sampling (arXiv:2202.00666): keep the tokens whose surprise is nearest to the expected one. */
static void filter_typical(struct sampler *s, float *w)
{
	if (s->p.typical_p >= 1.0f)
		return;
	double total = sum_weights(s, w), log_total = log(total), entropy = 0.0;
	for (int32_t i = 0; i < s->n_vocab; i++) {
		if (w[i] > 0.0f) {
			double surprise = log_total - log((double)w[i]);
			s->score[i] = (float)surprise;
			entropy += (double)w[i] / total * surprise;
		}
	}
	for (int32_t i = 0; i < s->n_vocab; i++)
		s->score[i] = w[i] > 0.0f ? -fabsf(s->score[i] - (float)entropy) : -INFINITY;
	select_best(s->score, w, s->n_vocab, (double)s->p.typical_p * total, 0.0f, w, 0.0f);
}

static void filter_top_p(struct sampler *s, float *w)
{
	if (s->p.top_p >= 1.0f)
		return;
	double total = sum_weights(s, w), rest = (1.0 - (double)s->p.top_p) * total;
	/*
	 * All tokens lighter than rest / n weigh less than `rest` together, so the nucleus is among the others. Half of
	 * it leaves room for rounding.
	 */
	float least = (float)(0.5 * rest / s->n_vocab);
	select_best(w, w, s->n_vocab, (double)s->p.top_p * total, least, w, 0.0f);
}

static void filter_min_p(const struct sampler *s, float *w)
{
	if (s->p.min_p <= 0.0f)
		return;
	float least = s->p.min_p * max_of(w, s->n_vocab);
	for (int32_t i = 0; i < s->n_vocab; i++)
		w[i] = w[i] >= least ? w[i] : 0.0f;
}

/* ---- The draw ---- */

static int32_t draw(struct sampler *s, const float *w)
{
	double total = sum_weights(s, w), target = total * rng_unit(s->rng), at = 0.0;
	int32_t chosen = 0;
	for (int32_t b = 0; b < s->n_blocks; b++) {
		if (s->block_sum[b] <= 0.0)
			continue;
		if (at + s->block_sum[b] <= target && at + s->block_sum[b] < total) {
			at += s->block_sum[b];
			continue;
		}
		/*
		 * A block's sum was rounded in another order, so its last token may end short of the target: it is the
		 * one then.
		 */
		for (int32_t i = b * BLOCK; i < b * BLOCK + block_tokens(s, b); i++) {
			if (w[i] <= 0.0f)
				continue;
			chosen = i;
			at += (double)w[i];
			if (at > target)
				break;
		}
		break;
	}
	return chosen;
}

static int32_t choose(struct sampler *s, float *logits)
{
	if (s->penalties.active)
		apply_penalties(s, logits);
	apply_bias(s, logits);
	float max = max_of(logits, s->n_vocab);
	if (s->p.temperature == 0.0f || s->p.top_k == 1 || max == -INFINITY)
		return first_equal(logits, s->n_vocab, max);
	filter_top_k(s, logits);
	weigh(logits, s->n_vocab, max, s->p.temperature);
	filter_typical(s, logits);
	filter_top_p(s, logits);
	filter_min_p(s, logits);
	return draw(s, logits);
}

static void forbid_others(float *logits, int32_t n, const uint64_t *allowed)
{
	for (int32_t i = 0; i < n; i += 64) {
		uint64_t bits = allowed[i / 64];
		int32_t here = n - i < 64 ? n - i : 64;
		if (bits == UINT64_MAX)
			continue;
		for (int32_t k = 0; k < here; k++)
			if (!(bits >> k & 1))
				logits[i + k] = -INFINITY;
	}
}

void sampler_sample_allowed(struct sampler *s, float *logits, const uint64_t *allowed, struct sample_result *out)
{
	if (s->p.n_logprobs >= 0)
		memcpy(s->raw, logits, (size_t)s->n_vocab * sizeof *logits);
	if (allowed)
		forbid_others(logits, s->n_vocab, allowed);
	out->token = choose(s, logits);
	out->logprob = NAN;
	out->n_top = 0;
	if (s->p.n_logprobs >= 0)
		sampler_logprobs(s->raw, s->n_vocab, out->token, s->p.n_logprobs, out);
}

void sampler_sample(struct sampler *s, float *logits, struct sample_result *out)
{
	sampler_sample_allowed(s, logits, NULL, out);
}

/* ---- A choice made elsewhere ---- */

static bool grow_edits(struct sampler *s, size_t n)
{
	if (n <= (size_t)s->cap_edits)
		return true;
	size_t cap = n + n / 2;
	struct sample_edit *p = cap <= INT32_MAX ? realloc(s->edit, cap * sizeof *p) : NULL;
	if (!p)
		return false;
	s->edit = p;
	s->cap_edits = (int32_t)cap;
	return true;
}

bool sampler_offload(struct sampler *s, struct sample_row *row)
{
	const struct sampling_params *p = &s->p;
	const struct penalties *pen = &s->penalties;
	int32_t n = pen->active ? pen->n_tokens : 0, at = 0;
	if (p->n_logprobs >= 0 || p->typical_p < 1.0f || s->bias_repeats || !grow_edits(s, (size_t)n + p->n_bias))
		return false;
	for (int32_t i = 0; i < n; i++) {
		const struct seen *seen = &pen->seen[pen->tokens[i]];
		float repeat = p->penalty_last_n != 0 && seen->window > 0 ? p->repeat_penalty : 1.0f;
		float minus = seen->generated > 0 ? p->presence_penalty + p->frequency_penalty * (float)seen->generated
		                                  : 0.0f;
		if (repeat != 1.0f || minus != 0.0f)
			s->edit[at++] = (struct sample_edit){pen->tokens[i], repeat, minus, 0.0f};
	}
	int32_t n_first = at;
	for (size_t i = 0; i < p->n_bias; i++) {
		float plus = p->bias[i].bias <= -100.0f ? -INFINITY : p->bias[i].bias;
		s->edit[at++] = (struct sample_edit){p->bias[i].token, 1.0f, 0.0f, plus};
	}
	/* The next number, without using it up. */
	uint64_t rng[4];
	memcpy(rng, s->rng, sizeof rng);
	*row = (struct sample_row){
		.temperature = p->temperature,
		.top_k = p->top_k,
		.top_p = p->top_p,
		.min_p = p->min_p,
		.unit = rng_unit(rng),
		.edit = s->edit,
		.n_first = n_first,
		.n_edits = at,
	};
	return true;
}

int32_t sampler_take(struct sampler *s, int32_t token)
{
	if (token < 0)
		return ~token;
	rng_unit(s->rng);
	return token;
}

/* ---- Log-probabilities ---- */

/* log(sum(e^x)) in double precision. */
static double log_sum_exp(const float *x, int32_t n, float max)
{
	double sum = 0.0;
	for (int32_t i = 0; i < n; i++) {
		double d = (double)x[i] - (double)max;
		/*
		 * What is e^-60 of the largest is below a double's last bit, even a million times over. NaN fails too.
		 */
		if (d > -60.0)
			sum += exp(d);
	}
	return (double)max + log(sum);
}

void sampler_logprobs(const float *logits, int32_t n_vocab, int32_t token, int32_t n_top, struct sample_result *out)
{
	float max = max_of(logits, n_vocab);
	double norm;
	if (isinf(max)) {
		/* Either nothing is possible, or the +infinite ones share everything. */
		int32_t n_equal = 0;
		for (int32_t i = 0; i < n_vocab; i++)
			n_equal += logits[i] == max;
		norm = max > 0.0f ? log((double)n_equal) : INFINITY;
	} else {
		norm = log_sum_exp(logits, n_vocab, max);
	}
	out->token = token;
	out->logprob = -INFINITY;
	out->n_top = 0;
#define LOGPROB(x) (isinf(max) ? ((x) == max ? (float)-norm : -INFINITY) : (float)((double)(x)-norm))
	if (token >= 0 && token < n_vocab && logits[token] > -INFINITY)
		out->logprob = LOGPROB(logits[token]);
	if (n_top > SAMPLING_MAX_TOP_LOGPROBS)
		n_top = SAMPLING_MAX_TOP_LOGPROBS;
	if (n_top > n_vocab)
		n_top = n_vocab;

	/* Insertion into a short sorted list: nearly every token fails the first comparison. */
	for (int32_t i = 0; i < n_vocab && n_top > 0; i++) {
		float x = logits[i];
		if (!(x > -INFINITY) || (out->n_top == n_top && !(x > out->top[n_top - 1].logprob)))
			continue;
		int32_t at = out->n_top < n_top ? out->n_top++ : n_top - 1;
		for (; at > 0 && x > out->top[at - 1].logprob; at--)
			out->top[at] = out->top[at - 1];
		out->top[at] = (struct token_logprob){i, x};
	}
	for (int32_t i = 0; i < out->n_top; i++)
		out->top[i].logprob = LOGPROB(out->top[i].logprob);
#undef LOGPROB
}
