/* The one table of routes, and what happens before a handler runs: lookup, CORS, the API key. */
#pragma once

#include "server/http.h"

/* struct http_app.dispatch. Answers OPTIONS, 404, 405 and 401 itself and returns NULL then. */
const struct route *routes_dispatch(struct http_exchange *x, void *app);
/* struct http_app.streams. A path that is written in an unusual way (percent-encoded) streams nothing. */
bool routes_streams(void *app, enum http_method method, struct str target);
