/*
 * The daemon: the loop thread with its listener, the application and the engine, from start to drained.
 */
#pragma once

#include "config/config.h"
#include "engine/base/status.h"

struct engine_options;

/* What the configuration says of the engine, but for what has to be read from files first. Strings are borrowed. */
void server_engine_options(const struct config *c, struct engine_options *out);

/*
 * Serves until SIGTERM or SIGINT and returns OK once drained; a second signal ends the process at once. An error when
 * it cannot listen or the model cannot be loaded. SIGHUP reads the configuration again, from the arguments that it came
 * from. Changes the process: SIGPIPE is ignored, the limit of open files raised.
 */
enum status server_run(struct config *config, int argc, char **argv, struct error *err);
