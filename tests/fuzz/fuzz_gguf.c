/*
 * Any bytes as a GGUF file: either a sentence that says what is wrong, or a reader through which everything can be
 * touched. The walk reads each value by every typed read and each tensor's bytes from end to end, takes the file for a
 * model and reads its parameters, and describes it in both forms.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/utf8.h"
#include "engine/inspect.h"
#include "engine/model/arch.h"
#include "engine/model/gguf.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void expect(int holds)
{
	if (!holds)
		abort();
}

static uint8_t sum(const void *p, size_t n)
{
	const uint8_t *bytes = p;
	uint8_t s = 0;
	for (size_t i = 0; i < n; i++)
		s = (uint8_t)(s + bytes[i]);
	return s;
}

static volatile uint8_t sink;

static void touch_value(const struct gguf *g, const struct gguf_value *v)
{
	char key[65536];
	expect(v->key.n > 0 && v->key.n < sizeof key);
	memcpy(key, v->key.p, v->key.n);
	key[v->key.n] = '\0';
	expect(gguf_find(g, key) == v);

	uint64_t u;
	double d;
	bool b;
	struct str s, *strs;
	float *floats;
	int32_t *ints;
	size_t n;
	struct error err;
	gguf_get_uint(g, key, &u, &err);
	gguf_get_float(g, key, &d, &err);
	gguf_get_bool(g, key, &b, &err);
	if (gguf_get_str(g, key, &s, &err) == STATUS_OK)
		sink = sum(s.p, s.n);
	if (gguf_get_strs(g, key, &strs, &n, &err) == STATUS_OK) {
		for (size_t i = 0; i < n; i++)
			sink = sum(strs[i].p, strs[i].n);
		free(strs);
	}
	if (gguf_get_floats(g, key, &floats, &n, &err) == STATUS_OK)
		free(floats);
	if (gguf_get_ints(g, key, &ints, &n, &err) == STATUS_OK)
		free(ints);
}

static void touch_tensor(const struct gguf_tensor *t, const uint8_t *data, size_t size)
{
	expect(t->data == data + t->offset && t->offset <= size && t->n_bytes <= size - t->offset);
	expect(t->n_elems == t->dim[0] * t->dim[1] * t->dim[2] * t->dim[3]);
	expect(t->n_bytes == t->n_elems / t->format->block_elems * t->format->block_bytes);
	sink = sum(t->data, t->n_bytes);
	float block[256];
	const uint8_t *last = t->data + t->n_bytes - t->format->block_bytes;
	t->format->dequantize(t->data, block, t->format->block_elems);
	t->format->dequantize(last, block, t->format->block_elems);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct gguf *g;
	struct error err = {0};
	enum status st = gguf_open_memory(data, size, &g, &err);
	if (st != STATUS_OK) {
		expect(g == NULL && err.status == st && err.message[0] != '\0');
		return 0;
	}
	expect(gguf_file_bytes(g) == size);
	for (size_t i = 0; i < gguf_n_values(g); i++)
		touch_value(g, gguf_value_at(g, i));
	for (size_t i = 0; i < gguf_n_tensors(g); i++)
		touch_tensor(gguf_tensor_at(g, i), data, size);
	struct model_params params;
	arch_read_params(g, &params, &err);
	for (int json = 0; json < 2; json++) {
		struct buf out = BUF_INIT;
		expect(inspect_gguf(g, "input", json, &out, &err) == STATUS_OK);
		expect(utf8_valid(out.data, out.len));
		buf_free(&out);
	}
	gguf_close(g);
	return 0;
}
