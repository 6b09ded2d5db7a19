#include "engine/backend.h"

#include <stdlib.h>
#include <string.h>

#include "cuda/cuda.h"
#include "engine/cpu/cpu.h"

/* How wide an element of a KV page is; 0 when the type has no KV form. */
static size_t kv_element_bytes(enum quant_type type)
{
	return type == QUANT_F16 || type == QUANT_BF16 ? 2 : 0;
}

enum status kv_layout_init(struct kv_layout *layout, int32_t n_layer, int32_t n_head_kv, int32_t head_dim,
                           enum quant_type type)
{
	size_t element = kv_element_bytes(type), bytes;
	if (element == 0 || n_layer <= 0 || n_head_kv <= 0 || head_dim <= 0)
		return STATUS_INVALID;
	/* Half the range, so that rounding up to a stride cannot overflow either. */
	if (__builtin_mul_overflow(2 * element * KV_PAGE_TOKENS, (size_t)n_layer, &bytes) ||
	    __builtin_mul_overflow(bytes, (size_t)n_head_kv, &bytes) ||
	    __builtin_mul_overflow(bytes, (size_t)head_dim, &bytes) || bytes > SIZE_MAX / 2)
		return STATUS_INVALID;
	*layout = (struct kv_layout){
	        .n_layer = n_layer,
	        .n_head_kv = n_head_kv,
	        .head_dim = head_dim,
	        .page_tokens = KV_PAGE_TOKENS,
	        .type = type,
	        .page_bytes = bytes,
	        .page_stride = (bytes + 4095) & ~(size_t)4095,
	};
	return STATUS_OK;
}

enum status kv_layout_for(const struct backend *b, struct kv_layout *layout, int32_t n_layer, int32_t n_head_kv,
                          int32_t head_dim)
{
	struct backend_info info;
	b->ops->info(b, &info);
	return kv_layout_init(layout, n_layer, n_head_kv, head_dim, info.kv_type);
}

void kv_layout_narrow(struct kv_layout *l, enum kv_form form)
{
	size_t vectors = 2 * (size_t)l->n_layer * (size_t)l->n_head_kv * KV_PAGE_TOKENS;
	l->form = form;
	l->page_bytes = vectors * ((size_t)l->head_dim + sizeof(float));
	l->page_stride = (l->page_bytes + 4095) & ~(size_t)4095;
}

struct kv_layout kv_layout_of_layer(const struct kv_layout *l)
{
	struct kv_layout one = *l;
	one.n_layer = 1;
	one.page_bytes = one.page_stride = l->page_bytes / (size_t)l->n_layer;
	one.wide = NULL;
	one.watch = NULL;
	return one;
}

const char *kv_form_name(enum kv_form form)
{
	static const char *const names[KV_N_FORMS] = {"f16", "fp8_e4m3", "int8"};
	return (unsigned)form < KV_N_FORMS ? names[form] : NULL;
}

bool kv_form_find(const char *name, enum kv_form *out)
{
	for (int i = 0; i < KV_N_FORMS; i++) {
		if (strcmp(kv_form_name((enum kv_form)i), name) == 0) {
			*out = (enum kv_form)i;
			return true;
		}
	}
	return false;
}

bool kv_choice_find(const char *name, struct kv_choice *out)
{
	*out = (struct kv_choice){.form = KV_FORM_F16, .own = true};
	if (!name || strcmp(name, "auto") == 0)
		return true;
	if (strcmp(name, "bf16") == 0) {
		*out = (struct kv_choice){.form = KV_FORM_F16, .type = QUANT_BF16};
		return true;
	}
	out->type = QUANT_F16;
	out->own = strcmp(name, "f16") != 0;
	return kv_form_find(name, &out->form);
}

enum status kv_choice_make(struct backend *b, const char *name, struct kv_choice *out, struct error *err)
{
	const struct backend_ops *ops = b->ops;
	struct backend_info device;
	if (!kv_choice_find(name, out))
		return error_set_param(err, STATUS_INVALID, "kv-dtype", "kv-dtype: \"%.64s\" is none of " KV_CHOICES,
		                       name);
	ops->info(b, &device);
	if ((out->form != KV_FORM_F16 && !device.narrow_kv) ||
	    (!out->own && out->type != device.kv_type &&
	     (!ops->choose_kv || ops->choose_kv(b, out->type) != STATUS_OK)))
		return error_set_param(err, STATUS_UNSUPPORTED, "kv-dtype", "the device %s cannot keep KV as %s",
		                       device.name, name);
	return STATUS_OK;
}

#if defined(__x86_64__)
#define X86(create) create
#else
#define X86(create) NULL
#endif
#if defined(__aarch64__)
#define ARM(create) create
#else
#define ARM(create) NULL
#endif

/*
 * Kinds of device, the fastest first. `general` is the name that stands for the first of its kinds this machine can
 * run. A kind with an ordinal is also chosen as "name:N". `create` is NULL when the build lacks the kind (see
 * cuda/cuda.h).
 */
static const struct device_kind {
	const char *name;
	const char *general;
	bool has_ordinal;
	/* `number` is the ordinal, or else the number of threads. UNSUPPORTED when the machine lacks something. */
	enum status (*create)(int32_t number, struct backend **out, struct error *err);
} device_kinds[] = {
	{"cpu-amx", NULL, false,
         X86(cpu_amx_create)}, /* by name only, as long as no machine with AMX has measured it */
	{"cpu-amx-emulated", NULL, false, X86(cpu_amx_emulated_create)},
	{"cpu-avx512-bf16", "cpu", false, X86(cpu_avx512_bf16_create)},
	{"cpu-avx512", "cpu", false, X86(cpu_avx512_create)},
	{"cpu-avx2", "cpu", false, X86(cpu_avx2_create)},
	{"cpu-neon-dotprod", "cpu", false, ARM(cpu_neon_dotprod_create)},
	{"cpu-neon", "cpu", false, ARM(cpu_neon_create)},
	{"cpu-reference", "cpu", false, cpu_reference_create},
	{"cuda", NULL, true, cuda_create},
	{"cuda-host", NULL, true, cuda_host_create},
};

/* Whether `device` names the kind; its ordinal, 0 when not given. */
static bool names_kind(const char *device, const struct device_kind *kind, int32_t *ordinal)
{
	size_t n = strlen(kind->name);
	char *end;
	*ordinal = 0;
	if (strncmp(device, kind->name, n) != 0)
		return false;
	if (device[n] == '\0')
		return true;
	if (!kind->has_ordinal || device[n] != ':' || device[n + 1] < '0' || device[n + 1] > '9')
		return false;
	long v = strtol(device + n + 1, &end, 10);
	*ordinal = (int32_t)v;
	return *end == '\0' && v <= 1023;
}

enum status backend_create(const struct backend_options *options, struct backend **out, struct error *err)
{
	const char *device = options->device ? options->device : "cpu";
	enum status s = STATUS_NOT_FOUND;
	if (options->n_threads < 0 || options->n_threads > 4096)
		return error_set(err, STATUS_INVALID, "%d threads: must be 0 to 4096", options->n_threads);
	for (size_t i = 0; i < sizeof device_kinds / sizeof device_kinds[0]; i++) {
		const struct device_kind *kind = &device_kinds[i];
		int32_t ordinal;
		if (names_kind(device, kind, &ordinal)) {
			if (!kind->create)
				return error_set(err, STATUS_UNSUPPORTED, "this build has no device \"%s\"",
				                 kind->name);
			return kind->create(kind->has_ordinal ? ordinal : options->n_threads, out, err);
		}
		if (!kind->create || !kind->general || strcmp(device, kind->general) != 0)
			continue;
		s = kind->create(options->n_threads, out, err);
		if (s != STATUS_UNSUPPORTED)
			return s;
	}
	return s == STATUS_UNSUPPORTED ? s : error_set(err, STATUS_INVALID, "unknown device \"%s\"", device);
}
