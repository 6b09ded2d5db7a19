#include "engine/trigger.h"

struct trigger trigger_of(const struct engine_context *asked)
{
	return (struct trigger){
		.free_pages = asked->trigger_free_pages,
		.entropy = (uint64_t)(asked->trigger_entropy * (1 << KV_MASS_BITS) + 0.5),
	};
}

bool trigger_waits_for_room(const struct trigger *t)
{
	return t->free_pages > 0 && t->fired == ENGINE_TRIGGER_NONE;
}

bool trigger_watches(const struct trigger *t)
{
	return t->entropy > 0 && t->fired == ENGINE_TRIGGER_NONE;
}

bool trigger_same(const struct trigger *a, const struct trigger *b)
{
	return a->free_pages == b->free_pages && a->entropy == b->entropy;
}

bool trigger_fire(struct trigger *t, enum engine_trigger why, int32_t n_tokens)
{
	if (t->fired != ENGINE_TRIGGER_NONE)
		return false;
	t->fired = why;
	t->fired_at = n_tokens;
	return true;
}

bool trigger_saw(struct trigger *t, int32_t position, const struct attention_look *look)
{
	uint64_t n = look->n - t->before.n, entropy = look->entropy - t->before.entropy;
	t->before = *look;
	if (n == 0 || position < t->next || !trigger_watches(t))
		return false;
	uint64_t *place = &t->seen[t->n_seen++ % TRIGGER_WINDOW];
	t->next = position + 1;
	t->sum += entropy / n - *place;
	*place = entropy / n;
	return t->n_seen >= TRIGGER_WINDOW && t->sum < TRIGGER_WINDOW * t->entropy &&
	       trigger_fire(t, ENGINE_TRIGGER_ENTROPY, position + 1);
}

void trigger_reset_look(struct trigger *t)
{
	t->before = (struct attention_look){0};
}
