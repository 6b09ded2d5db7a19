/*
 * compare-ops: every operation of a device against another's, over random shapes and every format, and one table of how
 * far apart they are. The first wrong number ends it.
 *
 *   compare-ops DEVICE [--reference NAME] [--seed N] [--large] [--threads N] [--only NAME]
 *
 * --only takes one of the tables' parts: rows, products, attention, chunks, choice, mass, plus, probe, far.
 *
 * The column "error" is the worst error as a share of what rounding explains. The last line is "N passed, N failed, 0
 * skipped"; the exit status is 77 when the machine has no such device. --large takes the sizes of real models: seconds
 * on a GPU, hours on an emulated one.
 */
#include "tests/gpu/compare.h"

static struct backend *open_device(const char *name, int32_t n_threads)
{
	struct backend_options o = {.device = name, .n_threads = n_threads};
	struct backend *b;
	struct error err = {0};
	enum status s = backend_create(&o, &b, &err);
	if (s == STATUS_UNSUPPORTED) {
		printf("skipped: %s\n", err.message);
		exit(77);
	}
	if (s != STATUS_OK)
		give_up("%s: %s", name, err.message);
	return b;
}

static bool rounds_to_halves(const char *device)
{
	return strncmp(device, "cuda", 4) == 0;
}

static bool rounds_to_bytes(const char *device)
{
	return strncmp(device, "cpu", 3) == 0 && strcmp(device, "cpu-reference") != 0;
}

static const struct {
	const char *name;
	void (*compare)(struct pair *p);
} parts[] = {
	{"rows", compare_rows},	    {"products", compare_products}, {"attention", compare_attention},
	{"chunks", compare_chunks}, {"choice", compare_choice},	    {"mass", compare_mass},
	{"plus", compare_plus},	    {"probe", compare_probe},	    {"far", compare_far},
};

int main(int argc, char **argv)
{
	struct pair p = {.seed = 1};
	const char *device = NULL, *reference = "cpu-reference", *only = NULL;
	int32_t threads = 0;
	for (int i = 1; i < argc; i++) {
		const char *value = i + 1 < argc ? argv[i + 1] : NULL;
		if (strcmp(argv[i], "--large") == 0) {
			p.large = true;
		} else if (strcmp(argv[i], "--reference") == 0 && value) {
			reference = argv[++i];
		} else if (strcmp(argv[i], "--seed") == 0 && value) {
			p.seed = strtoull(argv[++i], NULL, 10) | 1;
		} else if (strcmp(argv[i], "--threads") == 0 && value) {
			threads = (int32_t)strtol(argv[++i], NULL, 10);
		} else if (strcmp(argv[i], "--only") == 0 && value) {
			only = argv[++i];
		} else if (argv[i][0] != '-' && !device) {
			device = argv[i];
		} else {
			fprintf(stderr, "usage: compare-ops DEVICE [--reference NAME] [--seed N] [--large]"
					" [--threads N] [--only NAME]\n");
			return 2;
		}
	}
	if (!device)
		return fprintf(stderr, "compare-ops: which device?\n"), 2;
	p.device = open_device(device, threads);
	p.reference = open_device(reference, threads);
	/*
	 * CUDA rounds activations to halves, the fast CPU backends to eight bits. Halves of weights count as much
	 * again.
	 */
	if (rounds_to_halves(device) || rounds_to_halves(reference))
		p.element_error = 0x1p-10f;
	if (rounds_to_bytes(device) || rounds_to_bytes(reference))
		p.group_error = 1.0f / 254;
	struct backend_info info;
	p.device->ops->info(p.device, &info);
	printf("%s (%s) against %s, seed %llu\n\n%-28s %10s  %9s\n", info.name, info.detail, reference,
	       (unsigned long long)p.seed, "operation", "results", "error");
	for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
		if (!only || strcmp(only, parts[i].name) == 0)
			parts[i].compare(&p);
	}
	p.device->ops->destroy(p.device);
	p.reference->ops->destroy(p.reference);
	printf("\n%d passed, 0 failed, 0 skipped\n", rows_passed());
	return 0;
}
