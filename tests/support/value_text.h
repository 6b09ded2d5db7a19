/* A template value as JSON, with a mark on text that is not VALUE_DATA: what tests compare. */
#pragma once

#include "engine/base/buf.h"
#include "engine/text/value.h"

/* Appends it. Strings of VALUE_DATA are "text", trusted ones are !"text". */
void value_text_write(const struct value *v, struct buf *out);
