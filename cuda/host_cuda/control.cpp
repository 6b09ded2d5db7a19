/*
 * What tests set: the order of threads, and failures of runtime calls.
 */
#include "cuda/host_cuda/control.h"

#include <stdio.h>
#include <stdlib.h>

#include "cuda/host_cuda/internal.h"

namespace host_cuda {

uint64_t order_state;

/* xorshift64* (Vigna, "An experimental exploration of Marsaglia's xorshift generators, scrambled"). */
uint64_t chance()
{
	order_state ^= order_state >> 12;
	order_state ^= order_state << 25;
	order_state ^= order_state >> 27;
	return (order_state * UINT64_C(0x2545F4914F6CDD1D)) >> 16;
}

static char report[2048];

void set_report(const char *where, const char *text)
{
	snprintf(report, sizeof report, "%s%s", where, text);
	fprintf(stderr, "host_cuda: %s\n", report);
}

/* ---- failures on purpose */

struct failure {
	std::string function;
	uint64_t left; /* calls until it happens */
	cudaError_t error;
};
static std::vector<failure> &failures = *new std::vector<failure>;
static std::map<std::string, uint64_t> &calls = *new std::map<std::string, uint64_t>;

static bool parse_error(const std::string &name, cudaError_t *out)
{
#define X(error_name, value, is_sticky, text)                                                                          \
	if (name == #error_name) {                                                                                     \
		*out = error_name;                                                                                     \
		return true;                                                                                           \
	}
	HOST_CUDA_ERRORS(X)
#undef X
	return false;
}

/* One "function:n:error". */
static bool parse_failure(const std::string &text, failure *f)
{
	const size_t first = text.find(':'), second = text.find(':', first + 1);
	if (first == std::string::npos || second == std::string::npos)
		return false;
	char *end;
	const std::string number = text.substr(first + 1, second - first - 1);
	f->function = text.substr(0, first);
	f->left = strtoull(number.c_str(), &end, 10);
	return *end == '\0' && f->left > 0 && !f->function.empty() && parse_error(text.substr(second + 1), &f->error);
}

static bool add_failures(const std::string &list)
{
	std::vector<failure> parsed;
	for (size_t begin = 0; begin < list.size();) {
		size_t end = list.find(',', begin);
		if (end == std::string::npos)
			end = list.size();
		failure f = {};
		if (!parse_failure(list.substr(begin, end - begin), &f))
			return false;
		parsed.push_back(f);
		begin = end + 1;
	}
	failures.insert(failures.end(), parsed.begin(), parsed.end());
	return true;
}

static void read_environment()
{
	const char *s = getenv("KVASIR_HOST_CUDA_ORDER");
	order_state = s ? strtoull(s, nullptr, 10) : 0;
	s = getenv("KVASIR_HOST_CUDA_DEVICES");
	n_devices = s ? atoi(s) : 1;
	s = getenv("KVASIR_HOST_CUDA_MEMORY");
	total_memory = s ? strtoull(s, nullptr, 10) : static_cast<size_t>(2) << 30;
	s = getenv("KVASIR_HOST_CUDA_FAIL");
	if (s && !add_failures(s)) {
		fprintf(stderr, "host_cuda: KVASIR_HOST_CUDA_FAIL=%s does not parse\n", s);
		abort(); /* a test that would not test */
	}
}

cudaError_t enter(const char *name)
{
	static bool started;
	if (!started) {
		started = true;
		read_environment();
	}
	calls[name]++;
	calls["*"]++;
	if (n_devices <= 0)
		return error(cudaErrorNoDevice);
	for (failure &f : failures)
		if (f.left > 0 && (f.function == name || f.function == "*") && --f.left == 0)
			return error(f.error);
	return sticky;
}

} // namespace host_cuda

using namespace host_cuda;

extern "C" {

void host_cuda_reset(void)
{
	std::lock_guard<std::recursive_mutex> guard(lock);
	streams_reset();
	runtime_reset();
	failures.clear();
	calls.clear();
	report[0] = '\0';
	read_environment();
}

void host_cuda_order(uint64_t seed)
{
	std::lock_guard<std::recursive_mutex> guard(lock);
	order_state = seed;
}

int host_cuda_fail(const char *list)
{
	std::lock_guard<std::recursive_mutex> guard(lock);
	return add_failures(list);
}

void host_cuda_devices(int n)
{
	std::lock_guard<std::recursive_mutex> guard(lock);
	n_devices = n;
}

void host_cuda_memory(size_t bytes)
{
	std::lock_guard<std::recursive_mutex> guard(lock);
	total_memory = bytes;
}

const char *host_cuda_report(void)
{
	return report;
}

uint64_t host_cuda_calls(const char *function)
{
	std::lock_guard<std::recursive_mutex> guard(lock);
	return calls[function];
}

} // extern "C"
