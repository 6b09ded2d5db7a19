#include "tests/gpu/compare.h"

#include <stdarg.h>

#include "tests/support/block_halves.h"

static struct {
	char name[64];
	size_t n;
	double worst; /* error as a share of its bound */
	bool open;
	int passed;
} row;

void row_begin(const char *name)
{
	snprintf(row.name, sizeof row.name, "%s", name);
	row.n = 0;
	row.worst = 0;
	row.open = true;
}

void row_end(void)
{
	printf("%-28s %10zu  %9.3f  ok\n", row.name, row.n, row.worst);
	fflush(stdout);
	row.open = false;
	row.passed++;
}

int rows_passed(void)
{
	return row.passed;
}

void give_up(const char *format, ...)
{
	va_list args;
	if (row.open)
		printf("%-28s %10zu  %9.3f  WRONG\n", row.name, row.n, row.worst);
	va_start(args, format);
	vprintf(format, args);
	va_end(args);
	printf("\n%d passed, 1 failed, 0 skipped\n", row.passed);
	exit(1);
}

void must(enum status s, const char *what)
{
	if (s != STATUS_OK)
		give_up("%s: %s", what, status_text(s));
}

void row_result(double error, double bound, const char *format, ...)
{
	row.n++;
	if (error <= bound) {
		double share = bound > 0 ? error / bound : 0;
		row.worst = share > row.worst ? share : row.worst;
		return;
	}
	char where[256];
	va_list args;
	va_start(args, format);
	vsnprintf(where, sizeof where, format, args);
	va_end(args);
	row.worst = error / bound;
	give_up("%s: %s: off by %g, %g is allowed", row.name, where, error, bound);
}

void row_results(const struct operand *o, double tolerance, const char *where)
{
	float *got, *want;
	operand_results(o, &got, &want);
	for (size_t i = 0; i < o->n; i++)
		row_result(fabs((double)got[i] - want[i]), tolerance * (1 + fabs(want[i])),
		           "%s, element %zu: %g instead of %g", where, i, got[i], want[i]);
	free(got);
	free(want);
}

/* xorshift64* (Vigna, "An experimental exploration of Marsaglia's xorshift generators, scrambled"). */
uint64_t random_bits(struct pair *p)
{
	p->seed ^= p->seed >> 12;
	p->seed ^= p->seed << 25;
	p->seed ^= p->seed >> 27;
	return p->seed * 0x2545F4914F6CDD1Dull;
}

int32_t random_int(struct pair *p, int32_t from, int32_t to)
{
	return from + (int32_t)((random_bits(p) >> 33) % (uint64_t)(to - from + 1));
}

/* Roughly normal: the sum of four uniform numbers, scaled. */
float random_normal(struct pair *p)
{
	uint64_t bits = random_bits(p);
	int32_t sum = 0;
	for (int i = 0; i < 4; i++)
		sum += (int32_t)(bits >> (16 * i) & 0xffff) - 32768;
	return (float)sum / 37837.0f;
}

static void random_element(struct pair *p, enum quant_type type, uint8_t *to)
{
	float value = random_normal(p) * 0.05f;
	uint32_t bits;
	uint16_t half = quant_float_to_half(value);
	memcpy(&bits, &value, 4);
	if (type == QUANT_F32)
		memcpy(to, &bits, 4);
	else if (type == QUANT_F16)
		memcpy(to, &half, 2);
	else
		memcpy(to, (uint8_t *)&bits + 2, 2);
}

static void random_block(struct pair *p, const struct quant_format *f, uint8_t *to)
{
	int scale, min;
	for (uint32_t i = 0; i < f->block_bytes; i += 8) {
		uint64_t bits = random_bits(p);
		memcpy(to + i, &bits, f->block_bytes - i < 8 ? f->block_bytes - i : 8);
	}
	block_halves(f->type, &scale, &min);
	uint16_t half = quant_float_to_half((random_normal(p) + 1.5f) * 0.003f);
	memcpy(to + scale, &half, 2);
	half = quant_float_to_half(random_normal(p) * 0.01f);
	if (min >= 0)
		memcpy(to + min, &half, 2);
}

void *random_matrix(struct pair *p, const struct quant_format *f, int64_t n_in, int64_t n_out)
{
	/* A large matrix repeats a stretch of random blocks, an odd number of them, so that no two rows are alike. */
	size_t n_blocks = (size_t)(n_in / f->block_elems * n_out), drawn = n_blocks < 300007 ? n_blocks : 300007;
	uint8_t *data = malloc(n_blocks * f->block_bytes);
	if (!data)
		give_up("no memory for a matrix");
	for (size_t i = 0; i < drawn; i++) {
		if (f->block_elems == 1)
			random_element(p, f->type, data + i * f->block_bytes);
		else
			random_block(p, f, data + i * f->block_bytes);
	}
	for (size_t i = drawn; i < n_blocks; i += drawn) {
		size_t n = n_blocks - i < drawn ? n_blocks - i : drawn;
		memcpy(data + i * f->block_bytes, data, n * f->block_bytes);
	}
	return data;
}

struct batch *plain_batch(int32_t n_rows)
{
	static int32_t token[64], position[64], table[64 / KV_PAGE_TOKENS];
	static struct batch_seq seq;
	static struct batch batch;
	for (int32_t i = 0; i < 64; i++) {
		token[i] = 0;
		position[i] = i;
		table[i / KV_PAGE_TOKENS] = i / KV_PAGE_TOKENS;
	}
	seq = (struct batch_seq){0, n_rows, 0, table, (n_rows + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS};
	batch = (struct batch){n_rows, token, position, 1, &seq, 0, NULL};
	return &batch;
}

static float *array_on(struct backend *b, const float *values, size_t n)
{
	void *p;
	must(b->ops->mem_alloc(b, n * sizeof(float), &p), "mem_alloc");
	must(b->ops->mem_write(b, p, values, n * sizeof(float)), "mem_write");
	return p;
}

struct operand operand_copy(struct pair *p, const float *values, size_t n)
{
	struct operand o = {.p = p, .n = n, .host = malloc(n * sizeof(float))};
	if (!o.host)
		give_up("no memory for %zu numbers", n);
	memcpy(o.host, values, n * sizeof(float));
	o.device = array_on(p->device, values, n);
	o.reference = array_on(p->reference, values, n);
	return o;
}

struct operand operand_new(struct pair *p, size_t n, float scale)
{
	float *values = malloc(n * sizeof *values);
	if (!values)
		give_up("no memory for %zu numbers", n);
	for (size_t i = 0; i < n; i++)
		values[i] = random_normal(p) * scale;
	struct operand o = operand_copy(p, values, n);
	free(values);
	return o;
}

void operand_free(struct operand *o)
{
	o->p->device->ops->mem_free(o->p->device, o->device, o->n * sizeof(float));
	o->p->reference->ops->mem_free(o->p->reference, o->reference, o->n * sizeof(float));
	free(o->host);
}

void operand_results(const struct operand *o, float **got, float **want)
{
	size_t bytes = o->n * sizeof(float);
	*got = malloc(bytes);
	*want = malloc(bytes);
	if (!*got || !*want)
		give_up("no memory for results");
	must(o->p->device->ops->mem_read(o->p->device, *got, o->device, bytes), "mem_read");
	must(o->p->reference->ops->mem_read(o->p->reference, *want, o->reference, bytes), "mem_read");
}

static void choose_elements(struct pair *p, enum quant_type device, enum quant_type reference)
{
	must(p->device->ops->choose_kv(p->device, device), "choose_kv");
	must(p->reference->ops->choose_kv(p->reference, reference), "choose_kv");
}

const char *choose_other_elements(struct pair *p, struct own_elements *own)
{
	struct backend_info info[2];
	if (!p->device->ops->choose_kv || !p->reference->ops->choose_kv)
		return NULL;
	p->device->ops->info(p->device, &info[0]);
	p->reference->ops->info(p->reference, &info[1]);
	*own = (struct own_elements){{info[0].kv_type, info[1].kv_type}};
	enum quant_type other = info[0].kv_type == QUANT_F16 ? QUANT_BF16 : QUANT_F16;
	choose_elements(p, other, other);
	return other == QUANT_BF16 ? ", bf16" : ", f16";
}

void choose_own_elements(struct pair *p, const struct own_elements *own)
{
	choose_elements(p, own->type[0], own->type[1]);
}
