/*
 * Chat templates: the part of Jinja2 that published chat templates use, as transformers configures it (trim_blocks,
 * lstrip_blocks, loop controls, tojson without HTML escaping). Compiled once, rendered many times, from any thread.
 *
 * Rendering is sandboxed: it may take a bounded number of evaluation steps, a bounded depth and a bounded amount of
 * memory, and reaches nothing outside its variables.
 */
#pragma once

#include <stdint.h>

#include "engine/base/buf.h"
#include "engine/base/status.h"
#include "engine/text/value.h"

struct template;

/* A range of bytes of a rendered prompt that came from data (see value.h); ranges ascend and do not touch. */
struct text_span {
	size_t begin, end;
};

struct rendered {
	struct buf text;
	struct text_span *data; /* [n_data] */
	size_t n_data;
};

struct template_limits {
	uint64_t max_steps;     /* 0: default */
	size_t max_memory;      /* bytes for temporaries and output; 0: default */
};

/* UNSUPPORTED or INVALID with the construct and its line when the source cannot be compiled. */
enum status template_compile(const char *source, size_t n, struct template **out, struct error *err);
void template_destroy(struct template *t); /* NULL is allowed */

/*
 * Renders with the variables of `vars` (a dict: messages, add_generation_prompt, bos_token, tools, ...). now_unix_s is
 * what strftime_now formats, as UTC. `out` must be zeroed; free it with rendered_free() also after an error. INVALID
 * when the template itself refuses (raise_exception, its message is the error's) or misuses a value, LIMIT when the
 * sandbox ends it.
 */
enum status template_render(const struct template *t, const struct value *vars, int64_t now_unix_s,
                            const struct template_limits *limits, struct rendered *out, struct error *err);
void rendered_free(struct rendered *r);
