/* The builders of value.h, recording: what was built can be written as JSON, with a mark on text that is not
 * VALUE_DATA. */
#pragma once

#include "engine/base/buf.h"
#include "engine/text/value.h"

/* Strings of VALUE_DATA are "text", trusted ones are !"text". */
void fake_value_write(const struct value *v, struct buf *out);
