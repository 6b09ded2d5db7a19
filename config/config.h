/*
 * The daemon's configuration: defaults, then a JSON file, then the environment, then the command line. Errors name the
 * source (file and line, variable, or argument) and what was expected.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/buf.h"
#include "engine/base/status.h"

#define CONFIG_FIELD_STRING  char *
#define CONFIG_FIELD_BOOL    bool
#define CONFIG_FIELD_INT     int64_t
#define CONFIG_FIELD_BYTES   int64_t
#define CONFIG_FIELD_SECONDS int64_t /* milliseconds */

/* What `kvasir serve` is asked to do instead of serving; the last one named on the command line counts. */
enum config_action { CONFIG_SERVE, CONFIG_HELP, CONFIG_CHECK, CONFIG_PRINT };

struct config {
	enum config_action action;
	bool has_file; /* something was read from a file */
#define OPT(kind, field, name, def, min, max, help) CONFIG_FIELD_##kind field;
#include "config/options.def"
#undef OPT
};

/* Fills in the defaults; free with config_free(). */
enum status config_init(struct config *c);
void config_free(struct config *c);

/*
 * Each layer on top of what is there. A file that cannot be read or holds an unknown or ill-typed option is an error.
 */
enum status config_read_file(struct config *c, const char *path, struct error *err);
enum status config_read_env(struct config *c, char **envp, struct error *err);
/*
 * Reads options from argv[1..argc). An argument that is no option is an error, except that it is stored in *positional
 * (borrowed) when that is not NULL and still empty.
 */
enum status config_read_args(struct config *c, int argc, char **argv, const char **positional, struct error *err);

/*
 * All of the above in order, then config_check(). The arguments may also hold --config FILE (or the environment
 * KVASIR_CONFIG) and --help, --check and --print-config, which set `action`; --help ends the reading.
 */
enum status config_load(struct config *c, int argc, char **argv, char **envp, struct error *err);

/*
 * For a process that runs: reads everything again as config_load() did, from a file that may have changed, and takes
 * over what can change while it runs. Appends the names of these options to `taken` and of others that have changed to
 * `later`, separated by commas. On an error nothing changes.
 */
enum status config_reload(struct config *c, int argc, char **argv, char **envp, struct buf *taken, struct buf *later,
			  struct error *err);

/* What no single option can tell: values that contradict each other or name something unknown. */
enum status config_check(const struct config *c, struct error *err);

/*
 * The value of an option of the form "DIR:SIZE" in its parts: *dir_n bytes of it name the directory. INVALID for any
 * other form.
 */
enum status config_dir_size(const char *option, const char *value, size_t *dir_n, int64_t *bytes, struct error *err);
/*
 * Whether an HTTP header can carry an API key: no control character, and no space at either end, which would be cut
 * off.
 */
bool config_key_fits_header(struct str key);

/* Appends the options with their defaults and help, one a line, for --help. */
void config_help(struct buf *out);
/* Appends the effective configuration as JSON; secrets are shown as "***". */
void config_dump(const struct config *c, struct buf *out);
