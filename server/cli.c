#include "server/cli.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/tools.h"

/* One line, whatever is quoted in it: file names and values may hold line ends and a terminal's control characters. */
static void complain(const char *text)
{
	fputs("kvasir: ", stderr);
	for (const char *p = text; *p; p++) {
		unsigned char c = (unsigned char)*p;
		if (c < 0x20 || c == 0x7f)
			fprintf(stderr, "\\x%02x", c);
		else
			fputc(c, stderr);
	}
	fputc('\n', stderr);
}

int cli_fail(const struct error *err)
{
	complain(err->message);
	return CLI_FAILED;
}

int cli_misuse(const char *fmt, ...)
{
	char text[1024];
	va_list args;
	va_start(args, fmt);
	vsnprintf(text, sizeof text, fmt, args);
	va_end(args);
	complain(text);
	return CLI_USAGE;
}

static volatile sig_atomic_t interrupted;

static void on_interrupt(int signo)
{
	(void)signo;
	interrupted = 1;
}

void cli_catch_interrupt(void)
{
	struct sigaction action = {.sa_handler = on_interrupt};
	sigaction(SIGINT, &action, NULL);
	signal(SIGPIPE, SIG_IGN);
}

bool cli_interrupted(void)
{
	return interrupted != 0;
}

enum status cli_wait_ready(struct engine *e, struct error *err)
{
	while (engine_state(e) == ENGINE_LOADING && !interrupted) {
		struct list events;
		list_init(&events);
		engine_wait(e, &events, CLI_POLL_MS);
		for (struct list *node; (node = list_pop_front(&events)) != NULL;)
			engine_event_free(list_entry(node, struct engine_event, link));
	}
	if (interrupted)
		return error_set(err, STATUS_CANCELLED, "interrupted");
	if (engine_state(e) != ENGINE_FAILED)
		return STATUS_OK;
	*err = *engine_load_error(e);
	return err->status;
}

bool cli_write(const char *data, size_t n)
{
	while (n) {
		ssize_t done = write(STDOUT_FILENO, data, n);
		if (done < 0 && errno == EINTR)
			continue;
		if (done < 0)
			return false;
		data += done;
		n -= (size_t)done;
	}
	return true;
}

static void show_usage(const struct cli_usage *usage)
{
	struct buf b = BUF_INIT;
	buf_printf(&b, "usage: %s\n\n%s\n\n", usage->synopsis, usage->about);
	option_help(usage->options, &b);
	if (b.data)
		cli_write(b.data, b.len);
	buf_free(&b);
}

enum cli_step cli_read_args(const struct cli_usage *usage, void *base, int argc, char **argv, const char **positional,
                            int *exit_status)
{
	struct error err;
	int n = 0;
	*exit_status = CLI_USAGE;
	if (option_defaults(usage->options, base) != STATUS_OK) {
		*exit_status = cli_misuse("out of memory");
		return CLI_STOP;
	}
	for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++) {
		if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
			show_usage(usage);
			*exit_status = CLI_OK;
			return CLI_STOP;
		}
	}
	if (option_read_args(usage->options, base, argc, argv, positional, positional ? 1 : 0, &n, &err) != STATUS_OK) {
		fprintf(stderr, "kvasir: %s\nusage: %s\n", err.message, usage->synopsis);
		return CLI_STOP;
	}
	return CLI_RUN;
}

enum status cli_read_file(const char *path, struct buf *out, struct error *err)
{
	bool is_stdin = strcmp(path, "-") == 0;
	const char *shown = is_stdin ? "standard input" : path;
	enum status st = STATUS_OK;
	int fd = is_stdin ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return error_set(err, STATUS_IO, "%s: cannot be opened: %s", path, strerror(errno));
	for (;;) {
		if (!buf_reserve(out, 65536)) {
			st = error_set(err, STATUS_NOMEM, "%s: out of memory", shown);
			break;
		}
		ssize_t n = read(fd, out->data + out->len, 65536);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			st = error_set(err, STATUS_IO, "%s: cannot be read: %s", shown, strerror(errno));
		if (n <= 0)
			break;
		out->len += (size_t)n;
		out->data[out->len] = '\0';
	}
	if (!is_stdin)
		close(fd);
	return st;
}

enum status cli_chat_template(const char *name_or_path, struct buf *out, struct error *err)
{
	const char *source;
	if (access(name_or_path, F_OK) == 0)
		return cli_read_file(name_or_path, out, err);
	source = engine_builtin_template(name_or_path);
	if (!source)
		return error_set_param(
			err, STATUS_NOT_FOUND, "chat-template",
			"chat-template: \"%.200s\" is neither a file nor the name of a built-in template",
			name_or_path);
	buf_puts(out, source);
	return out->failed ? error_set(err, STATUS_NOMEM, "out of memory") : STATUS_OK;
}

enum status cli_api_keys(const char *path_or_json, struct buf *out, struct error *err)
{
	if (path_or_json[0] != '{')
		return cli_read_file(path_or_json, out, err);
	buf_puts(out, path_or_json);
	return out->failed ? error_set(err, STATUS_NOMEM, "out of memory") : STATUS_OK;
}

enum status cli_each_line(enum status (*line)(void *arg, const char *text, size_t n, struct buf *out,
                                              struct error *err),
                          void *arg, struct error *err)
{
	enum status st = STATUS_OK;
	struct buf out = BUF_INIT;
	char *text = NULL;
	size_t cap = 0;
	ssize_t n;
	while (st == STATUS_OK && (n = getline(&text, &cap, stdin)) >= 0) {
		while (n && (text[n - 1] == '\n' || text[n - 1] == '\r'))
			n--;
		if (n == 0)
			continue;
		buf_clear(&out);
		st = line(arg, text, (size_t)n, &out, err);
		if (st != STATUS_OK)
			break;
		buf_putc(&out, '\n');
		if (out.failed)
			st = error_set(err, STATUS_NOMEM, "out of memory");
		else if (!cli_write(out.data, out.len))
			st = error_set(err, STATUS_IO, "standard output: cannot be written: %s", strerror(errno));
	}
	if (st == STATUS_OK && ferror(stdin))
		st = error_set(err, STATUS_IO, "standard input: cannot be read");
	free(text);
	buf_free(&out);
	return st;
}

void cli_error_line(const struct error *err, struct buf *out)
{
	buf_puts(out, "{\"error\":");
	buf_json_string(out, err->message, strlen(err->message));
	buf_putc(out, '}');
}

enum status cli_read_numbers(const char *name, const char *text, struct cli_numbers *out, struct error *err)
{
	const char *p = text;
	while (*p) {
		char *end;
		long n = strtol(p, &end, 10);
		if (end == p || (*p < '0' || *p > '9') || n > INT32_MAX || (*end && *end != ',') ||
		    (*end == ',' && !end[1]))
			return error_set_param(err, STATUS_INVALID, name,
			                       "%s: \"%.64s\" is no list of numbers with commas between them", name,
			                       text);
		if (out->n == CLI_NUMBERS_MAX)
			return error_set_param(err, STATUS_INVALID, name, "%s: more than %d numbers", name,
			                       CLI_NUMBERS_MAX);
		out->item[out->n++] = (int32_t)n;
		p = *end ? end + 1 : end;
	}
	return STATUS_OK;
}

void cli_json_number(struct buf *out, const char *key, double x)
{
	buf_printf(out, ",\"%s\":", key);
	buf_json_number(out, x);
}

void cli_json_string(struct buf *out, const char *key, const char *text)
{
	buf_printf(out, ",\"%s\":", key);
	buf_json_string(out, text, strlen(text));
}
