/* One byte at a time, so that it does not matter how the text is cut into tokens. */
#include "server/tool_parser.h"

#include <stdlib.h>
#include <string.h>

#include "server/json.h"

enum place {
	IN_TEXT,
	BEFORE_OBJECT, /* of a call */
	IN_OBJECT,     /* between members */
	IN_KEY,
	BEFORE_COLON,
	BEFORE_VALUE,
	IN_VALUE,
	AFTER_OBJECT,
};

enum member { OTHER, NAME, ARGUMENTS };

struct tool_parser {
	enum tool_family family;
	const struct buf *names;
	const struct tool_sink *sink;
	void *arg;
	const char *open, *close; /* around calls; "" for none */
	enum place place;
	bool any_text; /* anything but blanks has been seen outside of calls */
	bool any_call;
	bool failed;

	struct buf held; /* IN_TEXT: blanks and the beginning of `open`. AFTER_OBJECT: the beginning of `close` */
	size_t matched;  /* bytes of open or close at the end of `held` */

	struct buf raw;  /* the call so far with its tag, while it may still turn out to be text */
	bool in_list;    /* behind a [ */
	struct buf key, value, name, arguments;
	bool has_name, has_arguments;
	enum member member;
	bool begun; /* the call has been passed on, and its arguments are as they come */
	int depth;  /* of brackets within the value */
	bool in_string, escaped;
};

struct tool_parser *tool_parser_create(enum tool_family family, const struct buf *names, const struct tool_sink *sink,
                                       void *arg)
{
	static const char *const open[] = {
		[TOOLS_TAGGED] = "<tool_call>", [TOOLS_LLAMA] = "<|python_tag|>", [TOOLS_MISTRAL] = "[TOOL_CALLS]"};
	struct tool_parser *p = calloc(1, sizeof *p);
	if (!p)
		return NULL;
	p->family = family;
	p->names = names;
	p->sink = sink;
	p->arg = arg;
	p->open = open[family];
	p->close = family == TOOLS_TAGGED ? "</tool_call>" : "";
	return p;
}

void tool_parser_destroy(struct tool_parser *p)
{
	if (!p)
		return;
	buf_free(&p->held);
	buf_free(&p->raw);
	buf_free(&p->key);
	buf_free(&p->value);
	buf_free(&p->name);
	buf_free(&p->arguments);
	free(p);
}

bool tool_parser_failed(const struct tool_parser *p)
{
	return p->failed || p->held.failed || p->raw.failed || p->key.failed || p->value.failed || p->name.failed ||
	       p->arguments.failed;
}

static bool is_blank(char c)
{
	return c == ' ' || c == '\n' || c == '\r' || c == '\t';
}

/* Empties a buffer, and remembers that it had a hole. */
static void forget(struct tool_parser *p, struct buf *b)
{
	p->failed = p->failed || b->failed;
	buf_clear(b);
}

static void send_text(struct tool_parser *p, const struct buf *b)
{
	if (b->len)
		p->sink->text(p->arg, buf_str(b));
}

/* ---- Text ---- */

static void begin_call(struct tool_parser *p)
{
	forget(p, &p->raw);
	p->place = BEFORE_OBJECT;
	p->in_list = false;
}

static void begin_object(struct tool_parser *p)
{
	p->place = IN_OBJECT;
	forget(p, &p->name);
	forget(p, &p->arguments);
	p->has_name = p->has_arguments = p->begun = false;
}

/* The blanks and the partial tag at the end of `held` were text after all; keeps `n` bytes of it. */
static void release(struct tool_parser *p, size_t keep)
{
	size_t n = p->held.len - keep;
	if (n) {
		p->sink->text(p->arg, (struct str){p->held.data, n});
		memmove(p->held.data, p->held.data + n, keep);
		p->held.len = keep;
	}
}

/* How many bytes at the end of `held` begin the tag. Tags are short. */
static size_t tag_at_end(const struct buf *held, const char *tag)
{
	size_t n = strlen(tag);
	for (size_t k = n < held->len ? n : held->len; k > 0; k--)
		if (memcmp(held->data + held->len - k, tag, k) == 0)
			return k;
	return 0;
}

static void text_byte(struct tool_parser *p, char c)
{
	size_t keep;
	if (p->family == TOOLS_LLAMA && c == '{' && !p->any_text && !p->matched) {
		forget(p, &p->held);
		begin_call(p);
		buf_putc(&p->raw, c);
		begin_object(p);
		return;
	}
	buf_putc(&p->held, c);
	if (p->held.failed)
		return;
	p->matched = tag_at_end(&p->held, p->open);
	if (p->matched == strlen(p->open)) {
		/*
		 * What stands before the tag is text, but for its last blanks, which are none of a text of their own.
		 */
		p->held.len -= p->matched;
		while (p->held.len && is_blank(p->held.data[p->held.len - 1]))
			p->held.len--;
		release(p, 0);
		p->matched = 0;
		begin_call(p);
		buf_puts(&p->raw, p->open);
		return;
	}
	/* Blanks wait for what comes behind them. */
	keep = p->matched;
	while (keep < p->held.len && is_blank(p->held.data[p->held.len - 1 - keep]))
		keep++;
	if (keep < p->held.len)
		p->any_text = true;
	/* Between calls and behind them, blanks are nobody's. */
	if (keep == p->held.len && p->any_call && !p->any_text && p->matched < keep) {
		memmove(p->held.data, p->held.data + keep - p->matched, p->matched);
		p->held.len = keep = p->matched;
	}
	release(p, keep);
}

/* ---- Calls ---- */

/* It was none: what has been read is text, to be looked at no more. */
static void give_back(struct tool_parser *p)
{
	p->place = IN_TEXT;
	p->any_text = true;
	p->matched = 0;
	forget(p, &p->held);
	send_text(p, &p->raw);
	forget(p, &p->raw);
}

static bool is_known(const struct tool_parser *p)
{
	size_t n;
	for (size_t at = 0; at < p->names->len; at += n + 1) {
		n = strlen(p->names->data + at);
		if (str_eq(buf_str(&p->name), (struct str){p->names->data + at, n}))
			return true;
	}
	return false;
}

/* A JSON string's text; false when it is none, or when there is no memory to see. */
static bool decode(struct tool_parser *p, const struct buf *json, struct buf *out)
{
	struct buf object = BUF_INIT;
	struct json_doc *doc = NULL;
	struct json root, v;
	enum status parsed = STATUS_NOMEM;
	bool ok;
	buf_puts(&object, "{\"v\":");
	buf_append_buf(&object, json);
	buf_putc(&object, '}');
	if (!object.failed)
		parsed = json_parse(buf_str(&object), "The text", &doc, &root, NULL);
	p->failed = p->failed || parsed == STATUS_NOMEM;
	ok = parsed == STATUS_OK;
	if (ok) {
		v = json_get(&root, "v");
		ok = json_text(&v).p != NULL;
		forget(p, out);
		buf_append(out, json_text(&v).p, json_text(&v).n);
		p->failed = p->failed || out->failed;
	}
	json_doc_free(doc);
	buf_free(&object);
	return ok;
}

static void announce(struct tool_parser *p)
{
	p->begun = p->any_call = true;
	p->any_text = false;
	p->sink->call(p->arg, buf_str(&p->name));
}

static void object_ends(struct tool_parser *p)
{
	if (!p->begun) {
		struct buf text = BUF_INIT;
		if (!p->has_name) {
			give_back(p);
			return;
		}
		announce(p);
		/* Some models write the arguments as a string that holds JSON. */
		if (p->has_arguments && p->arguments.len && p->arguments.data[0] == '"' &&
		    decode(p, &p->arguments, &text))
			p->sink->arguments(p->arg, buf_str(&text));
		else
			p->sink->arguments(p->arg, p->has_arguments ? buf_str(&p->arguments) : str_from("{}"));
		buf_free(&text);
	}
	forget(p, &p->raw);
	forget(p, &p->held);
	p->matched = 0;
	p->place = p->in_list ? BEFORE_OBJECT : AFTER_OBJECT;
}

static void value_ends(struct tool_parser *p)
{
	p->place = IN_OBJECT;
	if (p->member == NAME) {
		p->has_name = decode(p, &p->value, &p->name) && p->name.len > 0;
		/* Without a tag, only a tool's name tells a call from any other JSON. */
		if (!p->has_name || (p->raw.len && p->raw.data[0] == '{' && !is_known(p)))
			give_back(p);
	} else if (p->member == ARGUMENTS && !p->begun) {
		p->has_arguments = true;
		forget(p, &p->arguments);
		buf_append_buf(&p->arguments, &p->value);
	}
}

static void value_begins(struct tool_parser *p, char c)
{
	struct str key = buf_str(&p->key);
	p->member = OTHER;
	if (str_is(key, "\"name\""))
		p->member = NAME;
	else if (!p->begun && (str_is(key, "\"arguments\"") || str_is(key, "\"parameters\"")))
		p->member = ARGUMENTS;
	forget(p, &p->value);
	p->place = IN_VALUE;
	p->depth = 0;
	p->in_string = p->escaped = false;
	if (p->member == ARGUMENTS && p->has_name && !p->begun && !p->has_arguments && c == '{')
		announce(p);
}

/* True when the byte belongs to the value. */
static bool value_byte(struct tool_parser *p, char c)
{
	bool ends = false;
	if (p->in_string) {
		if (p->escaped)
			p->escaped = false;
		else if (c == '\\')
			p->escaped = true;
		else if (c == '"')
			p->in_string = false, ends = p->depth == 0;
	} else if (c == '"') {
		p->in_string = true;
	} else if (c == '{' || c == '[') {
		p->depth++;
	} else if (c == '}' || c == ']') {
		if (p->depth == 0) {
			value_ends(p);
			return false;
		}
		ends = --p->depth == 0;
	} else if (p->depth == 0 && (c == ',' || is_blank(c))) {
		value_ends(p);
		return false;
	}
	if (p->begun && p->member == ARGUMENTS)
		p->sink->arguments(p->arg, (struct str){&c, 1});
	else
		buf_putc(&p->value, c);
	if (ends)
		value_ends(p);
	return true;
}

static void key_byte(struct tool_parser *p, char c)
{
	buf_putc(&p->key, c);
	if (p->escaped)
		p->escaped = false;
	else if (c == '\\')
		p->escaped = true;
	else if (c == '"')
		p->place = BEFORE_COLON;
}

static void before_object(struct tool_parser *p, char c)
{
	bool list = p->family != TOOLS_LLAMA;
	if (is_blank(c))
		return;
	if (c == '{')
		begin_object(p);
	else if (c == '[' && list && !p->in_list)
		p->in_list = true;
	else if (c == ']' && p->in_list)
		p->place = AFTER_OBJECT;
	else if (!(c == ',' && p->in_list && p->any_call))
		give_back(p);
}

static void in_object(struct tool_parser *p, char c)
{
	if (is_blank(c) || c == ',')
		return;
	if (c == '"') {
		forget(p, &p->key);
		buf_putc(&p->key, c);
		p->escaped = false;
		p->place = IN_KEY;
	} else if (c == '}') {
		object_ends(p);
	} else {
		give_back(p);
	}
}

/* Until the closing tag, or until something else shows that there is none. */
static void after_object(struct tool_parser *p, char c)
{
	if (p->matched == 0 && (is_blank(c) || (p->family == TOOLS_LLAMA && c == ';')))
		return;
	if (p->close[p->matched] && c == p->close[p->matched]) {
		p->matched++;
		buf_putc(&p->held, c);
		if (p->close[p->matched])
			return;
		forget(p, &p->held);
		p->matched = 0;
		p->place = IN_TEXT;
		return;
	}
	/* The bytes that looked like the tag are text; they may begin another. */
	struct buf held = p->held;
	p->failed = p->failed || held.failed;
	p->held = BUF_INIT;
	p->matched = 0;
	p->place = IN_TEXT;
	for (size_t i = 0; i < held.len; i++)
		text_byte(p, held.data[i]);
	buf_free(&held);
	text_byte(p, c);
}

static void byte(struct tool_parser *p, char c)
{
	if (p->place == IN_TEXT) {
		text_byte(p, c);
		return;
	}
	if (p->place != AFTER_OBJECT && !p->begun)
		buf_putc(&p->raw, c);
	switch (p->place) {
	case BEFORE_OBJECT:
		before_object(p, c);
		break;
	case IN_OBJECT:
		in_object(p, c);
		break;
	case IN_KEY:
		key_byte(p, c);
		break;
	case BEFORE_COLON:
		if (c == ':')
			p->place = BEFORE_VALUE;
		else if (!is_blank(c))
			give_back(p);
		break;
	case BEFORE_VALUE:
		if (is_blank(c))
			break;
		value_begins(p, c);
		/* fall through */
	case IN_VALUE:
		if (!value_byte(p, c) && p->place == IN_OBJECT)
			in_object(p, c);
		break;
	case AFTER_OBJECT:
		after_object(p, c);
		break;
	case IN_TEXT:
		break;
	}
}

void tool_parser_push(struct tool_parser *p, struct str text)
{
	for (size_t i = 0; i < text.n; i++)
		byte(p, text.p[i]);
}

void tool_parser_finish(struct tool_parser *p)
{
	switch (p->place) {
	case IN_TEXT:
		/* Blanks behind a call are dropped, others were the text's. */
		if (!p->any_call || p->any_text || p->matched)
			send_text(p, &p->held);
		break;
	case AFTER_OBJECT:
		break;
	default:
		if (!p->begun)
			send_text(p, &p->raw);
	}
	p->place = IN_TEXT;
	forget(p, &p->held);
	forget(p, &p->raw);
}
