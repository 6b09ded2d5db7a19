/*
 * The leak ledger: who holds each reference on each page, for builds that look for leaks (-Dkv_ledger). The pool tells
 * it of every change; it answers who holds a page and whether somebody does. In other builds all of it is empty and
 * costs nothing.
 *
 * A ledger that finds no memory for an entry says so (kv_ledger_complete) and stops judging: the pool goes on.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/buf.h"
#include "engine/base/status.h"
#include "engine/kv/holder.h"

#ifdef KVASIR_KV_LEDGER

struct kv_ledger_entry {
	struct kv_holder holder;
	const char *where; /* the function that took the reference; static */
	int32_t next;      /* of the same page, or of the free ones; -1: none */
};

struct kv_ledger {
	struct kv_ledger_entry *entries; /* [cap] */
	int32_t *first;                  /* [n_pages] its newest entry, or -1 */
	int32_t n_pages, cap, first_free;
	bool incomplete;
};

/* NOMEM. */
enum status kv_ledger_init(struct kv_ledger *l, int32_t n_pages);
void kv_ledger_free(struct kv_ledger *l);
void kv_ledger_add(struct kv_ledger *l, int32_t page, struct kv_holder holder, const char *where);
/* Takes the newest reference of `holder` out; false when there is none. */
bool kv_ledger_remove(struct kv_ledger *l, int32_t page, struct kv_holder holder);
/* Whether every reference has an entry. */
bool kv_ledger_complete(const struct kv_ledger *l);
/* Who holds a page, newest first: at most max of them go to out. Returns how many there are. */
size_t kv_ledger_holders(const struct kv_ledger *l, int32_t page, struct kv_holder *out, size_t max);
/* Appends a line for each holder with its pages and where it took them, as many as a person will read. */
void kv_ledger_report(const struct kv_ledger *l, struct buf *out);

#else

struct kv_ledger {};

static inline enum status kv_ledger_init(struct kv_ledger *l, int32_t n_pages)
{
	(void)l, (void)n_pages;
	return STATUS_OK;
}

static inline void kv_ledger_free(struct kv_ledger *l)
{
	(void)l;
}

static inline void kv_ledger_add(struct kv_ledger *l, int32_t page, struct kv_holder holder, const char *where)
{
	(void)l, (void)page, (void)holder, (void)where;
}

static inline bool kv_ledger_remove(struct kv_ledger *l, int32_t page, struct kv_holder holder)
{
	(void)l, (void)page, (void)holder;
	return true;
}

static inline bool kv_ledger_complete(const struct kv_ledger *l)
{
	(void)l;
	return false;
}

static inline size_t kv_ledger_holders(const struct kv_ledger *l, int32_t page, struct kv_holder *out, size_t max)
{
	(void)l, (void)page, (void)out, (void)max;
	return 0;
}

static inline void kv_ledger_report(const struct kv_ledger *l, struct buf *out)
{
	(void)l, (void)out;
}

#endif
