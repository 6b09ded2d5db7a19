/* An intrusive, circular, doubly linked list: the head is a node that links to itself when the list is empty. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

struct list {
	struct list *prev;
	struct list *next;
};

/* The structure that holds `node` as its member. */
#define list_entry(node, type, member) ((type *)((char *)(node)-offsetof(type, member)))

/* Visits each node; the body may remove the one it is at. */
#define list_each(node, tmp, head)                                                                                     \
	for (struct list *node = (head)->next, *tmp = node->next; node != (head); node = tmp, tmp = node->next)

static inline void list_init(struct list *head)
{
	head->prev = head->next = head;
}

static inline bool list_empty(const struct list *head)
{
	return head->next == head;
}

static inline void list_insert_between(struct list *node, struct list *prev, struct list *next)
{
	node->prev = prev;
	node->next = next;
	prev->next = node;
	next->prev = node;
}

static inline void list_push_back(struct list *head, struct list *node)
{
	list_insert_between(node, head->prev, head);
}

static inline void list_push_front(struct list *head, struct list *node)
{
	list_insert_between(node, head, head->next);
}

/* Unlinks a node and leaves it linked to itself, so that removing it again is harmless. */
static inline void list_remove(struct list *node)
{
	node->prev->next = node->next;
	node->next->prev = node->prev;
	list_init(node);
}

/* Unlinks and returns the first node, or NULL. */
static inline struct list *list_pop_front(struct list *head)
{
	if (list_empty(head))
		return NULL;
	struct list *node = head->next;
	list_remove(node);
	return node;
}

/* Moves all of `from` to the end of `to`; `from` is then empty. */
static inline void list_splice_back(struct list *to, struct list *from)
{
	if (list_empty(from))
		return;
	struct list *first = from->next, *last = from->prev;
	first->prev = to->prev;
	to->prev->next = first;
	last->next = to;
	to->prev = last;
	list_init(from);
}
