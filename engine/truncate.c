#include "engine/truncate.h"

#include <stdlib.h>
#include <string.h>

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

static bool begins_with_system(const struct engine_request *r)
{
	const struct value *messages = value_dict_get(r->chat, "messages", 8);
	if (!messages || messages->type != VALUE_LIST || messages->seq->n == 0 ||
	    messages->seq->items[0].type != VALUE_DICT)
		return false;
	const struct value *role = value_dict_get(&messages->seq->items[0], "role", 4);
	return role && role->type == VALUE_STRING && role->s->n == 6 && memcmp(role->s->p, "system", 6) == 0;
}

bool turns_mark(struct engine_request *r, const struct tokenizer *tokenizer, const struct token_buf *tokens)
{
	int32_t bos = tokenizer_bos(tokenizer), mark = -1;
	size_t n = 0;
	for (size_t i = 0; i < tokens->n; i++) {
		if (mark < 0 && tokens->ids[i] != bos && tokenizer_is_special(tokenizer, tokens->ids[i]))
			mark = tokens->ids[i];
		n += mark >= 0 && tokens->ids[i] == mark;
	}
	free(r->turn_starts);
	r->turn_starts = NULL;
	r->n_turn_starts = 0;
	r->system_tokens = 0;
	if (n == 0)
		return true;
	r->turn_starts = malloc(n * sizeof *r->turn_starts);
	if (!r->turn_starts)
		return false;
	for (size_t i = 0; i < tokens->n; i++)
		if (tokens->ids[i] == mark)
			r->turn_starts[r->n_turn_starts++] = (int32_t)i;
	if (n > 1 && begins_with_system(r))
		r->system_tokens = r->turn_starts[1];
	return true;
}
