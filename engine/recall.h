/*
 * What comes back to a request's window of what its kv has in an attic (kv/attic.h), and when: the part of a request
 * that is about it. sched_recall.c says how.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "engine/backend.h"
#include "engine/kv/seq.h"

struct request;

struct recall {
	int32_t n_stops;         /* positions at which it was to be chosen, so far: see recall_next() */
	struct page_probe probe; /* by the rows before the next one */
	int32_t cap_probe;       /* of probe.score */
	/* [n_lacking] of the attic's pages, ascending, that have been chosen and are to be computed again, ... */
	int32_t *lacking;
	int32_t n_lacking;
	struct kv_seq again;  /* ... by this one, which has read the conversation so far */
	int32_t again_from;   /* and that the index knew so many tokens of */
	int32_t spent_tokens; /* rows that this has taken since the request was admitted */
	int32_t n_choices, again_pages, again_tokens; /* for its usage */
};

void recall_free(struct recall *c);
/*
 * The position in front of which it is chosen next what comes back: that of the last token of its prompt, which its
 * answer begins with, and from there on each kv_policy.choose_tokens. INT32_MAX: never.
 */
int32_t recall_next(const struct request *r);
/* From which position on rows have a say in that: see KV_POLICY_PROBE_PROMPT. */
int32_t recall_probes_from(const struct request *r);
/* Whether those at its next positions have. */
bool recall_probes(const struct request *r);
/* Whether it waits for pages that are computed again. */
bool recall_under_way(const struct request *r);
