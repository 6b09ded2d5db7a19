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
	put_tag(&s, "kvasir kv root 1");
	put_field(&s, root->weights, sizeof root->weights);
	put_field(&s, root->adapter, sizeof root->adapter);
	put_int(&s, root->n_layer);
	put_int(&s, root->n_head_kv);
	put_int(&s, root->head_dim);
	put_int(&s, root->page_tokens);
	put_int(&s, root->kv_type);
	put_field(&s, root->scheme.p, root->scheme.n);
	put_field(&s, root->rope.p, root->rope.n);
	put_field(&s, root->salt.p, root->salt.n);
	sha256_final(&s, out->bytes);
}

void kv_key_next(const struct kv_key *before, const int32_t *tokens, struct kv_key *out)
{
	struct sha256 s;
	uint8_t bytes[KV_PAGE_TOKENS * 4];
	for (int i = 0; i < KV_PAGE_TOKENS; i++) {
		for (int b = 0; b < 4; b++)
			bytes[i * 4 + b] = (uint8_t)((uint32_t)tokens[i] >> (8 * b));
	}
	sha256_init(&s);
	put_tag(&s, "kvasir kv page 1");
	put_field(&s, before->bytes, sizeof before->bytes);
	put_field(&s, bytes, sizeof bytes);
	sha256_final(&s, out->bytes);
}

/* ---- The index ---- */

enum { NO_NODE = -1 };

/* A page has at most one entry, so entries live in an array by page number and adding one cannot fail. */
struct node {
	struct kv_key key;
	struct list idle_link;  /* in kv_prefix.idle: a leaf that nobody else holds */
	int32_t tokens[KV_PAGE_TOKENS];
	int32_t parent;         /* page, or NO_NODE for a first page */
	int32_t hash_next;      /* page, or NO_NODE */
	int32_t n_children;
	int64_t used_ms;
	bool present, held;     /* held: others have references too */
};

struct kv_prefix {
	struct kv_pool *pool;
	struct node *nodes; /* [n_pages] */
	int32_t *buckets;   /* [n_buckets] page, or NO_NODE */
	size_t n_buckets;   /* a power of two */
	struct list idle;   /* least recently used first */
	struct kv_prefix_stats stats;
};

static struct node *node_of(struct list *l)
{
	return list_entry(l, struct node, idle_link);
}

/* Puts an evictable leaf where its last use says; parents join behind the children they outlived, mostly at the front. */
static void join_idle(struct kv_prefix *p, struct node *n, bool just_used)
{
	if (just_used) {
		list_push_back(&p->idle, &n->idle_link);
		return;
	}
	struct list *before = p->idle.next;
	while (before != &p->idle && node_of(before)->used_ms < n->used_ms)
		before = before->next;
	list_insert_between(&n->idle_link, before->prev, before);
}

static void watch(void *arg, int32_t page, bool idle)
{
	struct kv_prefix *p = arg;
	struct node *n = &p->nodes[page];
	n->held = !idle;
	p->stats.n_idle += idle ? 1 : -1;
	if (!idle)
		list_remove(&n->idle_link);
	else if (n->n_children == 0)
		join_idle(p, n, true);
}

enum status kv_prefix_create(struct kv_pool *pool, struct kv_prefix **out)
{
	int32_t n_pages = kv_pool_n_pages(pool);
	struct kv_prefix *p = calloc(1, sizeof *p);
	if (!p)
		return STATUS_NOMEM;
	p->pool = pool;
	p->n_buckets = 16;
	while (p->n_buckets < (size_t)n_pages)
		p->n_buckets *= 2;
	p->nodes = calloc((size_t)n_pages, sizeof *p->nodes);
	p->buckets = malloc(p->n_buckets * sizeof *p->buckets);
	if (!p->nodes || !p->buckets) {
		free(p->nodes);
		free(p->buckets);
		free(p);
		return STATUS_NOMEM;
	}
	for (size_t i = 0; i < p->n_buckets; i++)
		p->buckets[i] = NO_NODE;
	for (int32_t i = 0; i < n_pages; i++)
		list_init(&p->nodes[i].idle_link);
	list_init(&p->idle);
	kv_pool_watch(pool, watch, p);
	*out = p;
	return STATUS_OK;
}

static int32_t *bucket_of(const struct kv_prefix *p, const struct kv_key *key)
{
	uint64_t h;
	memcpy(&h, key->bytes, sizeof h);
	return &p->buckets[h & (p->n_buckets - 1)];
}

/* Takes an entry out and gives its reference back. It must have no children. */
static void unlink_node(struct kv_prefix *p, int32_t page)
{
	struct node *n = &p->nodes[page];
	int32_t *at = bucket_of(p, &n->key);
	while (*at != page)
		at = &p->nodes[*at].hash_next;
	*at = n->hash_next;
	list_remove(&n->idle_link);
	p->stats.n_pages--;
	p->stats.n_idle -= !n->held;
	n->present = false;
	kv_pool_mark(p->pool, page, false);
	kv_pool_unref(p->pool, page);
	if (n->parent == NO_NODE)
		return;
	struct node *parent = &p->nodes[n->parent];
	if (--parent->n_children == 0 && !parent->held)
		join_idle(p, parent, false);
}

void kv_prefix_destroy(struct kv_prefix *p)
{
	if (!p)
		return;
	for (bool more = true; more;) {
		more = false;
		for (int32_t i = 0; i < kv_pool_n_pages(p->pool); i++) {
			if (p->nodes[i].present && p->nodes[i].n_children == 0) {
				unlink_node(p, i);
				more = true;
			}
		}
	}
	kv_pool_watch(p->pool, NULL, NULL);
	free(p->buckets);
	free(p->nodes);
	free(p);
}

/* The page that holds these tokens behind `parent`, or NO_NODE. */
static int32_t find(struct kv_prefix *p, const struct kv_key *key, int32_t parent, const int32_t *tokens)
{
	for (int32_t page = *bucket_of(p, key); page != NO_NODE; page = p->nodes[page].hash_next) {
		const struct node *n = &p->nodes[page];
		if (memcmp(n->key.bytes, key->bytes, sizeof key->bytes) != 0)
			continue;
		if (n->parent == parent && memcmp(n->tokens, tokens, sizeof n->tokens) == 0)
			return page;
		p->stats.collisions++;
	}
	return NO_NODE;
}

int32_t kv_prefix_match(struct kv_prefix *p, const struct kv_key *root, const int32_t *tokens, int32_t n)
{
	struct kv_key key = *root;
	int32_t n_pages = 0;
	for (int32_t parent = NO_NODE; (n_pages + 1) * KV_PAGE_TOKENS <= n; n_pages++) {
		kv_key_next(&key, tokens + n_pages * KV_PAGE_TOKENS, &key);
		parent = find(p, &key, parent, tokens + n_pages * KV_PAGE_TOKENS);
		if (parent == NO_NODE)
			break;
	}
	return n_pages;
}

enum status kv_prefix_get(struct kv_prefix *p, const struct kv_key *root, const int32_t *tokens, int32_t n, int64_t now_ms,
                          struct kv_seq *seq)
{
	struct kv_key key = *root;
	int32_t parent = NO_NODE, whole = n / KV_PAGE_TOKENS;
	p->stats.queries += (uint64_t)whole;
	for (int32_t i = 0; i < whole; i++) {
		kv_key_next(&key, tokens + i * KV_PAGE_TOKENS, &key);
		int32_t page = find(p, &key, parent, tokens + i * KV_PAGE_TOKENS);
		if (page == NO_NODE)
			break;
		if (!kv_seq_append(p->pool, seq, page)) {
			kv_seq_release(p->pool, seq);
			return STATUS_NOMEM;
		}
		p->nodes[page].used_ms = now_ms;
		p->stats.hits++;
		parent = page;
	}
	return STATUS_OK;
}

static void add_node(struct kv_prefix *p, const struct kv_key *key, int32_t parent, const int32_t *tokens, int32_t page,
                     int64_t now_ms)
{
	struct node *n = &p->nodes[page];
	int32_t *bucket = bucket_of(p, key);
	n->key = *key;
	memcpy(n->tokens, tokens, sizeof n->tokens);
	n->parent = parent;
	n->n_children = 0;
	n->used_ms = now_ms;
	n->hash_next = *bucket;
	n->present = true;
	n->held = true; /* by the sequence that computed it */
	*bucket = page;
	kv_pool_ref(p->pool, page);
	kv_pool_mark(p->pool, page, true);
	if (parent != NO_NODE) {
		p->nodes[parent].n_children++;
		list_remove(&p->nodes[parent].idle_link);
	}
	p->stats.n_pages++;
	p->stats.inserted++;
}

int32_t kv_prefix_put(struct kv_prefix *p, const struct kv_key *root, const int32_t *tokens, struct kv_seq *seq, int32_t first,
                      int64_t now_ms)
{
	int32_t whole = seq->n_tokens / KV_PAGE_TOKENS, parent = NO_NODE;
	struct kv_key key = *root;
	if (first > whole)
		first = whole;
	/* The chain up to `first` ends in the entry of the page before it. */
	if (first > 0) {
		parent = seq->pages[first - 1];
		if (!p->nodes[parent].present)
			return 0;
		key = p->nodes[parent].key;
	}
	for (int32_t i = first; i < whole; i++) {
		const int32_t *mine = tokens + i * KV_PAGE_TOKENS;
		kv_key_next(&key, mine, &key);
		int32_t page = find(p, &key, parent, mine);
		if (page == NO_NODE) {
			page = seq->pages[i];
			/* A page that is indexed for another place cannot be indexed twice; its content would have to be the same. */
			if (p->nodes[page].present)
				return i;
			add_node(p, &key, parent, mine, page, now_ms);
		} else if (page != seq->pages[i]) {
			kv_pool_ref(p->pool, page);
			kv_pool_unref(p->pool, seq->pages[i]);
			seq->pages[i] = page;
		}
		p->nodes[page].used_ms = now_ms;
		parent = page;
	}
	return whole;
}

bool kv_prefix_evict(struct kv_prefix *p)
{
	if (list_empty(&p->idle))
		return false;
	unlink_node(p, (int32_t)(node_of(p->idle.next) - p->nodes));
	p->stats.evicted++;
	return true;
}

void kv_prefix_stats(const struct kv_prefix *p, struct kv_prefix_stats *out)
{
	*out = p->stats;
}
