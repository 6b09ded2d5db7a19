/* API keys. */
#pragma once

#include <stdbool.h>

#include "config/config.h"
#include "engine/base/str.h"

/*
 * True when no key is configured, or when the client presents it: `authorization` is the Authorization header ("Bearer
 * KEY", any case), `x_api_key` the X-Api-Key header; absent ones have p == NULL. Takes as long for a wrong key as for
 * the right one.
 */
bool auth_check(const struct config *config, struct str authorization, struct str x_api_key);
