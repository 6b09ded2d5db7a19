/*
 * The inside of an engine, shared by engine.c (the API), load.c (loading), text_thread.c and worker.c.
 *
 * Way of a command: the loop posts it to the text thread when it needs the template or the tokenizer, else straight to
 * the worker. The text thread turns prompts into tokens and passes generations on. Cancels go both ways: the worker
 * ends what it has, the text thread passes the cancel on behind the request it may still be working at. Answers are
 * events.
 *
 * Lock rules: `lock` covers `stats` and `usage`. Everything under "loaded" is written by the worker before `state`
 * becomes READY (release) and never afterwards; other threads read it after seeing READY (acquire).
 */
#pragma once

#include <pthread.h>
#include <stdatomic.h>

#include "engine/backend.h"
#include "engine/base/mailbox.h"
#include "engine/engine.h"
#include "engine/kv/overflow.h"
#include "engine/kv/pool.h"
#include "engine/kv/prefix.h"
#include "engine/kv/tiers.h"
#include "engine/model/forward.h"
#include "engine/model/gguf.h"
#include "engine/text/grammar_match.h"
#include "engine/text/template.h"
#include "engine/text/tokenizer.h"

enum {
	ENGINE_DEFAULT_MAX_RUNNING = 32,
	ENGINE_DEFAULT_MAX_QUEUE = 1024,
	ENGINE_DEFAULT_STEP_TOKENS = 512,
	ENGINE_DEFAULT_MAX_SESSIONS = 10000,
};

enum command_type {
	COMMAND_GENERATE,
	COMMAND_CANCEL,
	COMMAND_HURRY,
	COMMAND_TOKENIZE,
	COMMAND_TOKENIZE_CHAT,
	COMMAND_DETOKENIZE,
	COMMAND_SPLIT,
	COMMAND_SESSION_CREATE,
	COMMAND_SESSION_GET,
	COMMAND_SESSION_HEARTBEAT,
	COMMAND_SESSION_WATCH,
	COMMAND_SESSION_DELETE,
	COMMAND_SESSION_LIST,
	COMMAND_KV_REPORT,
	COMMAND_SESSION_EXPORT,
	COMMAND_EXPORT_NEXT,
	COMMAND_SESSION_IMPORT,
	COMMAND_IMPORT_DATA,
	COMMAND_TENANT,
	COMMAND_WAKE, /* from the disk tier: something has arrived */
	COMMAND_STOP,
};

struct command {
	struct list link;
	enum command_type type;
	uint64_t id;
	int64_t submitted_ns;
	bool in_flight;                 /* GENERATE: counted by flight_begin(); its answer ends that */
	int32_t tenant;                 /* GENERATE, SESSION_*, KV_REPORT */
	struct engine_request *request; /* GENERATE */
	struct token_buf tokens;        /* GENERATE behind the text thread; DETOKENIZE */
	char *text;                     /* TOKENIZE, IMPORT_DATA */
	size_t text_n;
	unsigned tokenize_flags;
	struct splitting *splitting;    /* SPLIT */
	struct arena *arena;            /* TOKENIZE_CHAT */
	struct value *chat;
	struct engine_session_params session; /* SESSION_*; its id for all but LIST */
	struct engine_session_page page; /* SESSION_LIST, KV_REPORT */
	struct engine_tenant set;       /* TENANT */
	struct engine_event *reply;     /* made at submission, so that an answer cannot fail for want of memory */
};

struct engine {
	struct engine_options options; /* with its strings copied and its defaults filled in */
	const struct clock *clock;
	_Atomic uint64_t next_id;
	_Atomic int32_t n_in_flight;   /* generations between submit and their terminal event */
	struct {
		_Atomic int32_t n_in_flight;
		_Atomic int32_t max_requests; /* 0: no limit */
		_Atomic uint64_t refused;
	} tenants[ENGINE_MAX_TENANTS];

	struct mailbox text_box, worker_box, events;
	pthread_t text_thread, worker_thread;

	_Atomic int state; /* enum engine_state */
	struct error load_error;

	/* loaded */
	struct gguf *gguf;
	struct tokenizer *tokenizer;
	struct grammar_vocab *words; /* the same vocabulary, for answers that a grammar constrains */
	struct template *template;   /* NULL: see info.chat_template_error */
	char *template_source;
	struct error template_error;
	struct backend *backend;
	struct model *model;
	struct kv_layout layout;
	struct kv_pool *pool;
	struct kv_prefix *prefix;
	struct kv_tiers *tiers;      /* NULL: none */
	struct kv_overflow *overflow; /* NULL: none */
	struct kv_key identity;      /* of all that KV depends on but salts */
	_Atomic bool wake_sent;      /* a WAKE is in worker_box */
	struct kv_root root;         /* what pages are indexed under, without a salt */
	char scheme_text[96];        /* what root.scheme points to */
	char rope_text[320];         /* what root.rope points to */
	struct rope_choice rope;     /* what options.rope_scaling says */
	int32_t max_outputs;
	struct engine_info info;
	char *model_name, *file_name; /* what info points to */
	struct backend_info backend_info;

	pthread_mutex_t lock;
	struct engine_stats stats; /* under lock; published by the worker, and so is usage */
	int64_t census_ms;         /* when stats.kv was counted; under lock */
	struct engine_tenant_usage usage[ENGINE_MAX_TENANTS]; /* [n_usage] */
	int32_t n_usage;
};

/* choice: what was asked for. */
void engine_rope_describe(const struct model_params *p, const struct rope_choice *choice, struct engine_rope *out);
/* How many rows of a step may want logits. */
int32_t engine_max_outputs(int32_t max_running, int32_t step_tokens);
/* One part in so many of a narrow cache is for pages that are kept wide as well. */
enum { ENGINE_WIDE_SHARE = 6 };
/*
 * The pages of a cache of so many bytes, with or without bounds, and how many of them can have a wide copy (0 unless
 * the layout is narrow).
 */
void engine_split_kv(const struct kv_layout *layout, bool bounds, uint64_t bytes, uint64_t *n_pages, uint64_t *n_wide);
/*
 * Loads everything the options ask for, in the worker's thread. On failure what was loaded stays for engine_unload().
 */
enum status engine_load(struct engine *e, struct error *err);
void engine_unload(struct engine *e);

/* The threads' main functions; each ends at COMMAND_STOP. */
void *text_thread_main(void *engine);
void *worker_thread_main(void *engine);

/* t may be NULL. */
void engine_tiers_describe(const struct kv_tiers *t, struct engine_tiers *out);
void engine_overflow_describe(const struct kv_overflow *o, struct engine_overflow *out);
/* A generation of the tenant has ended: what engine_submit() counted. */
void flight_end(struct engine *e, int32_t tenant);
/* Frees a command and all it still owns, its reply included. */
void command_destroy(struct command *c);
/*
 * Ends a command with its reply as it stands, or with an ERROR in its place, and frees the command. The event goes to
 * the end of `out`; the caller hands it over with mailbox_post_all(&e->events, out).
 */
void command_answer(struct engine *e, struct command *c, struct list *out);
void command_fail(struct engine *e, struct command *c, const struct error *err, struct list *out);
