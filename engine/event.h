/* Making events; taking them is in engine.h. */
#pragma once

#include "engine/engine.h"

/* A zeroed event of this type, or NULL when there is no memory. */
struct engine_event *event_create(enum engine_event_type type, uint64_t request_id);
/* Makes zeroed memory an event of this type. */
void event_init(struct engine_event *ev, enum engine_event_type type, uint64_t request_id);
/* Turns an event into an ERROR with this error; for answers that must not fail for want of memory. */
void event_set_error(struct engine_event *ev, const struct error *err);
