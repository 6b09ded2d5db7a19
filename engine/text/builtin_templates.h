/* Chat templates by name, for models that carry none or one that cannot run (--chat-template NAME). */
#pragma once

#include <stddef.h>

/* The Jinja source of a template, or NULL when there is none of that name. */
const char *template_builtin(const char *name);
/* The name of the i-th template, or NULL past the last one. */
const char *template_builtin_name(size_t i);
