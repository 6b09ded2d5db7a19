/* The part of engine_inspect() behind the file: a description of an open GGUF reader. */
#pragma once

#include <stdbool.h>

#include "engine/base/buf.h"
#include "engine/base/status.h"
#include "engine/model/gguf.h"

/* Appends text for people, or one JSON object and a newline. `path` is shown, not opened. Error: NOMEM. */
enum status inspect_gguf(const struct gguf *g, const char *path, bool json, struct buf *out, struct error *err);
