#include "engine/kv/prefix.h"

#include <stdlib.h>
#include <string.h>

/* ---- Keys ---- */

static void put_field(struct sha256 *s, const void *data, size_t n)
{
	uint8_t length[8];
	for (int i = 0; i < 8; i++)
		length[i] = (uint8_t)((uint64_t)n >> (8 * i));
	sha256_update(s, length, sizeof length);
	sha256_update(s, data, n);
}

static void put_int(struct sha256 *s, int32_t v)
{
	uint8_t bytes[4];
	for (int i = 0; i < 4; i++)
		bytes[i] = (uint8_t)((uint32_t)v >> (8 * i));
	put_field(s, bytes, sizeof bytes);
}

static void put_tag(struct sha256 *s, const char *tag)
{
	put_field(s, tag, strlen(tag));
}

void kv_key_root(const struct kv_root *root, struct kv_key *out)
{
	struct sha256 s;
	sha256_init(&s);
	put_tag(&s, "kvasir kv root 2");
	put_field(&s, root->weights, sizeof root->weights);
	put_field(&s, root->adapter, sizeof root->adapter);
	put_int(&s, root->n_layer);
	put_int(&s, root->n_head_kv);
	put_int(&s, root->head_dim);
	put_int(&s, root->page_tokens);
	put_int(&s, root->kv_type);
	put_field(&s, root->scheme.p, root->scheme.n);
	put_field(&s, root->rope.p, root->rope.n);
	put_field(&s, root->tenant.p, root->tenant.n);
	put_field(&s, root->salt.p, root->salt.n);
	sha256_final(&s, out->bytes);
}

static void key_of_page(const char *tag, const struct kv_key *before, const int32_t *tokens, int32_t n,
                        struct kv_key *out)
{
	struct sha256 s;
	uint8_t bytes[KV_PAGE_TOKENS * 4];
	for (int i = 0; i < n; i++) {
		for (int b = 0; b < 4; b++)
			bytes[i * 4 + b] = (uint8_t)((uint32_t)tokens[i] >> (8 * b));
	}
	sha256_init(&s);
	put_tag(&s, tag);
	put_field(&s, before->bytes, sizeof before->bytes);
	put_field(&s, bytes, (size_t)n * 4);
	sha256_final(&s, out->bytes);
}

void kv_key_next(const struct kv_key *before, const int32_t *tokens, struct kv_key *out)
{
	key_of_page("kvasir kv page 1", before, tokens, KV_PAGE_TOKENS, out);
}

void kv_key_tail(const struct kv_key *before, const int32_t *tokens, int32_t n, struct kv_key *out)
{
	key_of_page("kvasir kv tail 1", before, tokens, n, out);
}

struct kv_chain kv_chain_of(const struct kv_key *root)
{
	return (struct kv_chain){.root = *root};
}

void kv_chain_free(struct kv_chain *c)
{
	free(c->keys);
	*c = kv_chain_of(&c->root);
}

/* ---- The index ---- */

enum {
	NO_NODE = EVICT_NONE,
	/* How many continuations of a page are looked at for one that begins alike; the latest used come first. */
	MAX_CHILDREN_COMPARED = 32,
};

static const uint64_t NO_SERIAL = UINT64_MAX; /* no entry's: they are counted from 1 */

/* In whose name the index holds pages. */
static const struct kv_holder self = {KV_HOLDER_INDEX, 0};

/* A page has at most one entry, so entries live in an array by page number and adding one cannot fail. */
struct node {
	struct kv_key key;
	int32_t tokens[KV_PAGE_TOKENS];
	int32_t n_tokens;  /* KV_PAGE_TOKENS, or fewer: a tail */
	int32_t parent;    /* page, or NO_NODE for a first page */
	int32_t first_child, next_sibling, prev_sibling; /* pages, or NO_NODE; first pages have no siblings */
	int32_t hash_next; /* page, or NO_NODE */
	uint64_t serial;   /* every entry has its own */
	int32_t n_weak;    /* weak references to it */
	uint64_t user;     /* the request that used it last */
	bool present, held; /* held: others have references too */
};

static const struct kv_key_ops sha256_keys = {kv_key_next, kv_key_tail};

struct kv_prefix {
	struct kv_pool *pool;
	const struct kv_key_ops *keys;
	struct evict *evict; /* its slots are pages */
	struct node *nodes;  /* [n_pages] */
	int32_t *buckets;    /* [n_buckets] page, or NO_NODE */
	size_t n_buckets;    /* a power of two */
	void (*leaving)(void *arg, int32_t page, const struct kv_page_name *name); /* or NULL */
	void *leaving_arg;
	uint64_t last_serial;
	struct kv_prefix_stats stats;
};

static void watch(void *arg, int32_t page, bool idle)
{
	struct kv_prefix *p = arg;
	p->nodes[page].held = !idle;
	p->stats.n_idle += idle ? 1 : -1;
	evict_idle(p->evict, page, idle);
}

enum status kv_prefix_create(struct kv_pool *pool, const char *policy, struct kv_prefix **out, struct error *err)
{
	int32_t n_pages = kv_pool_n_pages(pool);
	enum status st = STATUS_NOMEM;
	struct kv_prefix *p = calloc(1, sizeof *p);
	if (!p)
		return error_set(err, STATUS_NOMEM, "no memory for the prefix index");
	p->pool = pool;
	p->keys = &sha256_keys;
	p->n_buckets = 16;
	while (p->n_buckets < (size_t)n_pages)
		p->n_buckets *= 2;
	p->nodes = calloc((size_t)n_pages, sizeof *p->nodes);
	p->buckets = malloc(p->n_buckets * sizeof *p->buckets);
	if (!p->nodes || !p->buckets) {
		error_set(err, st, "no memory for a prefix index of %d pages", n_pages);
		goto fail;
	}
	st = evict_create(policy, n_pages, &p->evict, err);
	if (st != STATUS_OK)
		goto fail;
	for (size_t i = 0; i < p->n_buckets; i++)
		p->buckets[i] = NO_NODE;
	kv_pool_watch(pool, watch, p);
	*out = p;
	return STATUS_OK;

fail:
	free(p->nodes);
	free(p->buckets);
	free(p);
	return st;
}

void kv_prefix_set_key_ops(struct kv_prefix *p, const struct kv_key_ops *ops)
{
	p->keys = ops;
}

static int32_t *bucket_of(const struct kv_prefix *p, const struct kv_key *key)
{
	uint64_t h;
	memcpy(&h, key->bytes, sizeof h);
	return &p->buckets[h & (p->n_buckets - 1)];
}

static void leave_siblings(struct kv_prefix *p, int32_t page)
{
	struct node *n = &p->nodes[page];
	if (n->parent == NO_NODE)
		return;
	*(n->prev_sibling == NO_NODE ? &p->nodes[n->parent].first_child : &p->nodes[n->prev_sibling].next_sibling) =
		n->next_sibling;
	if (n->next_sibling != NO_NODE)
		p->nodes[n->next_sibling].prev_sibling = n->prev_sibling;
}

static void enter_siblings(struct kv_prefix *p, int32_t page)
{
	struct node *n = &p->nodes[page];
	if (n->parent == NO_NODE)
		return;
	n->prev_sibling = NO_NODE;
	n->next_sibling = p->nodes[n->parent].first_child;
	if (n->next_sibling != NO_NODE)
		p->nodes[n->next_sibling].prev_sibling = page;
	p->nodes[n->parent].first_child = page;
}

/* Takes an entry out and gives its reference back. The eviction engine has removed it, or is about to end. */
static void unlink_node(struct kv_prefix *p, int32_t page)
{
	struct node *n = &p->nodes[page];
	int32_t *at = bucket_of(p, &n->key);
	while (*at != page)
		at = &p->nodes[*at].hash_next;
	*at = n->hash_next;
	leave_siblings(p, page);
	p->stats.n_pages--;
	p->stats.n_tails -= n->n_tokens < KV_PAGE_TOKENS;
	p->stats.n_idle -= !n->held;
	n->present = false;
	kv_pool_mark(p->pool, page, false);
	kv_pool_unref(p->pool, page, self);
}

void kv_prefix_destroy(struct kv_prefix *p)
{
	if (!p)
		return;
	for (int32_t i = 0; i < kv_pool_n_pages(p->pool); i++) {
		if (p->nodes[i].present)
			unlink_node(p, i);
	}
	kv_pool_watch(p->pool, NULL, NULL);
	evict_destroy(p->evict);
	free(p->buckets);
	free(p->nodes);
	free(p);
}

/* The page that holds these n tokens behind `parent`, or NO_NODE. */
static int32_t find(struct kv_prefix *p, const struct kv_key *key, int32_t parent, const int32_t *tokens,
                    int32_t n_tokens)
{
	for (int32_t page = *bucket_of(p, key); page != NO_NODE; page = p->nodes[page].hash_next) {
		const struct node *n = &p->nodes[page];
		if (memcmp(n->key.bytes, key->bytes, sizeof key->bytes) != 0)
			continue;
		if (n->parent == parent && n->n_tokens == n_tokens &&
		    memcmp(n->tokens, tokens, (size_t)n_tokens * sizeof *tokens) == 0)
			return page;
		p->stats.collisions++;
	}
	return NO_NODE;
}

/* The key of page i, whose predecessors' keys are known; NULL without memory. */
static const struct kv_key *chain_key(const struct kv_prefix *p, struct kv_chain *c, const int32_t *tokens, int32_t i)
{
	if (i < c->n_keys)
		return &c->keys[i];
	if (i > c->n_keys)
		return NULL;
	if (c->n_keys == c->cap_keys) {
		int32_t cap = c->cap_keys ? c->cap_keys * 2 : 16;
		struct kv_key *keys = realloc(c->keys, (size_t)cap * sizeof *keys);
		if (!keys)
			return NULL;
		c->keys = keys;
		c->cap_keys = cap;
	}
	p->keys->next(i > 0 ? &c->keys[i - 1] : &c->root, tokens + i * KV_PAGE_TOKENS, &c->keys[i]);
	c->n_keys++;
	return &c->keys[i];
}

/* Page i of the tokens behind `parent`, or NO_NODE. */
static int32_t find_page(struct kv_prefix *p, struct kv_chain *c, int32_t parent, const int32_t *tokens, int32_t i)
{
	const struct kv_key *key = chain_key(p, c, tokens, i);
	return key ? find(p, key, parent, tokens + i * KV_PAGE_TOKENS, KV_PAGE_TOKENS) : NO_NODE;
}

int32_t kv_prefix_match(struct kv_prefix *p, struct kv_chain *chain, const int32_t *tokens, int32_t n)
{
	int32_t n_pages = 0;
	for (int32_t parent = NO_NODE; n_pages < n / KV_PAGE_TOKENS; n_pages++) {
		parent = find_page(p, chain, parent, tokens, n_pages);
		if (parent == NO_NODE)
			break;
	}
	return n_pages;
}

/* How far page `index` of a chain lies before the end of a prompt, in the unit of evict.h. */
static int32_t distance(int32_t index, int32_t n_prompt)
{
	int32_t tokens = n_prompt - (index + 1) * KV_PAGE_TOKENS;
	return tokens > 0 ? (tokens + EVICT_DISTANCE_TOKENS - 1) / EVICT_DISTANCE_TOKENS : 0;
}

/* Page `index` of a request's chain is used, unless this request has used it already. */
static void touch(struct kv_prefix *p, int32_t page, int32_t index, const struct kv_use *use)
{
	struct node *n = &p->nodes[page];
	struct evict_use u = {
	        .parent = n->parent,
	        .distance = distance(index, use->n_prompt),
	        .now_ms = use->now_ms,
	        .claim = use->claim,
	};
	if (use->request != 0 && n->user == use->request)
		return;
	n->user = use->request;
	leave_siblings(p, page);
	enter_siblings(p, page);
	memcpy(&u.key, n->key.bytes, sizeof u.key);
	evict_touch(p->evict, page, &u);
}

/* Makes seq hold the pages that are known of tokens[0..n); as a use, or without. */
static enum status collect(struct kv_prefix *p, struct kv_chain *chain, const int32_t *tokens, int32_t n,
                           const struct kv_use *use, struct kv_seq *seq)
{
	int32_t parent = NO_NODE;
	for (int32_t i = 0; i < n / KV_PAGE_TOKENS; i++) {
		int32_t page = find_page(p, chain, parent, tokens, i);
		if (page == NO_NODE)
			break;
		if (!kv_seq_append(p->pool, seq, page)) {
			kv_seq_release(p->pool, seq);
			return STATUS_NOMEM;
		}
		if (use)
			touch(p, page, i, use);
		parent = page;
	}
	return STATUS_OK;
}

/* Of the continuations of `parent` the one that has most in common with tokens[0..n), *common tokens; or NO_NODE. */
static int32_t best_child(const struct kv_prefix *p, int32_t parent, const int32_t *tokens, int32_t n, int32_t *common)
{
	int32_t best = NO_NODE, child = p->nodes[parent].first_child;
	*common = 0;
	for (int i = 0; i < MAX_CHILDREN_COMPARED && child != NO_NODE; i++, child = p->nodes[child].next_sibling) {
		const struct node *c = &p->nodes[child];
		int32_t k = 0;
		while (k < n && k < c->n_tokens && c->tokens[k] == tokens[k])
			k++;
		if (k > *common) {
			*common = k;
			best = child;
		}
	}
	return best;
}

/*
 * Behind the full pages that seq holds: a page that begins like the rest of the tokens. A tail that nobody else holds
 * and that the sequence will go on from leaves the index, which knows its content again as soon as the page is full.
 */
static enum status collect_part(struct kv_prefix *p, const int32_t *tokens, int32_t n, const struct kv_use *use,
                                struct kv_seq *seq)
{
	int32_t i = seq->n_pages, common;
	if (i == 0 || i * KV_PAGE_TOKENS == n)
		return STATUS_OK;
	int32_t page = best_child(p, seq->pages[i - 1], tokens + i * KV_PAGE_TOKENS, n - i * KV_PAGE_TOKENS, &common);
	if (page == NO_NODE)
		return STATUS_OK;
	if (!kv_seq_append(p->pool, seq, page)) {
		kv_seq_release(p->pool, seq);
		return STATUS_NOMEM;
	}
	seq->n_tokens += common - KV_PAGE_TOKENS;
	if (p->nodes[page].n_tokens < KV_PAGE_TOKENS && p->nodes[page].n_tokens == common &&
	    kv_pool_refs(p->pool, page) == 2) {
		evict_forget(p->evict, page);
		unlink_node(p, page);
	} else {
		touch(p, page, i, use);
	}
	return STATUS_OK;
}

enum status kv_prefix_get(struct kv_prefix *p, struct kv_chain *chain, const int32_t *tokens, int32_t n,
                          const struct kv_use *use, struct kv_seq *seq)
{
	enum status st = collect(p, chain, tokens, n, use, seq);
	p->stats.queries += (uint64_t)(n / KV_PAGE_TOKENS);
	p->stats.hits += (uint64_t)seq->n_pages;
	return st == STATUS_OK ? collect_part(p, tokens, n, use, seq) : st;
}

enum status kv_prefix_hold(struct kv_prefix *p, struct kv_chain *chain, const int32_t *tokens, int32_t n,
                           struct kv_seq *seq)
{
	return collect(p, chain, tokens, n, NULL, seq);
}

static void add_node(struct kv_prefix *p, const struct kv_key *key, int32_t parent, const int32_t *tokens,
                     int32_t n_tokens, int32_t page)
{
	struct node *n = &p->nodes[page];
	int32_t *bucket = bucket_of(p, key);
	n->key = *key;
	memcpy(n->tokens, tokens, (size_t)n_tokens * sizeof *tokens);
	n->n_tokens = n_tokens;
	n->parent = parent;
	n->first_child = NO_NODE;
	n->hash_next = *bucket;
	n->serial = ++p->last_serial;
	n->n_weak = 0;
	n->user = 0;
	n->present = true;
	n->held = true; /* by the sequence that computed it */
	*bucket = page;
	enter_siblings(p, page);
	kv_pool_ref(p->pool, page, self);
	kv_pool_mark(p->pool, page, true);
	p->stats.n_pages++;
	p->stats.n_tails += n_tokens < KV_PAGE_TOKENS;
	p->stats.inserted++;
}

/* Page i of seq has the content of an indexed page: from now on it is that one. */
static void replace_page(struct kv_prefix *p, struct kv_seq *seq, int32_t i, int32_t page)
{
	if (page == seq->pages[i])
		return;
	kv_pool_ref(p->pool, page, seq->holder);
	kv_pool_unref(p->pool, seq->pages[i], seq->holder);
	seq->pages[i] = page;
}

int32_t kv_prefix_put(struct kv_prefix *p, struct kv_chain *chain, const int32_t *tokens, struct kv_seq *seq,
                      int32_t first, const struct kv_use *use)
{
	int32_t whole = seq->n_tokens / KV_PAGE_TOKENS, parent = NO_NODE;
	if (seq->n_dropped > 0)
		return first < seq->n_leading ? first : seq->n_leading;
	if (first > whole)
		first = whole;
	if (seq->n_gone > 0 && first <= seq->n_gone)
		return first;
	/* The chain up to `first` ends in the entry of the page before it. */
	if (first > 0) {
		parent = seq->pages[first - 1];
		if (!p->nodes[parent].present)
			return 0;
	}
	for (int32_t i = chain->n_keys; i < first; i++) {
		if (!chain_key(p, chain, tokens, i))
			return first;
	}
	for (int32_t i = first; i < whole; i++) {
		const int32_t *mine = tokens + i * KV_PAGE_TOKENS;
		const struct kv_key *key = chain_key(p, chain, tokens, i);
		if (!key)
			return i;
		int32_t page = find(p, key, parent, mine, KV_PAGE_TOKENS);
		if (page == NO_NODE) {
			page = seq->pages[i];
			/*
			 * A page that is indexed for another place cannot be indexed twice; its content would have to
			 * be the same. One with values that are no numbers stays where they came about: the next to
			 * need it computes it again.
			 */
			if (p->nodes[page].present || !kv_pool_is_sound(p->pool, page))
				return i;
			add_node(p, key, parent, mine, KV_PAGE_TOKENS, page);
		} else {
			replace_page(p, seq, i, page);
		}
		touch(p, page, i, use);
		parent = page;
	}
	return whole;
}

bool kv_prefix_put_tail(struct kv_prefix *p, const int32_t *tokens, struct kv_seq *seq, const struct kv_use *use)
{
	int32_t i = seq->n_tokens / KV_PAGE_TOKENS, n = seq->n_tokens % KV_PAGE_TOKENS;
	const int32_t *mine = tokens + i * KV_PAGE_TOKENS;
	struct kv_key key;
	if (n == 0 || i == 0 || seq->n_dropped > 0 || !p->nodes[seq->pages[i - 1]].present ||
	    p->nodes[seq->pages[i]].present || !kv_pool_is_sound(p->pool, seq->pages[i]))
		return false;
	p->keys->tail(&p->nodes[seq->pages[i - 1]].key, mine, n, &key);
	int32_t page = find(p, &key, seq->pages[i - 1], mine, n);
	if (page == NO_NODE)
		add_node(p, &key, seq->pages[i - 1], mine, n, page = seq->pages[i]);
	else
		replace_page(p, seq, i, page);
	touch(p, page, i, use);
	return true;
}

void kv_prefix_hint(struct kv_prefix *p, const struct kv_seq *seq, int32_t n_pages, uint64_t request, unsigned hints)
{
	for (int32_t i = seq->n_gone; i < n_pages && i < seq->n_pages; i++) {
		const struct node *n = &p->nodes[seq->pages[i]];
		if (n->present && n->user == request)
			evict_hint(p->evict, seq->pages[i], hints);
	}
}

/* ---- Weak references and claims ---- */

void kv_weak_free(struct kv_prefix *p, struct kv_weak *weak)
{
	for (int32_t i = weak->n_pages > 0 ? kv_weak_alive(p, weak) : 0; i > 0; i--)
		p->nodes[weak->pages[i - 1].page].n_weak--;
	free(weak->pages);
	free(weak->keys);
	*weak = KV_WEAK_INIT;
}

void kv_prefix_weaken(struct kv_prefix *p, const struct kv_seq *seq, struct kv_weak *out)
{
	int32_t most = seq->n_dropped > 0 ? seq->n_leading : seq->n_pages;
	kv_weak_free(p, out);
	out->n_tokens = seq->n_dropped > 0 ? most * KV_PAGE_TOKENS : seq->n_tokens;
	out->pages = calloc((size_t)seq->n_pages + 1, sizeof *out->pages);
	out->keys = calloc((size_t)seq->n_pages + 1, sizeof *out->keys);
	if (!out->pages || !out->keys)
		return;
	if (seq->n_gone > 0 && !p->nodes[seq->pages[seq->n_gone]].present)
		return;
	/* What is gone from the sequence stands in front of what is not. */
	for (int32_t i = seq->n_gone; i > 0; i--)
		out->pages[i - 1].page = p->nodes[i == seq->n_gone ? seq->pages[i] : out->pages[i].page].parent;
	while (out->n_pages < most) {
		int32_t i = out->n_pages, page = i < seq->n_gone ? out->pages[i].page : seq->pages[i];
		if (!p->nodes[page].present)
			break;
		out->keys[i] = p->nodes[page].key;
		out->pages[out->n_pages++] = (struct kv_weak_page){page, p->nodes[page].serial};
		p->nodes[page].n_weak++;
	}
}

void kv_weak_recall(const struct kv_key *keys, int32_t n_pages, int32_t n_tokens, struct kv_weak *out)
{
	out->pages = calloc((size_t)n_pages + 1, sizeof *out->pages);
	out->keys = calloc((size_t)n_pages + 1, sizeof *out->keys);
	if (!out->pages || !out->keys)
		return;
	for (; out->n_pages < n_pages; out->n_pages++) {
		out->pages[out->n_pages] = (struct kv_weak_page){0, NO_SERIAL};
		out->keys[out->n_pages] = keys[out->n_pages];
	}
	out->n_tokens = n_tokens;
}

int32_t kv_weak_alive(const struct kv_prefix *p, const struct kv_weak *weak)
{
	int32_t low = 0, high = weak->n_pages;
	while (low < high) {
		int32_t middle = low + (high - low) / 2;
		const struct kv_weak_page *w = &weak->pages[middle];
		if (p->nodes[w->page].present && p->nodes[w->page].serial == w->serial)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

int32_t kv_prefix_n_weak(const struct kv_prefix *p, int32_t page)
{
	return p->nodes[page].present ? p->nodes[page].n_weak : 0;
}

enum status kv_prefix_claims_create(struct kv_prefix *p, int32_t n)
{
	return evict_claims_create(p->evict, n);
}

uint64_t kv_prefix_claim_open(struct kv_prefix *p, int64_t until_ms)
{
	return evict_claim_open(p->evict, until_ms);
}

void kv_prefix_claim_renew(struct kv_prefix *p, uint64_t claim, int64_t until_ms)
{
	evict_claim_renew(p->evict, claim, until_ms);
}

void kv_prefix_claim_close(struct kv_prefix *p, uint64_t claim)
{
	evict_claim_close(p->evict, claim);
}

/* ---- Pages that go and come ---- */

void kv_prefix_on_evict(struct kv_prefix *p, void (*leaving)(void *arg, int32_t page, const struct kv_page_name *name),
                        void *arg)
{
	p->leaving = leaving;
	p->leaving_arg = arg;
}

bool kv_prefix_name(const struct kv_prefix *p, int32_t page, struct kv_page_name *out)
{
	const struct node *n = &p->nodes[page];
	if (!n->present)
		return false;
	*out = (struct kv_page_name){.key = n->key, .n_tokens = n->n_tokens, .first = n->parent == NO_NODE};
	if (n->parent != NO_NODE)
		out->parent = p->nodes[n->parent].key;
	memcpy(out->tokens, n->tokens, (size_t)n->n_tokens * sizeof *n->tokens);
	return true;
}

bool kv_prefix_has(const struct kv_prefix *p, const struct kv_key *key)
{
	int32_t page = *bucket_of(p, key);
	while (page != NO_NODE && memcmp(&p->nodes[page].key, key, sizeof *key) != 0)
		page = p->nodes[page].hash_next;
	return page != NO_NODE;
}

uint64_t kv_prefix_serial(const struct kv_prefix *p, int32_t page)
{
	return p->nodes[page].present ? p->nodes[page].serial : 0;
}

int32_t kv_prefix_adopt(struct kv_prefix *p, const struct kv_page_name *name, int32_t parent, int32_t page,
                        const struct kv_use *use)
{
	int32_t index = 0;
	if (name->first != (parent == NO_NODE))
		return KV_NO_PAGE;
	if (parent != NO_NODE && (!p->nodes[parent].present || p->nodes[parent].n_tokens < KV_PAGE_TOKENS ||
	                          memcmp(&p->nodes[parent].key, &name->parent, sizeof name->parent) != 0))
		return KV_NO_PAGE;
	int32_t known = find(p, &name->key, parent, name->tokens, name->n_tokens);
	if (known != NO_NODE)
		return known;
	if (p->nodes[page].present)
		return KV_NO_PAGE;
	add_node(p, &name->key, parent, name->tokens, name->n_tokens, page);
	for (int32_t n = parent; n != NO_NODE; n = p->nodes[n].parent)
		index++;
	touch(p, page, index, use);
	return page;
}

/* ---- Eviction ---- */

/*
 * A sequence that lost pages can hold the end of a chain whose middle nobody holds, and which then has no leaf to begin
 * with. Unlinks what is held behind the last such page; it stays with its holder, who indexes nothing any more. False
 * when there is no such page.
 */
static bool open_chain(struct kv_prefix *p)
{
	int32_t page = 0, n_pages = kv_pool_n_pages(p->pool);
	while (page < n_pages && (!p->nodes[page].present || p->nodes[page].held))
		page++;
	if (p->stats.n_idle == 0 || page == n_pages)
		return false;
	for (int32_t child = p->nodes[page].first_child; child != NO_NODE;) {
		if (p->nodes[child].held) {
			child = p->nodes[child].next_sibling;
		} else {
			page = child;
			child = p->nodes[page].first_child;
		}
	}
	while (p->nodes[page].first_child != NO_NODE) {
		int32_t leaf = page;
		while (p->nodes[leaf].first_child != NO_NODE)
			leaf = p->nodes[leaf].first_child;
		evict_forget(p->evict, leaf);
		unlink_node(p, leaf);
	}
	return true;
}

bool kv_prefix_evict(struct kv_prefix *p, int64_t now_ms, enum evict_reason reason)
{
	int32_t page = evict_victim(p->evict, now_ms);
	if (page == EVICT_NONE && open_chain(p))
		page = evict_victim(p->evict, now_ms);
	if (page == EVICT_NONE)
		return false;
	if (p->leaving) {
		struct kv_page_name name;
		kv_prefix_name(p, page, &name);
		p->leaving(p->leaving_arg, page, &name);
	}
	evict_remove(p->evict, page, reason);
	unlink_node(p, page);
	return true;
}

void kv_prefix_stats(const struct kv_prefix *p, struct kv_prefix_stats *out)
{
	struct evict_stats ev;
	evict_stats(p->evict, &ev);
	*out = p->stats;
	out->n_ghosts = ev.n_ghosts;
	out->revived = ev.revived;
	memcpy(out->evicted, ev.removed, sizeof out->evicted);
}

int32_t kv_prefix_page_tokens(const struct kv_prefix *p, int32_t page)
{
	return p->nodes[page].present ? p->nodes[page].n_tokens : 0;
}
