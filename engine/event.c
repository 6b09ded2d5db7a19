#include "engine/event.h"

#include <stdlib.h>

void event_init(struct engine_event *ev, enum engine_event_type type, uint64_t request_id)
{
	list_init(&ev->link);
	ev->type = type;
	ev->request_id = request_id;
	ev->stop_index = -1;
}

struct engine_event *event_create(enum engine_event_type type, uint64_t request_id)
{
	struct engine_event *ev = calloc(1, sizeof *ev);
	if (ev)
		event_init(ev, type, request_id);
	return ev;
}

void event_set_error(struct engine_event *ev, const struct error *err)
{
	ev->type = ENGINE_EVENT_ERROR;
	ev->error = *err;
}

void engine_event_free(struct engine_event *ev)
{
	if (!ev)
		return;
	buf_free(&ev->text);
	buf_free(&ev->piece);
	free(ev->tokens);
	free(ev->logprobs);
	free(ev->chunks);
	free(ev->sessions);
	free(ev->kv);
	free(ev);
}
