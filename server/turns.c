#include "server/turns.h"

#include <stdlib.h>

#include "server/messages.h"

enum status turns_read(struct turns *t, const struct json *messages, struct error *err)
{
	int32_t last = -1;
	*t = (struct turns){.n = json_len(messages)};
	t->of = malloc((t->n + 1) * sizeof *t->of);
	if (!t->of)
		return error_set(err, STATUS_NOMEM, "There is no memory for the request.");
	for (size_t i = 0; i < t->n; i++) {
		struct json message = json_at(messages, i), role = json_get(&message, "role");
		struct str name = json_text(&role);
		bool stays = chat_is_system(name);
		if (!stays && (last < 0 || str_is(name, "user")))
			last++;
		t->of[i] = stays ? -1 : last;
	}
	return STATUS_OK;
}

void turns_keep_first(struct turns *t)
{
	for (size_t i = 0; i < t->n; i++)
		t->of[i] -= t->of[i] >= 0;
}

void turns_free(struct turns *t)
{
	free(t->of);
	*t = (struct turns){NULL, 0};
}

enum status turns_give(const struct turns *t, size_t n_before, struct engine_request *r, struct error *err)
{
	r->n_turn_of = n_before + t->n;
	r->turn_of = malloc((r->n_turn_of + 1) * sizeof *r->turn_of);
	if (!r->turn_of)
		return error_set(err, STATUS_NOMEM, "There is no memory for the request.");
	for (size_t i = 0; i < n_before; i++)
		r->turn_of[i] = -1;
	if (t->n)
		memcpy(r->turn_of + n_before, t->of, t->n * sizeof *t->of);
	return STATUS_OK;
}

void turns_write(const struct turns *t, size_t skip, int32_t n_dropped, struct buf *out)
{
	bool first = true;
	if (n_dropped == 0)
		return;
	buf_printf(out, ",\"truncated\":{\"turns\":%d,\"messages\":[", n_dropped);
	for (size_t i = skip; i < t->n; i++) {
		if (t->of[i] < 0 || t->of[i] >= n_dropped)
			continue;
		buf_printf(out, first ? "%zu" : ",%zu", i - skip);
		first = false;
	}
	buf_puts(out, "]}");
}
