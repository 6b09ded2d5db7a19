/*
 * Log lines: one event a line, logfmt (`time=... level=info event=request id=7 ...`) on stderr.
 * Values that came from outside are escaped, so no client can forge a line. Safe from any thread.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/buf.h"

enum log_level { LOG_DEBUG, LOG_INFO, LOG_WARN, LOG_ERROR, LOG_OFF };

/* Lines below `level` are dropped. Default: LOG_INFO. */
void log_set_level(enum log_level level);
bool log_enabled(enum log_level level);
/* The level called `name` ("debug" ... "off"); false when there is none. */
bool log_level_parse(const char *name, enum log_level *out);

/*
 * Lines that nobody got: stderr was closed, its disk was full, its reader did not keep up (nothing waits for it), or
 * there was no memory for the line. The next line that is written is followed by one that tells of them.
 */
uint64_t log_n_lost(void);

/* A line under construction. Start it, add fields, end it; the line is written whole by log_end(). */
struct log_line {
	enum log_level level;
	struct buf text;
};

void log_begin(struct log_line *l, enum log_level level, const char *event);
void log_str(struct log_line *l, const char *key, struct str value);
void log_text(struct log_line *l, const char *key, const char *value);
void log_int(struct log_line *l, const char *key, int64_t value);
void log_num(struct log_line *l, const char *key, double value);
void log_end(struct log_line *l);

/* A line with a formatted `msg` field. */
void log_msg(enum log_level level, const char *event, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
