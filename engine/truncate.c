#include "engine/truncate.h"

#include "engine/text/value_internal.h"

int32_t truncate_most(const struct engine_request *r)
{
	int32_t last = 0;
	for (size_t i = 0; r->turn_of && i < r->n_turn_of; i++)
		last = r->turn_of[i] > last ? r->turn_of[i] : last;
	return last;
}

const struct value *truncate_messages(struct engine_request *r)
{
	const struct value *found = value_dict_get(r->chat, "messages", 8);
	struct value *copy = value_list(r->arena);
	if (!copy || !found || found->type != VALUE_LIST || found->seq->n != r->n_turn_of)
		return NULL;
	*copy = *found; /* the dict's own is replaced */
	return copy;
}

bool truncate_turns(struct engine_request *r, const struct value *all, int32_t n)
{
	struct value *rest = value_list(r->arena);
	bool ok = rest != NULL;
	for (size_t i = 0; ok && i < r->n_turn_of; i++)
		if (r->turn_of[i] < 0 || r->turn_of[i] >= n)
			ok = value_list_add(r->arena, rest, &all->seq->items[i]);
	return ok && value_dict_set(r->arena, r->chat, "messages", 8, rest);
}
