#include "engine/text/special.h"

#include <stdlib.h>
#include <string.h>

void special_init(struct special_set *s)
{
	memset(s, 0, sizeof *s);
	for (size_t i = 0; i < 256; i++)
		s->root[i] = -1;
}

void special_free(struct special_set *s)
{
	free(s->nodes);
	special_init(s);
}

static int32_t find(const struct special_set *s, int32_t first, uint8_t byte)
{
	while (first >= 0 && s->nodes[first].byte != byte)
		first = s->nodes[first].sibling;
	return first;
}

/* A new node at the head of a list of siblings, or -1. */
static int32_t node_create(struct special_set *s, int32_t sibling, uint8_t byte)
{
	if (s->n == s->cap) {
		size_t cap = s->cap ? s->cap * 2 : 256;
		if (cap > INT32_MAX)
			return -1;
		struct special_node *nodes = realloc(s->nodes, cap * sizeof *nodes);
		if (!nodes)
			return -1;
		s->nodes = nodes;
		s->cap = cap;
	}
	s->nodes[s->n] = (struct special_node){.child = -1, .sibling = sibling, .token = -1, .byte = byte};
	return (int32_t)s->n++;
}

bool special_add(struct special_set *s, struct str text, int32_t token, bool control)
{
	if (text.n == 0)
		return true;
	int32_t at = -1;
	for (size_t i = 0; i < text.n; i++) {
		uint8_t byte = (uint8_t)text.p[i];
		int32_t first = at < 0 ? s->root[byte] : s->nodes[at].child;
		int32_t next = find(s, first, byte);
		if (next < 0) {
			next = node_create(s, first, byte);
			if (next < 0)
				return false;
			if (at < 0)
				s->root[byte] = next;
			else
				s->nodes[at].child = next;
		}
		at = next;
	}
	if (s->nodes[at].token < 0) {
		s->nodes[at].token = token;
		s->nodes[at].control = control;
	}
	return true;
}

/* The longest allowed token that begins at i: its node, or -1. The scan's spans all end after i. */
static int32_t longest_at(const struct special_scan *scan, size_t i, size_t *end)
{
	const struct special_set *set = scan->set;
	int32_t best = -1;
	int32_t at = set->root[(uint8_t)scan->s[i]];
	for (size_t j = i + 1; at >= 0; j++) {
		const struct special_node *node = &set->nodes[at];
		bool touches = scan->n_data > 0 && scan->data[0].begin < j;
		if (node->token >= 0 && (!node->control || (scan->control && !touches))) {
			best = at;
			*end = j;
		}
		if (j == scan->n)
			break;
		at = find(set, node->child, (uint8_t)scan->s[j]);
	}
	return best;
}

bool special_next(struct special_scan *scan, size_t from, int32_t *token, size_t *begin, size_t *end)
{
	for (size_t i = from; i < scan->n; i++) {
		if (scan->set->root[(uint8_t)scan->s[i]] < 0)
			continue;
		while (scan->n_data > 0 && (scan->data->end <= i || scan->data->end <= scan->data->begin)) {
			scan->data++;
			scan->n_data--;
		}
		int32_t node = longest_at(scan, i, end);
		if (node >= 0) {
			*token = scan->set->nodes[node].token;
			*begin = i;
			return true;
		}
	}
	return false;
}
