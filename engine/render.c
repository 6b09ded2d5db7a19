/* Chat templates without an engine, for tools: engine.h, "Offline tools". */
#include <stdlib.h>

#include "engine/text/builtin_templates.h"
#include "engine/text/template.h"
#include "engine/tools.h"

struct engine_template {
	struct template *compiled;
};

const char *engine_builtin_template(const char *name)
{
	return template_builtin(name);
}

enum status engine_template_open(const char *source, size_t n, struct engine_template **out, struct error *err)
{
	*out = NULL;
	struct engine_template *t = calloc(1, sizeof *t);
	if (!t)
		return error_set(err, STATUS_NOMEM, "no memory for the chat template");
	enum status st = template_compile(source, n, &t->compiled, err);
	if (st != STATUS_OK) {
		free(t);
		return st;
	}
	*out = t;
	return STATUS_OK;
}

void engine_template_close(struct engine_template *t)
{
	if (!t)
		return;
	template_destroy(t->compiled);
	free(t);
}

enum status engine_template_render(const struct engine_template *t, const struct value *vars, int64_t now_unix_s,
				   struct buf *out, struct error *err)
{
	struct rendered r = {0};
	enum status st = template_render(t->compiled, vars, now_unix_s, NULL, &r, err);
	if (st == STATUS_OK) {
		struct str text = buf_str(&r.text);
		buf_append(out, text.p, text.n);
		if (out->failed)
			st = error_set(err, STATUS_NOMEM, "no memory for the prompt");
	}
	rendered_free(&r);
	return st;
}
