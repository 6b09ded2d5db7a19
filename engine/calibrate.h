/* What must be known of a device before it has served anybody. */
#pragma once

#include "engine/engine_internal.h"
#include "engine/sched.h"

/* A first prompt, of nobody: how fast this device computes must be known before a page can be weighed against it. */
void calibrate_prefill(struct engine *e, struct sched *sched);
