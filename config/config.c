#include "config/config.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#ifdef HAVE_JANSSON
#include <jansson.h>
#endif

#include "config/option.h"
#include "engine/base/log.h"

/* STRING rows carry their default in def_text, the others in def. */
#define ROW_STRING(field, name, def, min, max, help)                                                                   \
	{                                                                                                              \
		OPTION_STRING, name, offsetof(struct config, field), def, 0, 0, 0, 0, help                             \
	}
#define ROW_BOOL(field, name, def, min, max, help)                                                                     \
	{                                                                                                              \
		OPTION_BOOL, name, offsetof(struct config, field), NULL, 0, def, min, max, help                        \
	}
#define ROW_INT(field, name, def, min, max, help)                                                                      \
	{                                                                                                              \
		OPTION_INT, name, offsetof(struct config, field), NULL, 0, def, min, max, help                         \
	}
#define ROW_BYTES(field, name, def, min, max, help)                                                                    \
	{                                                                                                              \
		OPTION_BYTES, name, offsetof(struct config, field), NULL, 0, def, min, max, help                       \
	}
#define ROW_SECONDS(field, name, def, min, max, help)                                                                  \
	{                                                                                                              \
		OPTION_SECONDS, name, offsetof(struct config, field), NULL, 0, def, min, max, help                     \
	}

static const struct option rows[] = {
#define OPT(kind, field, name, def, min, max, help) ROW_##kind(field, name, def, min, max, help),
#include "config/options.def"
#undef OPT
};

static const struct option_table table = {rows, sizeof rows / sizeof *rows};

/* Options whose value is not for everybody's eyes. */
static const char *const secrets[] = {"api-key", "transfer-key"};

/* api-keys may be the path of a file, which is no secret, or what would be in it. */
static bool is_secret(const struct option *o, const char *json)
{
	if (strcmp(o->name, "api-keys") == 0)
		return str_starts(str_from(json), "\"{");
	for (size_t i = 0; i < sizeof secrets / sizeof *secrets; i++)
		if (strcmp(o->name, secrets[i]) == 0)
			return true;
	return false;
}

enum status config_init(struct config *c)
{
	memset(c, 0, sizeof *c);
	return option_defaults(table, c);
}

void config_free(struct config *c)
{
	option_free(table, c);
}

#ifdef HAVE_JANSSON

enum { CONFIG_FILE_MAX = 1 << 20 };

static enum status read_text(const char *path, struct buf *out, struct error *err)
{
	enum status st = STATUS_IO;
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return error_set(err, STATUS_IO, "%s: cannot be opened: %s", path, strerror(errno));
	for (;;) {
		if (!buf_reserve(out, 65536)) {
			st = error_set(err, STATUS_NOMEM, "out of memory");
			break;
		}
		ssize_t n = read(fd, out->data + out->len, 65536);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0) {
			error_set(err, STATUS_IO, "%s: cannot be read: %s", path, strerror(errno));
			break;
		}
		if (n == 0) {
			st = STATUS_OK;
			break;
		}
		out->len += (size_t)n;
		out->data[out->len] = '\0';
		if (out->len > CONFIG_FILE_MAX) {
			st = error_set(err, STATUS_LIMIT, "%s: larger than a configuration file may be (%d bytes)",
			               path, CONFIG_FILE_MAX);
			break;
		}
	}
	close(fd);
	return st;
}

/*
 * The line of a top-level key, which the parsed tree no longer knows. The text is valid JSON by now. A key written with
 * escapes is not found; its error then names line 1.
 */
static int line_of_key(const char *text, const char *key)
{
	int line = 1, depth = 0;
	size_t key_n = strlen(key);
	for (const char *p = text; *p; p++) {
		if (*p == '\n')
			line++;
		else if (*p == '{' || *p == '[')
			depth++;
		else if (*p == '}' || *p == ']')
			depth--;
		if (*p != '"')
			continue;
		const char *start = ++p;
		while (*p && *p != '"')
			p += *p == '\\' && p[1] ? 2 : 1;
		if (!*p)
			break;
		if (depth != 1 || (size_t)(p - start) != key_n || memcmp(start, key, key_n) != 0)
			continue;
		if (p[1 + strspn(p + 1, " \t\r\n")] == ':')
			return line;
	}
	return 1;
}

/* The JSON types that suit a kind, so that "port": "8080" is a mistake and "kv_memory": "8G" is not. */
static enum status set_from_json(struct config *c, const struct option *o, const json_t *v, const char *where,
                                 struct error *err)
{
	char shown[32];
	bool unit = o->kind == OPTION_BYTES || o->kind == OPTION_SECONDS;
	if (json_is_string(v)) {
		struct str text = {json_string_value(v), json_string_length(v)};
		return o->kind == OPTION_STRING || unit ? option_set(o, c, text, where, err)
		                                        : option_refuse(o, text, where, err);
	}
	if (json_is_boolean(v)) {
		struct str text = str_from(json_is_true(v) ? "true" : "false");
		return o->kind == OPTION_BOOL ? option_set(o, c, text, where, err) : option_refuse(o, text, where, err);
	}
	if (json_is_number(v)) {
		if (json_is_integer(v))
			snprintf(shown, sizeof shown, "%lld", (long long)json_integer_value(v));
		else
			snprintf(shown, sizeof shown, "%.15g", json_real_value(v));
		return o->kind == OPTION_INT || unit ? option_set(o, c, str_from(shown), where, err)
		                                     : option_refuse(o, str_from(shown), where, err);
	}
	return option_refuse(o, str_from(json_is_array(v) ? "[...]" : "{...}"), where, err);
}

enum status config_read_file(struct config *c, const char *path, struct error *err)
{
	struct buf text = BUF_INIT;
	json_t *root = NULL;
	json_error_t json_err;
	const char *key;
	json_t *value;
	enum status st = read_text(path, &text, err);
	if (st != STATUS_OK)
		goto out;
	root = json_loadb(text.data, text.len, JSON_REJECT_DUPLICATES, &json_err);
	if (!root) {
		st = error_set(err, STATUS_INVALID, "%s:%d: not valid JSON: %s", path, json_err.line, json_err.text);
		goto out;
	}
	if (!json_is_object(root)) {
		st = error_set(err, STATUS_INVALID, "%s:1: expected one JSON object with options", path);
		goto out;
	}
	json_object_foreach(root, key, value) {
		char where[300];
		struct str name = str_from(key);
		const struct option *o = option_find(table, name);
		snprintf(where, sizeof where, "%.280s:%d", path, line_of_key(text.data, key));
		if (!o) {
			const char *nearest = option_nearest(table, name);
			st = error_set(err, STATUS_INVALID, "%s: unknown option \"%.60s\"%s%s%s", where, key,
			               nearest ? "; did you mean \"" : "", nearest ? nearest : "",
			               nearest ? "\"?" : "");
			goto out;
		}
		if (json_is_null(value))
			continue; /* "not set here" */
		st = set_from_json(c, o, value, where, err);
		if (st != STATUS_OK)
			goto out;
	}
out:
	json_decref(root);
	buf_free(&text);
	return st;
}

#else

enum status config_read_file(struct config *c, const char *path, struct error *err)
{
	(void)c;
	return error_set(err, STATUS_UNSUPPORTED,
	                 "%s: this build reads no configuration files (it has no JSON library)", path);
}

#endif

static const char env_prefix[] = "KVASIR_";

enum status config_read_env(struct config *c, char **envp, struct error *err)
{
	for (char **e = envp; e && *e; e++) {
		const char *equals = strchr(*e, '=');
		char name[64], where[80];
		size_t n = 0;
		if (!equals || strncmp(*e, env_prefix, sizeof env_prefix - 1) != 0)
			continue;
		for (const char *p = *e + sizeof env_prefix - 1; p < equals && n < sizeof name - 1; p++)
			name[n++] = *p == '_' ? '-' : (char)(*p >= 'A' && *p <= 'Z' ? *p - 'A' + 'a' : *p);
		/* Other KVASIR_ variables may belong to scripts around the daemon, so unknown ones are no error. */
		const struct option *o = option_find(table, (struct str){name, n});
		if (!o)
			continue;
		snprintf(where, sizeof where, "%.*s", (int)(equals - *e), *e);
		enum status st = option_set(o, c, str_from(equals + 1), where, err);
		if (st != STATUS_OK)
			return st;
	}
	return STATUS_OK;
}

enum status config_read_args(struct config *c, int argc, char **argv, const char **positional, struct error *err)
{
	int n = 0;
	return option_read_args(table, c, argc, argv, positional, positional && !*positional ? 1 : 0, &n, err);
}

enum status config_dir_size(const char *option, const char *value, size_t *dir_n, int64_t *bytes, struct error *err)
{
	const struct option size = {OPTION_BYTES, option, 0, NULL, 0, 0, 1, INT64_MAX, NULL};
	const char *colon = strrchr(value, ':');
	if (!colon || colon == value || option_set(&size, bytes, str_from(colon + 1), "", NULL) != STATUS_OK)
		return error_set_param(err, STATUS_INVALID, option,
		                       "%s: \"%.200s\" does not fit; expected DIR:SIZE, such as /var/cache/kvasir:20G",
		                       option, value);
	*dir_n = (size_t)(colon - value);
	return STATUS_OK;
}

bool config_key_fits_header(struct str key)
{
	for (size_t i = 0; i < key.n; i++) {
		unsigned char c = (unsigned char)key.p[i];
		if (c < 0x20 || c == 0x7f || (c == ' ' && (i == 0 || i + 1 == key.n)))
			return false;
	}
	return true;
}

/* scheme://host or scheme://host:port, as browsers send it in Origin (RFC 6454, 6.2): without a path, not even "/". */
static bool is_origin(struct str s)
{
	const char *colon = memchr(s.p, ':', s.n);
	size_t scheme = colon ? (size_t)(colon - s.p) : 0;
	if (str_is(s, "null"))
		return true;
	if (scheme == 0 || s.n > 255 || s.n - scheme < 4 || memcmp(colon, "://", 3) != 0)
		return false;
	for (size_t i = 0; i < s.n; i++) {
		char c = s.p[i];
		bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
		             c == '.';
		if (!plain && (i < scheme ? c != '+' : i >= scheme + 3 && (!c || !strchr("_:[]", c))))
			return false;
	}
	return true;
}

static enum status check_origins(const char *list, struct error *err)
{
	if (strcmp(list, "*") == 0)
		return STATUS_OK;
	for (const char *p = list + strspn(list, ", "); *p; p += strspn(p, ", ")) {
		struct str origin = {p, strcspn(p, ", ")};
		if (!is_origin(origin))
			return error_set_param(err, STATUS_INVALID, "cors-origin",
			                       "cors-origin: \"%.*s\" is no origin; expected * alone, or origins such "
			                       "as https://chat.example and http://localhost:3000",
			                       (int)(origin.n < 100 ? origin.n : 100), origin.p);
		p += origin.n;
	}
	return STATUS_OK;
}

enum status config_check(const struct config *c, struct error *err)
{
	enum log_level level;
	if (!log_level_parse(c->log_level, &level))
		return error_set_param(err, STATUS_INVALID, "log-level",
		                       "log-level: \"%.40s\" does not fit; expected debug, info, warn, error or off",
		                       c->log_level);
	size_t dir_n;
	int64_t bytes;
	if (c->transfer_key && strlen(c->transfer_key) < 16)
		return error_set(err, STATUS_INVALID,
		                 "transfer-key: expected a secret of at least 16 characters, such as `openssl rand "
		                 "-hex 32` gives");
	if (c->kv_disk && config_dir_size("kv-disk", c->kv_disk, &dir_n, &bytes, err) != STATUS_OK)
		return STATUS_INVALID;
	if (c->kv_overflow_disk &&
	    config_dir_size("kv-overflow-disk", c->kv_overflow_disk, &dir_n, &bytes, err) != STATUS_OK)
		return STATUS_INVALID;
	if (c->cors_origin && check_origins(c->cors_origin, err) != STATUS_OK)
		return STATUS_INVALID;
	if (c->api_key && !config_key_fits_header(str_from(c->api_key)))
		return error_set_param(err, STATUS_INVALID, "api-key",
		                       "api-key: a header cannot carry it: there is a line break or another control "
		                       "character in it, or a space at its end");
	if (!*c->host)
		return error_set_param(err, STATUS_INVALID, "host",
		                       "host: expected an address such as 127.0.0.1 or 0.0.0.0");
	if (c->step_tokens < c->max_running)
		return error_set_param(err, STATUS_INVALID, "step-tokens",
		                       "step-tokens (%lld) is less than max-running (%lld): a step must have a row for "
		                       "each running generation",
		                       (long long)c->step_tokens, (long long)c->max_running);
	if (c->session_heartbeat > c->session_ttl)
		return error_set_param(
			err, STATUS_INVALID, "session-heartbeat",
			"session-heartbeat (%g s) is longer than session-ttl (%g s), so it could never matter",
			(double)c->session_heartbeat / 1000, (double)c->session_ttl / 1000);
	return STATUS_OK;
}

static const char *env_get(char **envp, const char *name)
{
	size_t n = strlen(name);
	for (char **e = envp; e && *e; e++)
		if (strncmp(*e, name, n) == 0 && (*e)[n] == '=')
			return *e + n + 1;
	return NULL;
}

/*
 * Splits the arguments into those about the reading itself (--config and the actions) and the options, which go to
 * `rest`. A word that is the value of an option ("--model --check") never counts as an argument of its own.
 */
static enum status split_args(struct config *c, int argc, char **argv, char **rest, int *n_rest, const char **file,
                              struct error *err)
{
	static const struct {
		const char *name;
		enum config_action action;
	} actions[] = {{"--help", CONFIG_HELP},
	               {"-h", CONFIG_HELP},
	               {"--check", CONFIG_CHECK},
	               {"--print-config", CONFIG_PRINT}};
	int n = 0;
	rest[n++] = argv[0];
	for (int i = 1; i < argc; i++) {
		bool is_action = false;
		for (size_t k = 0; k < sizeof actions / sizeof *actions; k++) {
			if (strcmp(argv[i], actions[k].name) == 0) {
				c->action = actions[k].action;
				is_action = true;
			}
		}
		if (is_action)
			continue;
		if (strncmp(argv[i], "--config=", 9) == 0) {
			*file = argv[i] + 9;
		} else if (strcmp(argv[i], "--config") == 0) {
			if (++i == argc)
				return error_set(err, STATUS_INVALID,
				                 "--config needs a value; expected the path of a JSON file");
			*file = argv[i];
		} else {
			const struct option *o = strncmp(argv[i], "--", 2) == 0 && !strchr(argv[i], '=')
			                                 ? option_find(table, str_from(argv[i] + 2))
			                                 : NULL;
			rest[n++] = argv[i];
			if (o && o->kind != OPTION_BOOL && i + 1 < argc)
				rest[n++] = argv[++i];
		}
	}
	*n_rest = n;
	return STATUS_OK;
}

/*
 * An empty text means "not set" for the options that have no default: a unit file or a container description can then
 * pass a variable on whether it is set or not.
 */
static void drop_empty(struct config *c)
{
	for (size_t i = 0; i < table.n; i++) {
		char **field = (char **)((char *)c + rows[i].offset);
		if (rows[i].kind == OPTION_STRING && !rows[i].def_text && *field && !**field) {
			free(*field);
			*field = NULL;
		}
	}
}

enum status config_load(struct config *c, int argc, char **argv, char **envp, struct error *err)
{
	const char *file = env_get(envp, "KVASIR_CONFIG");
	int n_rest = 0;
	char **rest = calloc((size_t)argc + 1, sizeof *rest);
	if (!rest)
		return error_set(err, STATUS_NOMEM, "out of memory");
	enum status st = split_args(c, argc, argv, rest, &n_rest, &file, err);
	if (st != STATUS_OK || c->action == CONFIG_HELP)
		goto out;
	if (file && *file) {
		c->has_file = true;
		st = config_read_file(c, file, err);
		if (st != STATUS_OK)
			goto out;
	}
	st = config_read_env(c, envp, err);
	if (st != STATUS_OK)
		goto out;
	st = config_read_args(c, n_rest, rest, NULL, err);
	if (st != STATUS_OK)
		goto out;
	drop_empty(c);
	st = config_check(c, err);
out:
	free(rest);
	return st;
}

/* Each of these is looked at whenever it matters, by the loop thread, which is the one that reads it again. */
static const char *const changeable[] = {
	"strict-model",	  "cors-origin",   "max-body",	   "stream-buffer",
	"header-timeout", "body-timeout",  "idle-timeout", "max-connections-per-address",
	"ws-park-after",  "drain-timeout", "log-level"};

static bool can_change(const struct option *o)
{
	for (size_t i = 0; i < sizeof changeable / sizeof *changeable; i++)
		if (strcmp(o->name, changeable[i]) == 0)
			return true;
	return false;
}

enum status config_reload(struct config *c, int argc, char **argv, char **envp, struct buf *taken, struct buf *later,
			  struct error *err)
{
	struct config next;
	enum status st = config_init(&next);
	st = st == STATUS_OK ? config_load(&next, argc, argv, envp, err) : error_set(err, st, "out of memory");
	for (size_t i = 0; st == STATUS_OK && i < table.n; i++) {
		const struct option *o = &table.rows[i];
		if (option_same(o, c, &next))
			continue;
		struct buf *list = can_change(o) ? taken : later;
		buf_printf(list, "%s%s", list->len ? ", " : "", o->name);
		if (can_change(o))
			option_swap(o, c, &next);
	}
	config_free(&next);
	return st;
}

void config_help(struct buf *out)
{
	option_help(table, out);
}

void config_dump(const struct config *c, struct buf *out)
{
	buf_puts(out, "{\n");
	for (size_t i = 0; i < table.n; i++) {
		const struct option *o = &table.rows[i];
		buf_puts(out, "  \"");
		for (const char *p = o->name; *p; p++)
			buf_putc(out, *p == '-' ? '_' : *p);
		buf_puts(out, "\": ");
		struct buf value = BUF_INIT;
		option_json(o, c, &value);
		if (value.data && strcmp(value.data, "null") != 0 && is_secret(o, value.data))
			buf_puts(out, "\"***\"");
		else
			buf_append(out, value.data ? value.data : "null", value.data ? value.len : 4);
		buf_free(&value);
		buf_puts(out, i + 1 < table.n ? ",\n" : "\n");
	}
	buf_puts(out, "}\n");
}
