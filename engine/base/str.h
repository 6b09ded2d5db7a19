/* A borrowed run of bytes: not owned, not NUL-terminated, may hold any byte. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

struct str {
	const char *p;
	size_t n;
};

/* For printf("%.*s"): the arguments of one str. */
#define STR_ARG(s) (int)(s).n, (s).p

static inline struct str str_from(const char *z)
{
	return (struct str){z, strlen(z)};
}

static inline bool str_eq(struct str a, struct str b)
{
	return a.n == b.n && (a.n == 0 || memcmp(a.p, b.p, a.n) == 0);
}

static inline bool str_is(struct str a, const char *z)
{
	return str_eq(a, str_from(z));
}

static inline bool str_starts(struct str a, const char *z)
{
	size_t n = strlen(z);
	return a.n >= n && memcmp(a.p, z, n) == 0;
}
