#include "engine/parked.h"

#include <stdlib.h>

void parking_init(struct parking *p, struct kv_pool *pool)
{
	*p = (struct parking){.pool = pool};
	list_init(&p->all);
}

void parked_destroy(struct parked *k)
{
	if (!k)
		return;
	k->parking->n_pages -= k->kv.n_pages;
	kv_seq_release(k->parking->pool, &k->kv);
	k->session->parked = NULL;
	list_remove(&k->link);
	token_buf_free(&k->tokens);
	free(k);
}

bool parking_drop_oldest(struct parking *p)
{
	if (list_empty(&p->all))
		return false;
	p->n_dropped++;
	parked_destroy(list_entry(p->all.next, struct parked, link));
	return true;
}

void park(struct parking *p, struct request *r)
{
	parked_destroy(r->session->parked);
	struct parked *k = calloc(1, sizeof *k);
	if (!k)
		return;
	*k = (struct parked){.parking = p,
			     .session = r->session,
			     .tokens = r->tokens,
			     .kv = r->kv,
			     .root = r->chain.root,
			     .policy = r->policy,
			     .trigger = r->trigger};
	r->tokens = (struct token_buf){NULL, 0, 0};
	r->kv = KV_SEQ_INIT;
	kv_seq_charge(&k->kv, NULL);
	kv_seq_label(p->pool, &k->kv, (struct kv_holder){KV_HOLDER_SESSION, k->session->serial});
	k->session->parked = k;
	list_push_back(&p->all, &k->link);
	p->n_pages += k->kv.n_pages;
	p->n_parked++;
	while (p->n_pages > kv_pool_n_pages(p->pool) / 2)
		parking_drop_oldest(p);
}

bool unpark(struct request *r)
{
	struct parked *k = r->session ? r->session->parked : NULL;
	if (!k || memcmp(&k->root, &r->chain.root, sizeof k->root) != 0)
		return false;
	/* A turn goes on under a policy that has been set off. */
	bool set_off =
		request_waits(r) && trigger_same(&k->trigger, &r->trigger) && k->trigger.fired != ENGINE_TRIGGER_NONE;
	if (!kv_policy_same(&k->policy, &r->policy) && !(set_off && kv_policy_same_but_when(&k->policy, &r->policy)))
		return false;
	int32_t n = tokens_common_prefix(k->tokens.ids, k->kv.n_tokens, r->tokens.ids, (int32_t)r->tokens.n - 1);
	/* What it begins with was dropped meanwhile. */
	if (n < k->kv.dropped_at)
		return false;
	/* Rows that are none of this conversation's have counted. */
	if (k->policy.by_mass && n < k->kv.n_tokens)
		return false;
	struct kv_seq had = r->kv;
	struct parking *p = k->parking;
	kv_seq_truncate(p->pool, &k->kv, n);
	p->n_pages -= k->kv.n_pages;
	r->kv = k->kv;
	k->kv = KV_SEQ_INIT;
	if (set_off) {
		r->policy = k->policy;
		r->trigger = k->trigger;
		trigger_reset_look(&r->trigger);
	}
	r->kv.account = NULL;
	kv_seq_label(p->pool, &r->kv, had.holder);
	kv_seq_charge(&r->kv, had.account);
	kv_seq_release(p->pool, &had);
	parked_destroy(k);
	p->n_resumed++;
	return true;
}
