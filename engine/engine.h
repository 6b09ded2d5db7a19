/*
 * The engine, as the server sees it: the only header of engine/ (with base/) that server/ includes.
 *
 * An engine is one loaded model with its workers. A session is one conversation: its tokens, their KV pages and a
 * lifetime. A request is one generation from one prompt. The server submits commands and takes events; both cross
 * threads through mailboxes, and only ids connect them: an event carries the request_id of the command it answers.
 *
 * Threads. Functions marked [any] may be called from any thread; the others belong to the thread that created the
 * engine (the loop). No function here computes or waits, except engine_create(), engine_destroy() and the offline tools
 * at the end.
 *
 * Order. For one generation: PROMPT once, then TOKEN for each token, then exactly one of DONE or ERROR, after which its
 * id is never heard of again. Every other command is answered by exactly one event, but for engine_session_watch(). A
 * failure before the first token is an ERROR with no PROMPT before it.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/arena.h"
#include "engine/base/buf.h"
#include "engine/base/clock.h"
#include "engine/base/list.h"
#include "engine/base/status.h"
#include "engine/base/str.h"
#include "engine/sample/sampler.h"
#include "engine/text/grammar.h"
#include "engine/text/value.h"

struct engine;

enum {
	ENGINE_SESSION_ID_MAX = 64, /* longest session id, in bytes: [A-Za-z0-9_.-] */
	ENGINE_MAX_TENANTS = 256,
	ENGINE_SALT_MAX = 64,       /* longest salt of a tenant, in bytes */
	ENGINE_TENANT_NAME_MAX = 64,
};

struct engine_options {
	const char *model_path;
	const char *chat_template; /* Jinja source that replaces the model's own; NULL: the model's */
	const char *device;        /* see backend.h; NULL: "cpu" */
	int32_t n_threads;         /* 0: one per physical core */
	int32_t context_tokens;    /* 0: the trained length, or what rope_scaling makes of it */
	/* how positions are stretched, where not as the file says: see model/rope_choice.h; NULL or "": as it says */
	const char *rope_scaling;
	uint64_t kv_bytes;         /* cap of the device pool; 0: derived from the memory that is available */
	/* how the pool keeps KV: "f16", "bf16", "int8", "fp8_e4m3"; NULL or "auto": the device's best exact one */
	const char *kv_type;
	uint64_t kv_ram_bytes;     /* host memory for pages that leave the pool; 0: none */
	const char *kv_ram_type;   /* "f16", "int8" or "fp8_e4m3"; NULL: "f16", which is exact */
	const char *kv_disk_dir;   /* files for pages that leave the pool, and for sessions at a restart; NULL: none */
	uint64_t kv_disk_bytes;    /* of these files */
	uint64_t kv_disk_write_bytes_per_s; /* 0: no bound */
	uint64_t kv_overflow_bytes; /* host memory for conversations with more KV than the pool holds; 0: none */
	const char *kv_overflow_dir; /* and a file of kv_overflow_disk_bytes; NULL: none */
	uint64_t kv_overflow_disk_bytes;
	/* HOST:PORT or socket of a Valkey or Redis server for pages that daemons share; NULL: none */
	const char *kv_remote;
	/* a secret that daemons share so that sessions can move between them; NULL: they cannot */
	const char *transfer_key;
	/* which cached pages go when room is needed: of engine_kv_policy(); NULL: the default */
	const char *kv_policy;
	const char *context_policy; /* of requests that name none, of engine_context_policy(); NULL: "full" */
	bool kv_bounds;            /* room beside each page for the bounds of its keys, which "quest" needs */
	/* tokens: of requests that give none, and the most that any may ask for; 0: none, and no bound */
	int32_t max_cache_size;
	int32_t max_running;       /* generations that share steps; 0: default */
	int32_t max_queue;         /* generations waiting beyond that before LIMIT; 0: default, -1: no bound */
	int32_t step_tokens;       /* rows of a step; 0: default */
	int64_t heartbeat_timeout_ms, session_ttl_ms, session_gc_ms; /* 0: 30 s, 300 s, 15 s */
	int32_t max_sessions;      /* 0: default */
	int32_t session_tokens;    /* most tokens that a session may hold KV for; 0: no limit */
	int32_t session_requests;  /* generations of one session that may run or wait before LIMIT; 0: no limit */
	/* a generation that has not ended so long after its submission is TIMEOUT; 0: never */
	int64_t request_timeout_ms;
	const struct clock *clock; /* NULL: the system's */
	/*
	 * Called from an engine thread when events wait; must only wake the loop (uv_async_send). NULL: engine_wait()
	 * is used.
	 */
	void (*wake)(void *arg);
	void *wake_arg;
};

enum engine_state { ENGINE_LOADING, ENGINE_READY, ENGINE_FAILED };

/* How positions turn, and how far they are stretched: by the file, or by engine_options.rope_scaling. */
struct engine_rope {
	const char *scaling;  /* "none", "linear", "yarn", "llama3", "dca" */
	float factor;         /* 1: nothing is stretched, or the file has a table of divisors instead */
	float freq_base;
	int32_t original_ctx; /* before stretching */
	int32_t reach;        /* after it */
	int32_t chunk;	      /* dca: tokens after which positions count anew; else 0 */
	bool chosen;          /* not as the file says */
};

/* Facts about the loaded model; valid while the state is READY. Strings live as long as the engine. */
struct engine_info {
	const char *model_name; /* general.name, or the file's base name */
	const char *file_name;  /* base name of the path */
	const char *arch;
	const char *backend;    /* e.g. "cpu-avx512" */
	const char *quantization; /* most common tensor type, "Q4_1" */
	uint64_t n_params, file_bytes;
	int32_t n_ctx;         /* longest conversation of which all is kept */
	int32_t n_ctx_pool;    /* of which all is kept in the pool: n_ctx, unless there is more room below it */
	int32_t n_ctx_long;    /* and of which a context policy keeps a part */
	int32_t n_ctx_train, n_vocab, n_embd, n_layer, n_threads;
	struct engine_rope rope;
	int32_t window, n_windowed; /* n_windowed layers see only so many positions; 0: all see all */
	uint64_t kv_bytes_per_token, kv_bytes;
	uint64_t page_bytes; /* what a page takes of kv_bytes */
	uint64_t bounds_bytes; /* what the bounds of all pages take beside kv_bytes; 0: there are none */
	const char *kv_type;    /* of an element, "F16", "int8", "fp8_e4m3" */
	int32_t page_tokens, n_pages;
	int32_t bos_token, eos_token; /* -1: none */
	bool has_chat_template;
	const char *chat_template; /* source or "" */
	const char *chat_template_error; /* NULL when chat requests can be rendered */
};

/*
 * INVALID or UNSUPPORTED, with the option as the error's param: what can be told of the options without a model or a
 * device.
 */
enum status engine_options_check(const struct engine_options *options, struct error *err);
/*
 * Starts the engine: the options are checked and copied, and a worker begins to load the model. Loading ends with one
 * ENGINE_EVENT_STATE (request_id 0).
 */
enum status engine_create(const struct engine_options *options, struct engine **out, struct error *err);
/* Cancels what runs, joins the threads, frees everything. Pending events are dropped. NULL is allowed. */
void engine_destroy(struct engine *e);

enum engine_state engine_state(const struct engine *e);            /* [any] */
const struct engine_info *engine_info(const struct engine *e);     /* [any], NULL unless READY */
/* Why loading failed, or what was wrong with the device that has been lost since; valid when the state is FAILED. */
const struct error *engine_load_error(const struct engine *e);     /* [any] */
/* A fresh id for a command; never 0. */
uint64_t engine_next_id(struct engine *e);                         /* [any] */

/* ---- Tenants ---- */

/* 0 in any of them: no limit. */
struct engine_tenant_limits {
	int32_t max_requests; /* generations between submit and end; one more is LIMIT */
	int32_t max_sessions; /* one more is LIMIT */
	/*
	 * Of the pages that its running generations hold, counted once for each that holds one; what the prefix index
	 * keeps is nobody's. The limit works like a small pool of its own: its youngest generation is set back, and its
	 * requests wait without holding up others. What could not fit alone is LIMIT.
	 */
	uint64_t kv_bytes;
};

/* Whom requests and sessions belong to; the server gives the number a meaning. */
struct engine_tenant {
	int32_t id; /* [0, ENGINE_MAX_TENANTS) */
	/* what it is known by beyond this process, where ids mean nothing; "": nothing */
	char name[ENGINE_TENANT_NAME_MAX + 1];
	char salt[ENGINE_SALT_MAX + 1]; /* tenants of different salts share no KV */
	struct engine_tenant_limits limits;
};

struct engine_tenant_usage {
	int32_t id; /* -1: there is no such tenant */
	struct engine_tenant_limits limits;
	int32_t n_running, n_waiting, n_sessions;
	int64_t n_pages;   /* what kv_bytes of the limits counts */
	uint64_t kv_bytes;
	uint64_t requests; /* ended */
	uint64_t prompt_tokens, cached_tokens, generated_tokens;
	uint64_t refused;  /* requests and sessions, by one of its limits */
};

/*
 * Makes or changes a tenant, before whatever is submitted after this; it is never unmade. Tenant 0 exists from the
 * beginning, without salt and limits. Has no answer; without memory the tenant's requests fail with NOMEM. INVALID ids
 * are ignored.
 */
void engine_tenant_set(struct engine *e, const struct engine_tenant *tenant);
/* As of the last step. */
void engine_tenant_usage(const struct engine *e, int32_t tenant, struct engine_tenant_usage *out); /* [any] */

/* ---- Generation ---- */

enum engine_input { ENGINE_INPUT_TEXT, ENGINE_INPUT_TOKENS, ENGINE_INPUT_CHAT };

/*
 * How a conversation goes on that grows longer than what is to be kept of it. By default all is kept. The other
 * policies say so in engine_usage.context: what they let go of is gone, and the answer is another one than with all of
 * it.
 *
 * "streaming": the first start_size tokens stay, and the latest; all keep their positions.
 * "evict": these, and of the pages between those that are worth most.
 * "quest": all stays; each token of the answer reads the first, the latest, and the pages between whose keys could
 * match it best.
 * "merge": as "evict", but of those between, tokens next to each other whose keys are alike come to share their KV.
 */
struct engine_context {
	const char *policy;     /* of engine_context_policy(); NULL: the engine's */
	int32_t start_size;     /* tokens; -1: 4, which is a page */
	/*
	 * streaming: tokens of the window at its longest; it moves in jumps of an eighth. 0: what max_cache_size
	 * leaves.
	 * evict: that stay in any case; 0: 128, or half of max_cache_size where that is less.
	 * merge: that stay as they are; 0: three quarters of max_cache_size, or 128 where there is none.
	 * quest: that are read in any case; 0: 64, or a quarter of max_cache_size where that is less.
	 */
	int32_t recent_size;
	/* tokens in all; 0: as much as the others come to, or the engine's. quest: that are read */
	int32_t max_cache_size;
	/* streaming: what leaves the window goes to host memory, and what the question would match best comes back */
	bool page_in;
	int32_t recall_every; /* that is chosen anew for each so many tokens of an answer; 0: 16; -1: once */
	/* tokens that may be computed again for an answer, for pages that were lost meanwhile; 0: max_cache_size; -1: none
	 */
	int32_t recompute_tokens;
	bool by_share; /* evict, merge: its KV shrinks by shrink_permille, or more where max_cache_size says so */
	int32_t shrink_permille;
	bool by_age;            /* evict: the oldest pages go first, whatever they are worth; */
	/* those first that got the least of all rows' attention. Neither: by the norms of their values and keys */
	bool by_mass;
	/*
	 * All is kept until any of those that are given comes about, and from then on the policy acts. None: until
	 * max_cache_size is reached.
	 */
	int32_t trigger_tokens;	    /* the conversation has so many tokens */
	int32_t trigger_free_pages; /* fewer pages of the KV cache than this are free, or held by the index alone */
	double trigger_entropy;     /* the attention of the answer's latest 32 tokens has a mean below this, in nats */
	bool diagnostics;       /* engine_context_usage.diagnostics is wanted, of any policy */
};

/* What set a context policy off. */
enum engine_trigger {
	ENGINE_TRIGGER_NONE,
	ENGINE_TRIGGER_TOKENS,
	ENGINE_TRIGGER_FREE_PAGES,
	ENGINE_TRIGGER_ENTROPY,
	ENGINE_TRIGGERS
};
/* "tokens", "free_pages", "entropy"; NULL: none. */
const char *engine_trigger_name(enum engine_trigger trigger);

enum { ENGINE_MAX_CONTEXT_POLICIES = 8 };
/* Names of the context policies, "full" first; NULL after the last. */
const char *engine_context_policy(size_t i);

struct engine_request {
	uint64_t id; /* from engine_next_id() */
	int32_t tenant;
	enum engine_input input;
	/* TEXT: a raw prompt; control tokens in it are parsed, BOS is added as the model asks. */
	char *text; /* malloc'd */
	size_t text_n;
	/* TOKENS: taken as they are; out-of-range ids are INVALID. */
	int32_t *tokens; /* malloc'd */
	size_t n_tokens;
	/* CHAT: variables of the template; the engine adds bos_token, eos_token and the like. Lives in `arena`. */
	struct arena *arena;
	struct value *chat;
	/*
	 * CHAT: of each message in chat["messages"], the turn that it belongs to, from 0; -1: it always stays. When the
	 * prompt and max_tokens (-1: an eighth of the context) do not fit, whole turns are left out, the oldest first,
	 * never the last. NULL: none may be.
	 */
	int32_t *turn_of; /* malloc'd, [n_turn_of] */
	size_t n_turn_of;
	/*
	 * The engine's own, found while the prompt is made: turns left out; where the others begin, in tokens, and
	 * where the system message ends.
	 */
	int32_t turns_dropped;
	int32_t *turn_starts; /* malloc'd, [n_turn_starts] */
	size_t n_turn_starts;
	int32_t system_tokens;

	/* "": none. Its KV is reused and kept. Requests of one session run one after the other */
	char session[ENGINE_SESSION_ID_MAX + 1];

	/* malloc'd or NULL: its KV is shared only with requests of the same salt and tenant's salt */
	char *cache_salt;

	struct engine_context context;
	struct sampling_params sampling; /* sampling.bias malloc'd */
	int32_t max_tokens;              /* -1: until the context is full; 0: prompt only */
	int64_t timeout_ms;              /* as engine_options.request_timeout_ms, which bounds it; 0: that one */
	/*
	 * Work for later that nobody waits for: it begins only while nothing else runs or waits, is the first to give
	 * way, and takes no place of its tenant's max_requests or of the queue. What it computes counts like any other.
	 */
	bool background;
	struct str *stops;               /* malloc'd array of malloc'd strings (free((char *)p)) */
	size_t n_stops;
	int32_t *stop_tokens;            /* malloc'd; end the answer like EOS, in addition to the model's own */
	size_t n_stop_tokens;
	bool ignore_eos;                 /* not with a grammar: it knows where the answer ends */
	/* a reference, or NULL: the answer is one of its texts, if it comes to its end */
	struct grammar *grammar;
	bool keep_special;               /* special tokens appear in the text */
	/* the PROMPT event carries the prompt's tokens and text (as given, for TEXT) */
	bool want_prompt;
	bool want_prompt_logprobs;       /* ... and their log-probabilities, with sampling.n_logprobs alternatives */
	/*
	 * For measurements: chooses each token of the answer in the sampler's place, from the logits[n_vocab] of the
	 * row before it; n tokens were chosen so far. Called in an engine thread, which waits; not with a grammar.
	 * NULL: the sampler chooses.
	 */
	int32_t (*choose)(void *arg, const float *logits, int32_t n_vocab, int32_t n);
	void *choose_arg; /* lives until the generation has ended */
};

/* A request with defaults (temperature 1, max_tokens -1), zeroed otherwise. NULL when there is no memory. */
struct engine_request *engine_request_create(struct engine *e);
void engine_request_destroy(struct engine_request *r); /* also frees arena; NULL is allowed */
/* Adds a stop string (copied); false when there is no memory. */
bool engine_request_add_stop(struct engine_request *r, const char *s, size_t n);

/* Takes ownership of r in every case; failures come back as an ERROR event. */
void engine_submit(struct engine *e, struct engine_request *r);
/*
 * Somebody waits for a generation in the background now: it goes on as if it had been none. Unknown ids are ignored.
 * [any]
 */
void engine_hurry(struct engine *e, uint64_t id);
/* Ends a generation within one step with DONE (finish CANCELLED); unknown ids are ignored. [any] */
void engine_cancel(struct engine *e, uint64_t id);

/* ---- Text ---- */

/* Answered by TOKENS. text is copied. */
void engine_tokenize(struct engine *e, uint64_t id, const char *text, size_t n, bool add_special, bool parse_special);
/* Renders and tokenises a chat; takes ownership of the arena. Answered by TOKENS, whose text is the prompt. */
void engine_tokenize_chat(struct engine *e, uint64_t id, struct arena *arena, struct value *chat);
/* Answered by TEXT. ids are copied. INVALID when one is outside the vocabulary. */
void engine_detokenize(struct engine *e, uint64_t id, const int32_t *ids, size_t n);

/* A part of a document: see text/split.h. */
struct engine_chunk {
	size_t start, fresh, end; /* in bytes; [start, fresh) is repeated from the part before */
	int32_t n_tokens;
	/* what there is at its end: "heading", "paragraph", "line", "sentence", "word", "token", "end" */
	const char *cut;
};

struct engine_split_params {
	int32_t max_tokens;       /* of a part with its repetition */
	int32_t overlap_permille; /* of max_tokens that are repeated from the part before, at most; 0 to 500 */
};

/*
 * Cuts a document, a part at a time beside what else is tokenised. Takes the content of `text` (which is then empty)
 * and answers with SPLIT, which brings it back; or INVALID (max_chunk_tokens, overlap). engine_cancel() ends it with
 * CANCELLED.
 */
void engine_split(struct engine *e, uint64_t id, struct buf *text, const struct engine_split_params *params);

/* ---- Sessions ---- */

/* Where pages are that have left the device, the nearest first. */
enum engine_tier_kind {
	ENGINE_TIER_RAM,
	ENGINE_TIER_DISK,
	ENGINE_TIER_DISK_WIDE,
	ENGINE_TIER_REMOTE,
	ENGINE_TIER_KINDS
};

struct engine_session_info {
	char id[ENGINE_SESSION_ID_MAX + 1];
	int64_t age_ms, idle_ms;     /* since creation, since the last heartbeat or request */
	int64_t expires_in_ms;       /* until the earlier of heartbeat timeout and TTL; -1: never */
	int64_t heartbeat_timeout_ms, ttl_ms;
	/* for how long it vouches for its pages from now, without another sign of life; -1: for ever */
	int64_t claim_ms;
	int32_t tenant;
	uint64_t serial;             /* rises with each session made: see engine_session_list() */
	int32_t max_tokens;          /* that it may hold KV for; 0: no limit */
	int32_t n_tokens;            /* tokens of its last request whose KV is there */
	/* and how far they reach: more, where a context policy dropped what lies between */
	int32_t n_logical;
	const char *policy;          /* by which they were kept: see struct engine_context */
	int32_t n_pages;
	/*
	 * Where the pages of its last request are, or of the one that runs: on the device (those that others have
	 * computed again as well), in the nearest tier that has them, or nowhere, to be computed again.
	 */
	int32_t pages_device, pages_tier[ENGINE_TIER_KINDS], pages_lost;
	int32_t pages_exclusive;     /* of them, those that no other session or generation uses */
	int32_t pages_indexed;       /* of them, those that the prefix index holds */
	int64_t references;          /* on its pages, by whomever */
	int32_t positions_unused;    /* in its pages */
	uint64_t kv_bytes;
	uint64_t prompt_tokens, cached_tokens, generated_tokens; /* of its ended requests */
	int32_t n_running, n_waiting; /* its generations */
	uint64_t n_requests;         /* ended */
};

/* Pages that a session which idles has lost or got back since the event before: see struct engine_session_info. */
struct engine_session_moves {
	int32_t evicted;  /* left the device: */
	int32_t down;     /* of these, to be found in a tier below */
	int32_t lost;     /* are nowhere any more, from wherever */
	int32_t up;       /* came back to the device */
};

struct engine_session_params {
	char id[ENGINE_SESSION_ID_MAX + 1]; /* "": the engine chooses a random one */
	/* 0: the engine's; larger ones are cut to it; -1: never (for the server's own) */
	int64_t heartbeat_timeout_ms, ttl_ms;
	int32_t max_tokens;                   /* that it may hold KV for; 0: the engine's; larger ones are cut to it */
	int32_t tenant;
};

/* Whose sessions to look at. */
enum { ENGINE_ALL_TENANTS = -1 };

/* A part of the list of sessions, in the order in which they were made. */
struct engine_session_page {
	uint64_t after; /* only those whose serial is greater; 0: from the first */
	int32_t limit;  /* at most so many */
};

/*
 * Sessions belong to tenants: an id means that tenant's session, and no other tenant can tell that it exists. All are
 * answered by SESSION (LIST: SESSIONS), or ERROR: NOT_FOUND, EXISTS, INVALID (id), LIMIT (max_sessions).
 */
void engine_session_create(struct engine *e, uint64_t id, const struct engine_session_params *p);
void engine_session_get(struct engine *e, uint64_t id, int32_t tenant, const char *session);
void engine_session_heartbeat(struct engine *e, uint64_t id, int32_t tenant, const char *session);
/* Cancels its requests and returns its pages. */
void engine_session_delete(struct engine *e, uint64_t id, int32_t tenant, const char *session);
/*
 * Tells of a session from now on: a CONTEXT event at once, and one whenever what it has of the KV cache has changed, at
 * most ten a second. An ERROR, NOT_FOUND, when there is no such session or it has ended, is the last of them;
 * engine_cancel() ends them without one.
 */
void engine_session_watch(struct engine *e, uint64_t id, int32_t tenant, const char *session);
/*
 * Moves a session to another daemon of the same model, in parts that the server asks for: each is answered by EXPORT,
 * whose `text` is the next part and whose `more` tells whether there are others, which engine_session_export_next()
 * asks for under the same id. The session stays. ERROR: NOT_FOUND, UNSUPPORTED (no transfer_key), LIMIT, BUSY (it lost
 * a page on the way); then the export has ended. engine_cancel() ends one as well, without an event.
 */
void engine_session_export(struct engine *e, uint64_t id, int32_t tenant, const char *session);
void engine_session_export_next(struct engine *e, uint64_t id);
/*
 * The other end: makes the session that a stream tells of. The beginning and each part are answered by IMPORT, after
 * which the next part may follow, under the same id; the end (n == 0) by SESSION. ERROR: INVALID (damaged, or of
 * another model, version or tenant), EXISTS, UNSUPPORTED, LIMIT, NOT_FOUND (the session's TTL has passed): then the
 * import has ended, and there is no such session. As does engine_cancel(). Takes ownership of data, which is malloc'd.
 */
void engine_session_import(struct engine *e, uint64_t id, int32_t tenant, const char *session);
void engine_session_import_data(struct engine *e, uint64_t id, char *data, size_t n);
/* tenant: or ENGINE_ALL_TENANTS. */
void engine_session_list(struct engine *e, uint64_t id, int32_t tenant, const struct engine_session_page *page);
/* As engine_session_list(), with all figures taken afresh: answered by KV, whose `kv` and `sessions` fit together. */
void engine_kv_report(struct engine *e, uint64_t id, int32_t tenant, const struct engine_session_page *page);

/* ---- Events ---- */

enum engine_finish {
	ENGINE_FINISH_STOP,      /* end token, stop token or stop string */
	ENGINE_FINISH_LENGTH,    /* max_tokens */
	ENGINE_FINISH_CANCELLED, /* cancel, or its session ended: see `detail` */
};

/* How the tokens of an answer attended, and how far they are from what they would be without their policy. */
struct engine_diagnostics {
	bool wanted;
	uint64_t n_rows;           /* tokens of the answer that were computed, times layers and query heads */
	double entropy, largest;   /* means over these: of the entropy of weights in nats, and of the largest weight */
	int32_t n_samples;         /* tokens that were computed exactly as well; 0: the figures below are none */
	/* Jensen-Shannon divergence of the next token's distribution from the exact one in nats: mean, and largest */
	double drift, drift_most;
};

/* What was kept of a conversation when its generation ended. */
struct engine_context_usage {
	const char *policy;
	int32_t tokens_logical;  /* whose KV was computed or found */
	int32_t tokens_resident; /* of them, those whose KV was there at the end */
	int32_t evicted_tokens;  /* and those that its policy let go of */
	int32_t merged_tokens;	 /* merge: that share their KV with others, each such KV counting once as resident */
	int32_t pages;           /* of the resident, on the device */
	int32_t pages_tier[ENGINE_TIER_KINDS]; /* and below it */
	int32_t fallback_pages;  /* of the narrow ones, those kept in f16 as well for a value that they cannot hold */
	uint64_t bytes;          /* on the device */
	/* streaming: by how much the first tokens stand behind their own positions, so that none looks back too far */
	int32_t moved;
	bool chooses;         /* quest: its rows read a choice of what is resident, ... */
	int32_t tokens_read;  /* ... the next one so much at most */
	/* page_in: pages that had come back for this answer, those kept in host memory for that, and those lost */
	bool pages_in;
	int32_t pages_back, pages_below, pages_missing;
	int32_t recalls; /* times that it was chosen which */
	int32_t pages_recomputed, tokens_recomputed; /* lost ones that came back all the same, and what that took */
	bool trigger_asked;
	enum engine_trigger trigger; /* of those that were given, the one that set it off; NONE: it has not acted */
	int32_t trigger_tokens;	     /* how many tokens the conversation had then */
	struct engine_diagnostics diagnostics;
};

struct engine_usage {
	struct engine_context_usage context; /* DONE */
	int32_t prompt_tokens, cached_tokens, completion_tokens;
	int32_t n_preempted; /* times its KV was dropped for others and computed again */
	int64_t queue_ns, prefill_ns, decode_ns; /* submit -> first step -> first token -> end */
	int64_t ttft_ns;                         /* submit -> first token; 0 when there was none */
};

enum engine_event_type {
	ENGINE_EVENT_STATE,    /* loading ended, or the device was lost */
	ENGINE_EVENT_PROMPT,
	ENGINE_EVENT_TOKEN,
	ENGINE_EVENT_DONE,
	ENGINE_EVENT_ERROR,
	ENGINE_EVENT_TOKENS,
	ENGINE_EVENT_TEXT,
	ENGINE_EVENT_SPLIT,
	ENGINE_EVENT_SESSION,
	ENGINE_EVENT_SESSIONS,
	ENGINE_EVENT_KV,
	ENGINE_EVENT_EXPORT,
	ENGINE_EVENT_IMPORT,
	ENGINE_EVENT_CONTEXT,
};

struct engine_event {
	struct list link;
	enum engine_event_type type;
	uint64_t request_id;

	/*
	 * TOKEN, DONE: text released now. PROMPT (want_prompt), TOKENS, TEXT, SPLIT: the whole text. EXPORT: the part
	 */
	struct buf text;
	struct buf piece;  /* TOKEN: the token's own bytes, which may split a code point */
	struct sample_result sample; /* TOKEN: sample.token; log-probabilities when sampling.n_logprobs >= 0 */

	int32_t *tokens;   /* PROMPT (want_prompt), TOKENS: [n_tokens] */
	size_t n_tokens;
	/* PROMPT (want_prompt_logprobs): [n_tokens]; [0].logprob is NaN: nothing precedes it */
	struct sample_result *logprobs;

	struct engine_chunk *chunks; /* SPLIT: [n_chunks] */
	size_t n_chunks;

	int32_t turns_dropped;     /* PROMPT: how many of the oldest turns were left out: see engine_request.turn_of */
	struct engine_usage usage; /* PROMPT: prompt_tokens and cached_tokens; DONE: all */
	enum engine_finish finish; /* DONE */
	const char *detail;        /* DONE: static text: "eos", "stop", "length", "cancelled", "session_expired", ... */
	int32_t stop_index;        /* DONE: which stop string ended it, or -1 */

	struct error error;        /* ERROR */

	struct engine_session_info *sessions; /* SESSION (1), CONTEXT (1), SESSIONS, KV: [n_sessions] */
	size_t n_sessions;
	struct engine_session_moves moves;    /* CONTEXT */
	bool more_sessions;                   /* SESSIONS, KV: there are others behind the last one */
	struct engine_kv *kv;                 /* KV */
	bool more;                            /* EXPORT: there are other parts */
};

/* Appends all waiting events (struct engine_event.link) to `out`; the caller frees each. Never blocks. */
bool engine_poll(struct engine *e, struct list *out);
/* As engine_poll, waiting up to timeout_ms for a first one (negative: for ever); for programs without a loop. */
bool engine_wait(struct engine *e, struct list *out, int64_t timeout_ms);
void engine_event_free(struct engine_event *ev);
/* The bytes of a token for messages and log-probabilities (borrowed for the engine's lifetime). READY only. [any] */
struct str engine_token_piece(const struct engine *e, int32_t token);

/* ---- Figures ---- */

/* Why the KV of idle sessions made room, and why a generation was set back. */
enum engine_room { ENGINE_ROOM_PROMPT, ENGINE_ROOM_DECODE, ENGINE_ROOM_CAP, ENGINE_N_ROOMS };

/*
 * The KV cache, counted page by page at one moment. Each page in use is counted once, under the first of these that it
 * belongs to: a running generation, a queued request, the next turn of a session that waits (which holds a reference
 * only on KV of its own, under a context policy), the prefix index. A reference is one holder's of one page.
 */
struct engine_kv {
	int32_t pages_total, pages_free;
	/* with pages_free they add up to pages_total */
	int32_t pages_running, pages_queued, pages_sessions, pages_index;
	/* used by two or more: generations, queued requests, sessions (one that runs only counts as such) */
	int32_t pages_shared;
	int64_t refs_running, refs_queued, refs_sessions, refs_index;
	/* positions that sequences see; shared ones as often as they are seen */
	int64_t tokens_running, tokens_queued, tokens_sessions;
	int32_t tails;            /* sequences that end within a page */
	/* of them, those whose last page others hold as well: it is copied before it is written */
	int32_t tails_shared;
	/* of all pages in use; unused: behind the last position that any holder sees */
	int64_t positions_used, positions_unused;
	double fragmentation;     /* positions_unused as a share of both; 0 when no page is in use */
	bool alarm;               /* fragmentation rose above ENGINE_FRAGMENTATION_ALARM and is not well again */
	/* references in the pool less those that were found to be held; and accounts less the same. 0 */
	int64_t drift_pages;
	int64_t counted_ms_ago;
};

/* When the alarm is raised and when it is taken back; fewer pages than this in use are not worth one. */
#define ENGINE_FRAGMENTATION_ALARM 0.20
#define ENGINE_FRAGMENTATION_WELL  0.15
enum { ENGINE_FRAGMENTATION_PAGES = 16 };

/* Why a page that left the pool did not go to a tier; unpaid: it is computed sooner than fetched. */
enum engine_tier_drop {
	ENGINE_TIER_DROP_UNPAID,
	ENGINE_TIER_DROP_OFF,
	ENGINE_TIER_DROP_BUSY,
	ENGINE_TIER_DROP_RATE,
	ENGINE_TIER_DROP_FULL,
	ENGINE_TIER_DROP_FAILED,
	ENGINE_N_TIER_DROPS
};

/* A tier below the pool. Counts are of pages, since start. Strings are static. */
struct engine_tier {
	/* "ram", "disk", "disk-wide", "remote"; of an element; how it moves bytes, or "" */
	const char *kind, *type, *io;
	bool off;                     /* it failed; a remote one may come back */
	const char *off_reason;       /* or "" */
	uint64_t reconnects;          /* how often it has */
	bool pays;                    /* a page comes back from it sooner than it is computed */
	uint64_t cap_bytes, used_bytes, index_bytes;
	int32_t pages, max_pages, writing, loading;
	uint64_t stored, present;     /* taken, and found to be there already */
	uint64_t dropped[ENGINE_N_TIER_DROPS];
	/* absent: asked for, since it might have been there */
	uint64_t loaded, load_failed, absent, corrupt, cancelled;
	uint64_t fetched;             /* of the loaded: joined the prefix index */
	uint64_t evicted;
	uint64_t wide_sinks, wide_tails, wide_values; /* kept exact in a narrow tier, by reason */
	uint64_t bytes_written, bytes_read;
	double read_bytes_per_s, write_bytes_per_s;   /* measured; 0: not yet */
};

struct engine_tiers {
	struct engine_tier tier[ENGINE_TIER_KINDS];
	int32_t n;
	uint64_t fetches, fetches_cancelled; /* requests that waited for pages from tiers */
	uint64_t fetches_overlapped;         /* of them, those that began with the first layers while the others came */
	int32_t fetching;
	double prefill_tokens_per_s;  /* what tiers are weighed against; 0: not known yet */
};

/* A snapshot of counters (since start) and gauges; consistent in itself. */
/* Room for conversations with more KV than the pool holds; all zero where there is none. */
struct engine_overflow {
	int32_t max_tokens;                        /* of one that has all of it */
	uint64_t ram_bytes, ram_used_bytes, disk_bytes, disk_used_bytes;
	int32_t requests, pages;                   /* that have something there now */
	uint64_t moved_pages, lost_requests;       /* so far */
	uint64_t wide_refused; /* narrow KV: pages that went without their wide copies, for want of room */
	uint64_t bytes_read, bytes_written, waits; /* of the disk; blocks that a step had to wait for */
	bool disk_off;
	const char *off_reason;                    /* "" or a static text */
};

struct engine_stats {
	int32_t n_running, n_waiting, n_sessions;
	int32_t pages_total, pages_free;
	int32_t pages_cached;   /* held by the prefix index alone: free for whoever needs them */
	uint64_t prompt_tokens, cached_tokens, computed_prompt_tokens, generated_tokens;
	uint64_t finished_stop, finished_length, cancelled, failed;
	uint64_t prefix_queries, prefix_hits; /* full pages of admitted prompts, and those that the index knew */
	uint64_t prefix_evictions;            /* pages evicted from the index */
	uint64_t prefix_evictions_decode; /* of these, for a running generation; the others for a prompt */
	/* pages; found under an equal hash with other content; known as ghosts */
	uint64_t prefix_inserted, prefix_collisions, prefix_revived;
	/* pages indexed, those not full, evicted pages that the policy remembers */
	int32_t prefix_pages, prefix_tails, prefix_ghosts;
	uint64_t preemptions, sessions_created, sessions_expired, sessions_deleted;
	/* generations set back; for a prompt only those in the background */
	uint64_t preempted[ENGINE_N_ROOMS];
	uint64_t holds_dropped;          /* queued requests that let go of what they waited to use */
	/*
	 * Pages that are kept in f16 as well, of a narrow pool; those that found no room for it; vectors that became no
	 * numbers for want of it.
	 */
	int32_t kv_wide_pages, kv_wide_max;
	uint64_t kv_wide_refused, kv_not_finite;
	/* pages that were kept in f16 because of a value that their own type cannot hold */
	uint64_t kv_fallback_pages;
	uint64_t kv_unsound_pages;          /* pages with a value that is no number or infinite: they are not shared */
	uint64_t kv_bounded;                /* pages whose bounds were computed */
	/* vectors with a value beyond the range of halves, at which they were held */
	uint64_t kv_clamped;
	struct engine_kv kv;             /* counted now and then: see counted_ms_ago */
	struct engine_tiers tiers;
	struct engine_overflow overflow;
	/* Of context policies, as engine_context_policy() numbers them: requests ended, tokens let go of. */
	uint64_t context_requests[ENGINE_MAX_CONTEXT_POLICIES], context_evicted[ENGINE_MAX_CONTEXT_POLICIES];
	/* And of the ended requests: see struct engine_context_usage. */
	uint64_t context_merged[ENGINE_MAX_CONTEXT_POLICIES], context_fallback[ENGINE_MAX_CONTEXT_POLICIES];
	/* pages of page_in, and bytes of what bounds their keys */
	uint64_t attic_kept, attic_back, attic_lost, attic_bytes;
	uint64_t attic_choices, attic_again, attic_again_tokens; /* of which; computed again, and rows for that */
	uint64_t context_triggered[ENGINE_TRIGGERS]; /* ended requests that gave triggers, by the one that set the
							policy off */
	int32_t parked_pages;            /* KV of idle sessions that is not in the index */
	/* ends of turns that left some; turns that went on with it; lost before that */
	uint64_t parked, parked_resumed, parked_dropped;
	uint64_t steps, step_rows;
	int64_t step_ns;
};

void engine_stats(const struct engine *e, struct engine_stats *out); /* [any] */

/* ---- Offline tools: they work in the calling thread and need no engine ---- */

/* Appends a description of a GGUF file: text for people, or one JSON object. */
enum status engine_inspect(const char *path, bool json, struct buf *out, struct error *err);

/* What a model takes, without loading it. */
struct engine_plan_params {
	const char *model_path;
	int32_t context_tokens; /* 0: as trained, or as far as rope_scaling reaches */
	const char *rope_scaling; /* as in engine_options */
	int32_t n_sessions;     /* conversations of that length to hold at once */
	int32_t step_tokens, max_running; /* 0: the engine's defaults */
	uint64_t memory_bytes;  /* for everything; 0: what the plan itself comes to */
	double tokens_per_s;    /* KV written by all clients together; 0: not known */
	const char *kv_type;    /* as in engine_options */
	bool kv_bounds;
	/* Below a pool of pool_bytes, for conversations larger than it. */
	uint64_t kv_overflow_bytes, kv_overflow_disk_bytes;
};

struct engine_plan {
	char arch[32];
	struct engine_rope rope;
	int32_t n_ctx, n_layer, n_head, n_head_kv, head_dim, page_tokens;
	int32_t window, n_windowed;   /* positions that rows see in n_windowed of the layers; 0: all see all */
	/* of a whole context that is computed: where all layers have a window, pages before it can go */
	uint64_t kv_bytes_running;
	uint64_t weights_bytes;       /* of the tensors in the file */
	uint64_t activation_bytes;    /* of a step */
	uint64_t kv_bytes_per_token;
	uint64_t page_bytes;          /* with the padding to its stride */
	uint64_t bounds_bytes_per_page; /* which the figures below contain; 0: there are none */
	/* a whole context, in whole pages; narrow KV: with what is set aside for wide copies */
	uint64_t kv_bytes_per_session;
	uint64_t kv_bytes;            /* n_sessions of them */
	uint64_t total_bytes;         /* weights, activations and kv_bytes */
	uint64_t pool_bytes;          /* what memory_bytes leaves for KV, in whole pages: */
	uint64_t pool_pages;
	int64_t sessions_that_fit;    /* whole contexts in it */
	double idle_seconds;          /* how long an idle session's pages stay at tokens_per_s; 0: not known */
	/* The longest conversation: in the pool; and with what is below it, or passing through it, n_ctx at most. */
	int32_t pool_tokens, longest_tokens;
	/* What is taken below it; with int8 and fp8_e4m3 some host memory in any case. */
	uint64_t overflow_ram_bytes, overflow_disk_bytes;
};

/* IO, CORRUPT and UNSUPPORTED as for loading; INVALID for impossible numbers. */
enum status engine_plan(const struct engine_plan_params *params, struct engine_plan *out, struct error *err);

/*
 * Whether this build and this machine have the device (as in engine_options): opens and closes it. The error says what
 * lacks.
 */
enum status engine_device_check(const char *device, struct error *err);

/* A vocabulary without a model. */
struct engine_vocab;
enum status engine_vocab_open(const char *path, struct engine_vocab **out, struct error *err);
void engine_vocab_close(struct engine_vocab *v); /* NULL is allowed */
/* *ids is malloc'd. */
enum status engine_vocab_encode(const struct engine_vocab *v, const char *text, size_t n, bool add_special,
                                bool parse_special, int32_t **ids, size_t *n_ids, struct error *err);

/* As engine_split(); *chunks is malloc'd. */
enum status engine_vocab_split(const struct engine_vocab *v, struct str text, const struct engine_split_params *params,
                               struct engine_chunk **chunks, size_t *n_chunks, struct error *err);

/* The source of a chat template that comes with the engine, or NULL when there is none of that name. */
const char *engine_builtin_template(const char *name);

/* Compiles and renders a template once; vars is a dict. The prompt is appended to `out`. */
struct engine_template;
enum status engine_template_open(const char *source, size_t n, struct engine_template **out, struct error *err);
void engine_template_close(struct engine_template *t);
enum status engine_template_render(const struct engine_template *t, const struct value *vars, int64_t now_unix_s,
                                   struct buf *out, struct error *err);

/*
 * Names of the policies that choose which cached pages go (engine_options.kv_policy), the default first; NULL after the
 * last.
 */
const char *engine_kv_policy(size_t i);
/* The policy of that name as engine_kv_policy() has it, "default" included; NULL when there is none. */
const char *engine_kv_policy_find(const char *name);

/*
 * A trace of prompts, as blocks of tokens named by their content and all before it, to replay on the code that evicts
 * pages. Times are milliseconds, not falling.
 */
struct engine_trace;
enum status engine_trace_create(struct engine_trace **out);
void engine_trace_destroy(struct engine_trace *t); /* NULL is allowed */
/*
 * Adds a prompt of n blocks at a time; output_tokens were generated for it. INVALID when the time is before the last
 * one's; NOMEM, LIMIT.
 */
enum status engine_trace_add(struct engine_trace *t, int64_t time_ms, const uint64_t *blocks, size_t n,
                             int64_t output_tokens, struct error *err);

struct engine_trace_info {
	uint64_t n_prompts, n_blocks, n_distinct_blocks;
	int64_t span_ms; /* from the first prompt to the last */
};
void engine_trace_info(const struct engine_trace *t, struct engine_trace_info *out);

/* The bound of engine_replay(): evicts what is used again last, knowing the trace. */
#define ENGINE_REPLAY_BELADY "belady"

struct engine_replay_result {
	uint64_t hits;      /* blocks found, from the start of each prompt to its first miss */
	uint64_t evictions;
	int64_t cpu_ns;     /* of the calling thread */
};
/*
 * Replays the trace over a cache of `capacity_blocks` that starts empty, with its times multiplied by time_scale.
 * Prompts take no time; one keeps its own blocks while it is replayed, and what of it does not fit is not cached.
 * INVALID: policy, capacity, scale.
 */
enum status engine_replay(const struct engine_trace *t, const char *policy, int32_t capacity_blocks, double time_scale,
                          struct engine_replay_result *out, struct error *err);

/*
 * Measures a model on a device, in the calling thread and without an engine: the forward pass over paged KV, without
 * sampling.
 *
 * For each depth, that many tokens of context are put in place; then each prompt length is measured on top of them (one
 * sequence, chunks of a step, one row of logits at the end) and, for each batch size, `decode_tokens` steps of one
 * token for each sequence.
 */
enum { ENGINE_BENCH_BATCH_MAX = 256, ENGINE_BENCH_RUNS_MAX = 100, ENGINE_BENCH_OPS_MAX = 16 };

struct engine_bench_params {
	const char *model_path;
	const char *device; /* NULL: "cpu" */
	int32_t n_threads;  /* 0: one per physical core */
	const int32_t *prefill; /* [n_prefill] tokens of a prompt, each at least 1 */
	size_t n_prefill;
	int32_t decode_tokens;  /* 0: no decoding */
	const int32_t *depth;   /* [n_depths] tokens of context */
	size_t n_depths;
	const int32_t *batch;   /* [n_batches] sequences that decode together */
	size_t n_batches;
	int32_t runs;           /* of each test */
	/* fill the context with random keys and values instead of computing them: quick, and the same work to read */
	bool random_kv;
	const char *kv_type;    /* how KV is kept, as in engine_options; no page has a copy in f16 beside it */
	const char *rope_scaling; /* as in engine_options */
};

struct engine_bench_info {
	char backend[64], detail[128];
	struct engine_rope rope;
	int32_t n_threads;
	uint64_t memory_bytes, cache_bytes; /* sizes of what was read */
	double memory_bytes_per_s;          /* reading more than any cache holds; 0: the device cannot tell */
	double cache_bytes_per_s;           /* reading the same small part again and again */
};

struct engine_bench_row {
	bool prefill; /* else decode */
	int32_t tokens, depth, batch; /* tokens of each sequence */
	int32_t runs;
	double tokens_per_s;      /* of all sequences together; median of the runs */
	double best_tokens_per_s;
	double bytes_per_s;       /* of weights and KV, each byte counted once a step, at the median speed */
	double bytes_per_token;
	/* the best that plain reading of memory reached between the runs; 0: the device cannot tell */
	double read_bytes_per_s;
	struct {
		const char *name;
		/* of the time of a run of its own, in which each operation is waited for; "host": what is left */
		double share;
	} ops[ENGINE_BENCH_OPS_MAX];
	size_t n_ops;
};

struct engine_bench_sink {
	void *arg;
	void (*info)(void *arg, const struct engine_bench_info *info); /* once, first */
	void (*row)(void *arg, const struct engine_bench_row *row);
	/* A test that goes beyond the context: engine_rope.reach. */
	void (*left_out)(void *arg, bool prefill, int32_t tokens, int32_t depth);
};

/* INVALID names the number that makes no sense; IO, CORRUPT, UNSUPPORTED and NOMEM as for loading. */
enum status engine_bench(const struct engine_bench_params *params, const struct engine_bench_sink *sink,
                         struct error *err);

/*
 * Measures what long conversations cost under each context policy, and what is lost: an engine of its own, one
 * conversation after the other, in the calling thread.
 *
 * For each length, a prompt of that many tokens is made of a text, with pass keys hidden at even distances ("The pass
 * key of the red door is 31415."). Then the answer is forced: the text goes on for a while, and each pass key is asked
 * for and given. What the model would have said at each of these tokens is compared with what it would have said with
 * everything kept; a second question in the same session is answered freely. Each policy reads the same tokens, and
 * nothing of what another one has computed.
 */
enum { ENGINE_LONG_KEYS_MAX = 16 };

struct engine_long_policy {
	const char *label;             /* in rows */
	struct engine_context context; /* max_cache_size 0, unless by_share: what cache_permille says */
};

struct engine_long_params {
	const char *model_path, *device, *kv_type, *rope_scaling; /* as in engine_options */
	int32_t n_threads;
	const int32_t *length;  /* [n_lengths] tokens of the prompt */
	size_t n_lengths;
	/* [n_policies]; "full" is computed in any case, since others are compared with it */
	const struct engine_long_policy *policy;
	size_t n_policies;
	int32_t cache_permille; /* of the length, that other policies than full may keep */
	int32_t n_keys;         /* pass keys in each prompt */
	int32_t text_tokens;    /* of the text that goes on behind the prompt */
	int32_t answer_tokens;  /* of the second answer; 0: it is not asked for */
	const char *text;       /* what prompts are made of, [text_n]; NULL: sentences that are made up */
	size_t text_n;
	bool speed_only;        /* times and bytes: for models whose words mean nothing */
	/* times are those that the process had a processor, as on a machine that others use too; with one thread */
	bool cpu_time;
};

struct engine_long_info {
	const char *backend, *kv_type;
	int32_t n_threads, n_ctx;
	struct engine_rope rope;
	uint64_t kv_bytes_per_token;
};

/* NAN: not measured. */
struct engine_long_row {
	const char *policy;
	int32_t length;
	int32_t tokens_logical, tokens_resident; /* at the end of the forced answer */
	uint64_t resident_bytes;
	int32_t pages_back, tokens_recomputed; /* by page_in */
	double ttft_s;         /* of the prompt, nothing of which was cached */
	double tokens_per_s;   /* of the forced answer */
	/*
	 * mean Kullback-Leibler divergence of a token's distribution from full's, in nats: where the text goes on, and
	 * where keys are asked for and given
	 */
	double kl_text, kl_recall;
	/* share of the tokens of keys, those with digits in them, that are the most likely ones */
	double passkey;
	double passkey_logprob; /* their mean log-probability */
	double agreement;      /* share of the second answer before it differs from full's */
};

struct engine_long_sink {
	void *arg;
	void (*info)(void *arg, const struct engine_long_info *info); /* once, first */
	void (*row)(void *arg, const struct engine_long_row *row);
	void (*left_out)(void *arg, const char *policy, int32_t length, const char *why);
};

/*
 * INVALID names what makes no sense; else as for loading. What a policy refuses, or no context holds, is left out and
 * not an error.
 */
enum status engine_long(const struct engine_long_params *params, const struct engine_long_sink *sink,
                        struct error *err);
