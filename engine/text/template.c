#include "engine/text/template.h"

#include <stdio.h>
#include <stdlib.h>

#include "engine/base/utf8.h"
#include "engine/text/template_render.h"

enum {
	MAX_SOURCE_BYTES = 4 << 20,
	MAX_TREE_BYTES = 256 << 20,
	DEFAULT_MEMORY_BYTES = 256 << 20,
	DEFAULT_STEPS = 10000000,
};

/* ---- Compiling ---- */

/* Copies the source with \r\n and \r turned into \n, as Jinja2 does. */
static struct str normalise(struct arena *a, const char *source, size_t n)
{
	char *p = arena_alloc(a, n + 1);
	if (!p)
		return (struct str){NULL, 0};
	size_t out = 0;
	for (size_t i = 0; i < n; i++) {
		if (source[i] == '\r') {
			p[out++] = '\n';
			i += i + 1 < n && source[i + 1] == '\n';
		} else {
			p[out++] = source[i];
		}
	}
	return (struct str){p, out};
}

enum status template_compile(const char *source, size_t n, struct template **out, struct error *err)
{
	*out = NULL;
	if (n > MAX_SOURCE_BYTES)
		return error_set(err, STATUS_LIMIT, "the template has %zu bytes, more than %d", n, MAX_SOURCE_BYTES);
	struct token_list tokens = {0};
	enum status status = STATUS_NOMEM;
	struct template *t = calloc(1, sizeof *t);
	if (!t || !(t->arena = arena_create(MAX_TREE_BYTES))) {
		error_set(err, STATUS_NOMEM, "out of memory while compiling a template");
		goto fail;
	}
	struct str text = normalise(t->arena, source, n);
	if (!text.p) {
		error_set(err, STATUS_NOMEM, "out of memory while compiling a template");
		goto fail;
	}
	status = template_lex(text.p, text.n, &tokens, err);
	if (status == STATUS_OK)
		status = template_parse(t, &tokens, err);
	if (status == STATUS_OK)
		status = template_resolve(t, err);
	if (status != STATUS_OK)
		goto fail;
	free(tokens.items);
	*out = t;
	return STATUS_OK;
fail:
	free(tokens.items);
	template_destroy(t);
	return status;
}

void template_destroy(struct template *t)
{
	if (!t)
		return;
	arena_destroy(t->arena);
	free(t);
}

/* ---- State of a rendering ---- */

void render_set_failure(struct render *r, enum status status, const char *fmt, ...)
{
	if (r->status != STATUS_OK)
		return;
	va_list args;
	va_start(args, fmt);
	vsnprintf(r->message, sizeof r->message, fmt, args);
	va_end(args);
	/* A message cut in the middle of a character would not be valid text. */
	size_t n = strlen(r->message);
	r->message[n - utf8_incomplete_tail(r->message, n)] = '\0';
	r->status = status;
}

bool render_exhausted(struct render *r, size_t n)
{
	/* The arena rounds up and heads each of its chunks. */
	size_t used = arena_used(r->arena) + 64;
	if (used >= r->max_memory || n >= r->max_memory - used)
		return render_limit(r, "the template takes more than %zu bytes of memory", r->max_memory);
	render_set_failure(r, STATUS_NOMEM, "out of memory while rendering the template");
	return false;
}

void *render_alloc(struct render *r, size_t n)
{
	void *p = arena_alloc(r->arena, n);
	if (!p)
		render_exhausted(r, n);
	return p;
}

/* Moves the finished text into memory that outlives the rendering. */
static enum status hand_over(const struct text *t, struct rendered *out)
{
	if (t->n)
		buf_append(&out->text, t->p, t->n);
	else
		buf_reserve(&out->text, 0);
	if (t->n_data) {
		out->data = malloc(t->n_data * sizeof *out->data);
		if (!out->data)
			return STATUS_NOMEM;
		memcpy(out->data, t->data, t->n_data * sizeof *out->data);
		out->n_data = t->n_data;
	}
	return out->text.failed ? STATUS_NOMEM : STATUS_OK;
}

enum status template_render(const struct template *t, const struct value *vars, int64_t now_unix_s,
			    const struct template_limits *limits, struct rendered *out, struct error *err)
{
	if (!vars || vars->type != VALUE_DICT)
		return error_set(err, STATUS_INVALID, "the variables of a template must be a dict");
	struct text text = {0};
	struct render r = {
		.steps = limits && limits->max_steps ? limits->max_steps : DEFAULT_STEPS,
		.max_memory = limits && limits->max_memory ? limits->max_memory : DEFAULT_MEMORY_BYTES,
		.now_unix_s = now_unix_s,
		.vars = vars->dict,
		.out = &text,
	};
	r.arena = arena_create(r.max_memory);
	if (!r.arena)
		return error_set(err, STATUS_NOMEM, "out of memory while rendering the template");
	struct activation *a = activation_new(&r, &t->root, NULL);
	if (a && scope_enter(&r, a, &t->root.scope))
		exec_body(&r, a, t->root.body);
	enum status status = r.status;
	if (status == STATUS_OK) {
		status = hand_over(&text, out);
		if (status != STATUS_OK)
			error_set(err, status, "out of memory while rendering the template");
	} else if (r.refused) {
		error_set(err, status, "%s", r.message);
	} else {
		error_set(err, status, "%s (line %d of the template)", r.message, r.line);
	}
	arena_destroy(r.arena);
	return status;
}

void rendered_free(struct rendered *r)
{
	buf_free(&r->text);
	free(r->data);
	r->data = NULL;
	r->n_data = 0;
}
