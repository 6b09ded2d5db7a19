/* How many threads are worth having: see threads_default_count(). */
#include "engine/cpu/threads.h"

#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Reads the first line of a small file without its newline; false when there is none. */
static bool read_line(const char *path, char *out, size_t n)
{
	FILE *f = fopen(path, "re");
	if (!f)
		return false;
	bool ok = fgets(out, (int)n, f) != NULL;
	fclose(f);
	if (ok)
		out[strcspn(out, "\n")] = '\0';
	return ok;
}

/* The lowest CPU of a list such as "3,7" or "0-1" that is in `set`, or -1. */
static int first_allowed(const char *list, const cpu_set_t *set)
{
	for (const char *p = list; *p;) {
		char *end;
		long from = strtol(p, &end, 10), to = from;
		if (end == p)
			break;
		if (*end == '-')
			to = strtol(end + 1, &end, 10);
		for (long cpu = from; cpu >= 0 && cpu <= to && cpu < CPU_SETSIZE; cpu++)
			if (CPU_ISSET((int)cpu, set))
				return (int)cpu;
		p = *end == ',' ? end + 1 : "";
	}
	return -1;
}

static int count_cores(void)
{
	cpu_set_t set;
	CPU_ZERO(&set);
	if (sched_getaffinity(0, sizeof set, &set) != 0) {
		long n = sysconf(_SC_NPROCESSORS_ONLN);
		return n > 0 && n < CPU_SETSIZE ? (int)n : 1;
	}
	int n = 0;
	for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
		if (!CPU_ISSET(cpu, &set))
			continue;
		char path[96], list[256];
		snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
		/* A core counts at its lowest allowed hardware thread. */
		if (!read_line(path, list, sizeof list) || first_allowed(list, &set) == cpu)
			n++;
	}
	return n > 0 ? n : 1;
}

/* CPUs that a quota of `quota` per `period` is worth, rounded up; 0 when there is no limit. */
static int quota_cpus(double quota, double period)
{
	if (quota <= 0 || period <= 0)
		return 0;
	double n = quota / period;
	return n >= CPU_SETSIZE ? 0 : (int)n + (n > (int)n);
}

static int min_limit(int a, int b)
{
	if (a == 0 || b == 0)
		return a + b;
	return a < b ? a : b;
}

/* cgroup v2: cpu.max of this process's group and of every group above it; the smallest holds. */
static int cgroup2_limit(void)
{
	char line[512], dir[640], path[704], value[64];
	FILE *f = fopen("/proc/self/cgroup", "re");
	if (!f)
		return 0;
	dir[0] = '\0';
	while (fgets(line, sizeof line, f)) {
		line[strcspn(line, "\n")] = '\0';
		if (strncmp(line, "0::", 3) == 0)
			snprintf(dir, sizeof dir, "/sys/fs/cgroup%s", line + 3);
	}
	fclose(f);
	int limit = 0;
	while (strlen(dir) >= strlen("/sys/fs/cgroup")) {
		double quota, period;
		snprintf(path, sizeof path, "%s/cpu.max", dir);
		if (read_line(path, value, sizeof value) && sscanf(value, "%lf %lf", &quota, &period) == 2)
			limit = min_limit(limit, quota_cpus(quota, period));
		*strrchr(dir, '/') = '\0';
	}
	return limit;
}

static int cgroup1_limit(void)
{
	char quota[64], period[64];
	if (!read_line("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", quota, sizeof quota) ||
	    !read_line("/sys/fs/cgroup/cpu/cpu.cfs_period_us", period, sizeof period))
		return 0;
	return quota_cpus(atof(quota), atof(period));
}

int threads_default_count(void)
{
	int cores = count_cores();
	int limit = min_limit(cgroup2_limit(), cgroup1_limit());
	return limit > 0 && limit < cores ? limit : cores;
}
