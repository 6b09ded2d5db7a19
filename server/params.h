/*
 * The parameters that the generation endpoints share: sampling, limits, stops, streaming, session. Explicit nulls mean
 * absence, unknown fields are ignored, and each wrong type or value out of range is INVALID and names its parameter.
 * What a client may ask for and this server cannot do (best_of, a schema it cannot enforce, ...) is UNSUPPORTED rather
 * than ignored.
 */
#pragma once

#include "engine/engine.h"
#include "server/json.h"
#include "server/tools.h"

enum { PARAMS_MAX_CHOICES = 128, PARAMS_MAX_STOPS = 16 };

enum params_api { PARAMS_COMPLETION, PARAMS_CHAT, PARAMS_RESPONSE };

struct params {
	struct engine_request *proto; /* what every member starts from, without a prompt */
	int32_t n;		      /* choices */
	bool stream, include_usage, continuous_usage;
	bool echo;	       /* COMPLETION */
	bool return_token_ids; /* COMPLETION and CHAT */
	bool tell_kv_cache;    /* the answer says what was kept */
	bool truncate;	       /* CHAT and RESPONSE: the oldest turns may be left out */
	bool has_temperature, has_top_p, has_max_tokens;
	struct tools tools; /* CHAT and RESPONSE */
};

/*
 * tenant: who asks. session_header: the x-session-token header, used when the body has no session_id. Free with
 * params_free() in any case.
 */
enum status params_parse(struct params *p, struct engine *e, int32_t tenant, const struct json *body,
                         enum params_api api, struct str session_header, struct error *err);
void params_free(struct params *p);

/*
 * A request of its own for one choice: a copy of the prototype, whose seed is the given one plus `choice`. Only the
 * first choice uses the session itself; the others share its pages. NULL when there is no memory.
 */
struct engine_request *params_request(const struct params *p, struct engine *e, int choice);

/* Copies a session id: INVALID unless it is 1-64 of [A-Za-z0-9_.-]. */
enum status params_session_id(struct str s, const char *param, char out[ENGINE_SESSION_ID_MAX + 1], struct error *err);
