#include "engine/base/log.h"

#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static _Atomic int min_level = LOG_INFO;
static const char *const level_names[] = {"debug", "info", "warn", "error", "off"};

void log_set_level(enum log_level level)
{
	atomic_store(&min_level, (int)level);
}

bool log_enabled(enum log_level level)
{
	return (int)level >= atomic_load(&min_level);
}

bool log_level_parse(const char *name, enum log_level *out)
{
	for (int i = LOG_DEBUG; i <= LOG_OFF; i++) {
		if (strcmp(name, level_names[i]) == 0) {
			*out = (enum log_level)i;
			return true;
		}
	}
	return false;
}

void log_begin(struct log_line *l, enum log_level level, const char *event)
{
	struct timespec now;
	struct tm tm;
	char stamp[32];
	l->level = level;
	l->text = BUF_INIT;
	if (!log_enabled(level))
		return;
	clock_gettime(CLOCK_REALTIME, &now);
	gmtime_r(&now.tv_sec, &tm);
	strftime(stamp, sizeof stamp, "%Y-%m-%dT%H:%M:%S", &tm);
	buf_printf(&l->text, "time=%s.%03ldZ level=%s event=%s", stamp, now.tv_nsec / 1000000, level_names[level],
	           event);
}

/* A value needs quotes unless it is made of characters that logfmt readers take as they are. */
static bool is_plain(struct str v)
{
	if (v.n == 0)
		return false;
	for (size_t i = 0; i < v.n; i++) {
		unsigned char c = (unsigned char)v.p[i];
		if (c <= ' ' || c >= 0x7f || c == '"' || c == '=' || c == '\\')
			return false;
	}
	return true;
}

void log_str(struct log_line *l, const char *key, struct str value)
{
	if (!log_enabled(l->level))
		return;
	buf_printf(&l->text, " %s=", key);
	if (is_plain(value))
		buf_append(&l->text, value.p, value.n);
	else
		buf_json_string(&l->text, value.p, value.n);
}

void log_text(struct log_line *l, const char *key, const char *value)
{
	log_str(l, key, str_from(value));
}

void log_int(struct log_line *l, const char *key, int64_t value)
{
	if (log_enabled(l->level))
		buf_printf(&l->text, " %s=%lld", key, (long long)value);
}

void log_num(struct log_line *l, const char *key, double value)
{
	if (log_enabled(l->level))
		buf_printf(&l->text, " %s=%.3f", key, value);
}

static _Atomic uint64_t n_lost, n_told;

uint64_t log_n_lost(void)
{
	return atomic_load(&n_lost);
}

/*
 * One write per line keeps lines of different threads apart. A pipe with room says so when PIPE_BUF bytes of it are
 * free, so that a line does not block; one whose reader sleeps must not stop the daemon.
 */
static bool write_line(const char *line, size_t n)
{
	struct pollfd out = {.fd = STDERR_FILENO, .events = POLLOUT};
	return poll(&out, 1, 0) == 1 && (out.revents & POLLOUT) && write(STDERR_FILENO, line, n) == (ssize_t)n;
}

void log_end(struct log_line *l)
{
	if (log_enabled(l->level)) {
		buf_putc(&l->text, '\n');
		uint64_t lost = atomic_load(&n_lost), told = atomic_load(&n_told);
		char line[96];
		if (l->text.failed || !write_line(l->text.data, l->text.len)) {
			atomic_fetch_add(&n_lost, 1);
		} else if (lost > told && atomic_compare_exchange_strong(&n_told, &told, lost)) {
			int n = snprintf(line, sizeof line,
			                 "level=warn event=log msg=\"%llu lines before this one were lost\"\n",
			                 (unsigned long long)(lost - told));
			if (!write_line(line, (size_t)n))
				atomic_fetch_add(&n_lost, 1);
		}
	}
	buf_free(&l->text);
}

void log_msg(enum log_level level, const char *event, const char *fmt, ...)
{
	if (!log_enabled(level))
		return;
	struct log_line l;
	struct buf text = BUF_INIT;
	va_list args;
	va_start(args, fmt);
	buf_vprintf(&text, fmt, args);
	va_end(args);
	log_begin(&l, level, event);
	log_str(&l, "msg", buf_str(&text));
	log_end(&l);
	buf_free(&text);
}
