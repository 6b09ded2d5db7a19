/*
 * Compaction: the older turns of a conversation that has grown past a threshold are put into a summary by the same
 * model, and the conversation goes on from that. Asked for as in OpenAI's Responses API (developers.openai.com,
 * "Compaction"), with fields of our own:
 *
 *     "context_management": [{"type": "compaction", "compact_threshold": 6000, "max_output_tokens": 512, "keep_turns":
 * 2}]
 *
 * The summary is one more answer to the conversation up to there, so that all it takes is in the KV cache but for the
 * question. What is read from then on, the window, is: the system messages that stood before, the short question and
 * the summary as one turn, and the turns that stay, word for word. Turns are whole always (turns.h), and the last one
 * stays.
 *
 * A compaction measures the conversation, has the summary written, and measures what came of it. It may be in line, for
 * an answer that waits, or in the background, in the time that a conversation idles (engine_request.background); that
 * one computes the KV of the window as well. What goes wrong is told, and leaves the conversation as it was.
 */
#pragma once

#include "server/generation.h"

struct compact_settings {
	int32_t threshold;	   /* tokens of a rendered prompt; 0: never */
	int32_t max_output_tokens; /* of the summary */
	int32_t keep_turns;	   /* that stay as they are, the latest */
};

/* Reads context_management; INVALID says what is possible. `info` may be NULL only where nothing is accepted anyway. */
enum status compact_read(const struct json *body, const struct engine_info *info, struct compact_settings *out,
			 struct error *err);
/* For a summary that is asked for without any: a quarter of the context is the threshold that sizes are taken from. */
struct compact_settings compact_defaults(const struct engine_info *info);
/* Refuses it for requests that have nowhere to show a summary: `instead` says what there is. */
enum status compact_refuse(const struct json *body, const char *instead, struct error *err);

/* What came of it. */
struct compacted {
	struct buf window;  /* comma-separated chat messages; empty: the conversation is as it was */
	struct buf summary; /* its text */
	bool cut;	    /* the summary reached its max_output_tokens */
	bool background;
	int32_t turns, messages; /* that it stands for, in all; its window begins with them, as one turn behind the
				    system messages */
	int32_t tokens_before, tokens_after; /* of the prompt; before: also when nothing had to be done */
	int64_t input_tokens, cached_tokens, output_tokens; /* of writing it */
	char failed[512];				    /* why there is none although there should be; "" */
};

void compacted_free(struct compacted *c);
/* Appends what an answer's usage and its kv_cache tell: ",\"compaction\":{...}"; nothing when nothing was done. */
void compacted_write(const struct compacted *c, struct buf *out);

/* What the first turn of a window stands for; no turns: it is none. */
struct compact_base {
	int32_t turns, messages;
};

/*
 * encrypted_content: all that an input that begins with this item has to bring along. The name is OpenAI's; it is the
 * client's own text.
 */
void compact_write_content(struct compact_base base, const struct buf *window, struct buf *out);
/* The output item; `summary` and the counts are for people. */
void compact_write_item(const struct compacted *c, const char *id, const struct buf *content, struct buf *out);

/* The conversation and how it is rendered. All is copied. */
struct compact_request {
	struct compact_settings settings;
	struct str instructions; /* as JSON: a string, or anything else for none */
	struct str tools;	 /* chat tools as a JSON array, or empty */
	bool tools_as_text;
	struct str messages;		   /* comma-separated chat messages */
	struct compact_base base;	   /* of these messages */
	const struct engine_request *like; /* tenant, salt, context policy, timeout */
	int32_t answer_tokens;		   /* that have to fit behind the prompt; -1: an eighth of the context */
	bool force;			   /* whatever its length is */
	bool background;		   /* implies force */
	const struct generation_origin *origin;
	const char *session; /* of the conversation, or "" */
};

/* What is told of a compaction to whoever watches its session. */
struct compact_note {
	enum { COMPACT_NOTE_STARTED, COMPACT_NOTE_DONE, COMPACT_NOTE_FAILED } state;
	bool background;
	int32_t tokens_before, tokens_after, turns; /* the latter two when it is done */
};

struct compact_ops {
	/*
	 * The conversation is longer than the threshold. False: the owner does something else instead, and the
	 * compaction is gone. May be NULL.
	 */
	bool (*needed)(void *arg);
	/*
	 * Called once, never from within compact_start(); the compaction is gone then. f: the conversation itself
	 * cannot be read, or the server ends; NULL otherwise, and *c is the owner's.
	 */
	void (*done)(void *arg, struct compacted *c, const struct failure *f);
};

struct compact;

/* NOMEM; INVALID and UNSUPPORTED as chat_build() says. */
enum status compact_start(struct app *a, const struct compact_request *q, const struct compact_ops *ops, void *arg,
			  struct compact **out, struct error *err);
/* Nothing is heard of it any more. NULL is allowed. */
void compact_cancel(struct compact *c);
/* Whether the summary is being written, so that it is worth waiting for. */
bool compact_is_writing(const struct compact *c);
/* Somebody waits for it: it is in the background no longer. */
void compact_hurry(struct compact *c);

enum { COMPACT_MAX_BACKGROUND = 8 }; /* compactions in the background at a time; more are left to the next turn */
