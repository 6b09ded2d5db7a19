#include "engine/text/builtin_templates.h"

const char *template_builtin(const char *name) { (void)name; return 0; }
const char *template_builtin_name(size_t i) { (void)i; return 0; }
