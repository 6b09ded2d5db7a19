/* The tojson filter: Python's json.dumps. */
#include <math.h>
#include <stdio.h>

#include "engine/text/template_render.h"
#include "engine/text/template_unicode.h"

static bool add_json(struct render *r, struct text *t, const struct value *v, const struct json_style *style,
		     int depth);

static bool add_string(struct render *r, struct text *t, const struct value *s, bool ensure_ascii)
{
	const char *p = s->s->p;
	size_t n = s->s->n, plain = 0;
	if (!text_puts(r, t, "\""))
		return false;
	for (size_t i = 0; i < n;) {
		unsigned char c = (unsigned char)p[i];
		char escape[16];
		size_t len = 1;
		escape[0] = '\0';
		if (c == '"' || c == '\\') {
			sprintf(escape, "\\%c", c);
		} else if (c < 0x20) {
			static const char short_form[] = "\b\f\n\r\t", letter[] = "bfnrt";
			const char *at = c ? strchr(short_form, c) : NULL;
			if (at)
				sprintf(escape, "\\%c", letter[at - short_form]);
			else
				sprintf(escape, "\\u%04x", c);
		} else if (c >= 0x7f && ensure_ascii) {
			uint32_t cp;
			len = char_next(p + i, n - i, &cp);
			if (cp < 0x10000)
				sprintf(escape, "\\u%04x", cp);
			else
				sprintf(escape, "\\u%04x\\u%04x", 0xd800 + ((cp - 0x10000) >> 10),
					0xdc00 + ((cp - 0x10000) & 0x3ff));
		}
		if (escape[0]) {
			if (!text_add_part(r, t, s, plain, i) ||
			    !text_add_as(r, t, escape, strlen(escape), s, i, i + len))
				return false;
			plain = i + len;
		}
		i += len;
	}
	return text_add_part(r, t, s, plain, n) && text_puts(r, t, "\"");
}

static bool add_number(struct render *r, struct text *t, const struct value *v)
{
	char s[40];
	if (v->type == VALUE_INT)
		snprintf(s, sizeof s, "%lld", (long long)v->i);
	else if (!isfinite(v->f))
		strcpy(s, isnan(v->f) ? "NaN" : v->f < 0 ? "-Infinity" : "Infinity");
	else
		format_float(v->f, s);
	return text_add(r, t, s, strlen(s), v->origin);
}

static bool add_word(struct render *r, struct text *t, const struct value *v)
{
	const char *word = v->type == VALUE_NONE ? "null" : v->b ? "true" : "false";
	return text_add(r, t, word, strlen(word), v->origin);
}

static bool has_indent(const struct json_style *style)
{
	return val_given(&style->indent) && style->indent.type != VALUE_NONE;
}

/* The line end and indentation before an item, where there is any. */
static bool new_line(struct render *r, struct text *t, const struct json_style *style, int level)
{
	if (!has_indent(style))
		return true;
	if (!text_puts(r, t, "\n"))
		return false;
	for (int i = 0; i < level; i++) {
		if (style->indent.type == VALUE_STRING) {
			if (!text_add_value(r, t, &style->indent))
				return false;
			continue;
		}
		for (int64_t k = val_as_int(&style->indent); k > 0; k--)
			if (!render_spend(r, 1) || !text_puts(r, t, " "))
				return false;
	}
	return true;
}

static bool between(struct render *r, struct text *t, const struct json_style *style)
{
	if (val_given(&style->item_separator))
		return text_add_value(r, t, &style->item_separator);
	return text_puts(r, t, has_indent(style) ? "," : ", ");
}

static bool add_list(struct render *r, struct text *t, const struct value_seq *seq, const struct json_style *style,
		     int depth)
{
	if (seq->n == 0)
		return text_puts(r, t, "[]");
	if (!text_puts(r, t, "["))
		return false;
	for (size_t i = 0; i < seq->n; i++)
		if ((i && !between(r, t, style)) || !new_line(r, t, style, depth + 1) ||
		    !add_json(r, t, &seq->items[i], style, depth + 1))
			return false;
	return new_line(r, t, style, depth) && text_puts(r, t, "]");
}

static bool add_key(struct render *r, struct text *t, const struct value *key, const struct json_style *style)
{
	switch (key->type) {
	case VALUE_STRING:
		return add_string(r, t, key, style->ensure_ascii);
	case VALUE_INT:
	case VALUE_FLOAT:
		return text_puts(r, t, "\"") && add_number(r, t, key) && text_puts(r, t, "\"");
	case VALUE_BOOL:
	case VALUE_NONE:
		return text_puts(r, t, "\"") && add_word(r, t, key) && text_puts(r, t, "\"");
	default:
		return render_fail(r, "keys must be str, int, float, bool or None, not %s", type_name(key));
	}
}

static bool add_dict(struct render *r, struct text *t, const struct value_dict *d, const struct json_style *style,
		     int depth)
{
	size_t *order = NULL;
	if (d->n == 0)
		return text_puts(r, t, "{}");
	if (style->sort_keys) {
		struct value *keys = render_alloc(r, d->n * sizeof *keys);
		if (!keys)
			return false;
		for (size_t i = 0; i < d->n; i++)
			keys[i] = d->entries[i].key;
		if (!sort_order(r, keys, d->n, false, &order))
			return false;
	}
	if (!text_puts(r, t, "{"))
		return false;
	for (size_t i = 0; i < d->n; i++) {
		const struct dict_entry *e = &d->entries[order ? order[i] : i];
		if ((i && !between(r, t, style)) || !new_line(r, t, style, depth + 1) || !add_key(r, t, &e->key, style))
			return false;
		if (!(val_given(&style->key_separator) ? text_add_value(r, t, &style->key_separator)
						       : text_puts(r, t, ": ")))
			return false;
		if (!add_json(r, t, &e->value, style, depth + 1))
			return false;
	}
	return new_line(r, t, style, depth) && text_puts(r, t, "}");
}

static bool add_json(struct render *r, struct text *t, const struct value *v, const struct json_style *style, int depth)
{
	if (depth > MAX_VALUE_DEPTH)
		return render_limit(r, "a value is nested too deeply for tojson");
	if (!render_spend(r, 1))
		return false;
	switch (v->type) {
	case VALUE_NONE:
	case VALUE_BOOL:
		return add_word(r, t, v);
	case VALUE_INT:
	case VALUE_FLOAT:
		return add_number(r, t, v);
	case VALUE_STRING:
		return add_string(r, t, v, style->ensure_ascii);
	case VALUE_LIST:
	case VALUE_TUPLE:
		return add_list(r, t, v->seq, style, depth);
	case VALUE_DICT:
		return add_dict(r, t, v->dict, style, depth);
	default:
		return render_fail(r, "Object of type %s is not JSON serializable", type_name(v));
	}
}

bool text_add_json(struct render *r, struct text *t, const struct value *v, const struct json_style *style)
{
	return add_json(r, t, v, style, 0);
}
