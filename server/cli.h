/*
 * The commands of `kvasir`, one file each, and what they share. A command gets argv[0] as its own name and returns the
 * exit status of the process.
 */
#pragma once

#include <stdbool.h>

#include "config/option.h"
#include "engine/base/buf.h"
#include "engine/base/status.h"

enum {
	CLI_OK = 0,
	CLI_FAILED = 1, /* what was asked could not be done */
	CLI_USAGE = 2,  /* what was asked makes no sense */
};

int cli_serve(int argc, char **argv);
int cli_health(int argc, char **argv);
int cli_inspect(int argc, char **argv);
int cli_bench(int argc, char **argv);
int cli_bench_long(int argc, char **argv); /* `kvasir bench long` */
int cli_plan(int argc, char **argv);
int cli_tokenize(int argc, char **argv);
int cli_render(int argc, char **argv);
int cli_replay(int argc, char **argv);
int cli_generate(int argc, char **argv);
int cli_chunk(int argc, char **argv);

/* What a command takes, for its --help. */
struct cli_usage {
	const char *synopsis; /* "kvasir inspect FILE [--json]" */
	const char *about;    /* a sentence or two */
	struct option_table options;
};

enum cli_step { CLI_RUN, CLI_STOP };

/*
 * Fills the fields at `base` with defaults, then with the arguments; at most one positional argument, when `positional`
 * is not NULL. CLI_STOP: the command returns *exit_status at once (help was shown, or a mistake named). In either case
 * the caller ends with option_free().
 */
enum cli_step cli_read_args(const struct cli_usage *usage, void *base, int argc, char **argv, const char **positional,
                            int *exit_status);

/* "kvasir: MESSAGE" on stderr; returns CLI_FAILED. */
int cli_fail(const struct error *err);
/* The same for a mistake in the arguments; returns CLI_USAGE. */
int cli_misuse(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* ---- Commands that generate, and may be interrupted ---- */

struct engine;

enum { CLI_POLL_MS = 100 /* how soon Ctrl-C is seen when no token comes */ };

/* From now on Ctrl-C is remembered rather than deadly, and a reader that is gone is an error of writing. */
void cli_catch_interrupt(void);
bool cli_interrupted(void);
/* Waits until the model is there: CANCELLED after Ctrl-C, or why it could not be loaded. */
enum status cli_wait_ready(struct engine *e, struct error *err);

enum { CLI_NUMBERS_MAX = 32 };

struct cli_numbers {
	int32_t item[CLI_NUMBERS_MAX];
	size_t n;
};

/* Appends numbers with commas between them; nothing at all is an empty list. INVALID names the option. */
enum status cli_read_numbers(const char *name, const char *text, struct cli_numbers *out, struct error *err);

/* Append ,"KEY":VALUE to an object that is begun. */
void cli_json_number(struct buf *out, const char *key, double x);
void cli_json_string(struct buf *out, const char *key, const char *text);

/* Writes all of it to stdout now; false (and errno) when nobody can read it any more. */
bool cli_write(const char *data, size_t n);
/* Reads a whole file, or stdin for "-". */
enum status cli_read_file(const char *path, struct buf *out, struct error *err);

/* What --api-keys FILE|JSON means: the text that begins with a brace, or the content of the file. */
enum status cli_api_keys(const char *path_or_json, struct buf *out, struct error *err);

/*
 * What --chat-template NAME|FILE means: the content of the file if there is one, else the built-in template of that
 * name.
 */
enum status cli_chat_template(const char *name_or_path, struct buf *out, struct error *err);

/*
 * Calls `line` for each line of stdin, without its newline; empty lines are skipped. What it appends to `out` is
 * written to stdout as one line. Stops with its status, or with IO when stdout is closed.
 */
enum status cli_each_line(enum status (*line)(void *arg, const char *text, size_t n, struct buf *out,
                                              struct error *err),
                          void *arg, struct error *err);
/* Appends {"error":"MESSAGE"}: the answer to a line that is wrong. */
void cli_error_line(const struct error *err, struct buf *out);
