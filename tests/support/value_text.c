#include "tests/support/value_text.h"

#include "engine/text/value_internal.h"

static void write_items(const struct value *v, struct buf *out)
{
	buf_putc(out, '[');
	for (size_t i = 0; i < v->seq->n; i++) {
		if (i)
			buf_putc(out, ',');
		value_text_write(&v->seq->items[i], out);
	}
	buf_putc(out, ']');
}

static void write_entries(const struct value *v, struct buf *out)
{
	buf_putc(out, '{');
	for (size_t i = 0; i < v->dict->n; i++) {
		const struct value *key = &v->dict->entries[i].key;
		if (i)
			buf_putc(out, ',');
		buf_json_string(out, key->s->p, key->s->n);
		buf_putc(out, ':');
		value_text_write(&v->dict->entries[i].value, out);
	}
	buf_putc(out, '}');
}

void value_text_write(const struct value *v, struct buf *out)
{
	switch (v->type) {
	case VALUE_NONE:
		buf_puts(out, "null");
		break;
	case VALUE_BOOL:
		buf_puts(out, v->b ? "true" : "false");
		break;
	case VALUE_INT:
		buf_printf(out, "%lld", (long long)v->i);
		break;
	case VALUE_FLOAT:
		buf_json_number(out, v->f);
		break;
	case VALUE_STRING:
		if (v->origin != VALUE_DATA)
			buf_putc(out, '!');
		buf_json_string(out, v->s->p, v->s->n);
		break;
	case VALUE_LIST:
		write_items(v, out);
		break;
	case VALUE_DICT:
		write_entries(v, out);
		break;
	default:
		buf_printf(out, "<type %d>", v->type);
	}
}
