/*
 * A document that is longer than a context, answered for in parts: it is cut (engine_split()), an instruction is
 * carried out on each part, and the answers are put together, in groups that fit a part, until there is one. Whoever
 * owns it runs the requests that it gives out, some of them at a time, and tells it of their tokens and ends; it knows
 * neither a transport nor a loop.
 *
 * Bounded: a group has two answers or more, as its limits are checked beforehand, so that n parts take fewer than 2n
 * requests in at most log2(n) + 2 rounds.
 */
#pragma once

#include "engine/engine.h"

struct document_params {
	struct str instruction, reduce_instruction; /* p NULL: a general one */
	int32_t max_chunk_tokens;  /* 0: what the context leaves, up to a general size */
	int32_t max_output_tokens; /* of each answer; 0: a general one */
	int32_t overlap_permille;  /* -1: a general one */
	int32_t parallel;          /* requests at a time; 0: a general one */
	double temperature;
	uint64_t seed;
	int32_t tenant;
	const char *cache_salt;    /* or NULL */
	bool split_only;           /* nothing is asked: no instruction is needed, and no room for answers */
};

struct document;

/* Copies what it needs. INVALID names the field that does not fit the model's context or another field. */
enum status document_create(const struct document_params *params, const struct engine_info *info, struct document **out,
                            struct error *err);
void document_destroy(struct document *d); /* NULL is allowed */

/*
 * How it is to be cut; then what came of it: takes the text and the parts out of a SPLIT event. INVALID when there is
 * no text; NOMEM.
 */
void document_split(const struct document *d, struct engine_split_params *out);
enum status document_begin(struct document *d, struct engine_event *split, struct error *err);
/* The same for parts that were found elsewhere; takes ownership of chunks. */
enum status document_begin_with(struct document *d, struct buf *text, struct engine_chunk *chunks, size_t n,
                                struct error *err);

/*
 * The next request that may run now, and the call that it is for; *r is NULL when others have to end first. At most
 * `parallel` calls are given out and not yet ended.
 */
enum status document_next(struct document *d, struct engine *e, struct engine_request **r, size_t *call,
                          struct error *err);
/* A TOKEN and the DONE of a call. NOMEM. */
enum status document_token(struct document *d, size_t call, const struct engine_event *ev);
enum status document_done(struct document *d, size_t call, const struct engine_event *ev);
/* All is done: there is one answer. */
bool document_ended(const struct document *d);

/* Whether the call's answer is the document's. */
bool document_is_last(const struct document *d, size_t call);
size_t document_n_chunks(const struct document *d);
size_t document_n_calls(const struct document *d); /* so far */
/* The document's answer, once it has ended. */
struct str document_output(const struct document *d);

/*
 * Append JSON: [{"index","start","fresh","end","tokens","cut"}...], "start" and so on in bytes; with `text`, each
 * part's text as well.
 */
void document_write_chunks(const struct document *d, bool text, struct buf *out);
/*
 * {"level","index","of":[first,last],"output","finish_reason"}: level 0 are parts, and answers of the level below from
 * there on.
 */
void document_write_call(const struct document *d, size_t call, struct buf *out);
/*
 * "output":...,"finish_reason":...,"chunks":[...],"reductions":[...],"coherence":{...},"usage":{...}, once it has
 * ended. NOMEM.
 */
enum status document_write_result(const struct document *d, struct buf *out);
