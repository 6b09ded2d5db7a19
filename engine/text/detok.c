/*
 * Bytes of tokens -> whole code points -> stop strings -> out. The stop strings are matched by one automaton (Aho and
 * Corasick, "Efficient string matching", 1975), whose state is the longest end of the text that begins a stop string:
 * exactly what must be held back. Those bytes are the stop string's own, so nothing is stored for them.
 */
#include "engine/text/detok.h"

#include <stdlib.h>
#include <string.h>

#include "engine/base/utf8.h"

#define REPLACEMENT "\xEF\xBF\xBD"

/* A state: the bytes path[0..depth) of some stop string have been read. */
struct state {
	const char *path;
	size_t depth;
	int32_t child, sibling; /* -1: none */
	int32_t fail; /* the state of the longest proper end of the path */
	int32_t stop; /* the longest stop string that ends here: its index, or -1 */
	size_t stop_n; /* its length */
};

struct detok {
	const struct tokenizer *tokenizer;
	bool keep_special, at_start, stopped;
	char *texts; /* the stop strings, one after the other */
	struct state *states; /* [n_states]; 0 is the root */
	int32_t n_states, at;
	char part[4]; /* the beginning of a code point */
	size_t part_n;
};

static int32_t child_of(const struct detok *d, int32_t state, char c)
{
	int32_t s = d->states[state].child;
	while (s >= 0 && d->states[s].path[d->states[s].depth - 1] != c)
		s = d->states[s].sibling;
	return s;
}

/* The state after one more byte. */
static int32_t step(const struct detok *d, int32_t state, char c)
{
	for (;;) {
		int32_t next = child_of(d, state, c);
		if (next >= 0)
			return next;
		if (state == 0)
			return 0;
		state = d->states[state].fail;
	}
}

static void add_stop(struct detok *d, const char *p, size_t n, int32_t index)
{
	int32_t at = 0;
	for (size_t i = 0; i < n; i++) {
		int32_t next = child_of(d, at, p[i]);
		if (next < 0) {
			next = d->n_states++;
			d->states[next] = (struct state){p, i + 1, -1, d->states[at].child, 0, -1, 0};
			d->states[at].child = next;
		}
		at = next;
	}
	if (d->states[at].stop < 0) {
		d->states[at].stop = index;
		d->states[at].stop_n = n;
	}
}

/* Sets the failure links in order of depth: those of shorter paths are needed first. `queue` has n_states places. */
static void link_states(struct detok *d, int32_t *queue)
{
	int32_t head = 0, tail = 0;
	queue[tail++] = 0;
	while (head < tail) {
		int32_t parent = queue[head++];
		for (int32_t s = d->states[parent].child; s >= 0; s = d->states[s].sibling) {
			struct state *state = &d->states[s];
			state->fail = parent == 0 ? 0 : step(d, d->states[parent].fail, state->path[state->depth - 1]);
			if (state->stop < 0) {
				state->stop = d->states[state->fail].stop;
				state->stop_n = d->states[state->fail].stop_n;
			}
			queue[tail++] = s;
		}
	}
}

static bool usable(struct str stop)
{
	return stop.n > 0 && utf8_valid(stop.p, stop.n);
}

enum status detok_create(const struct tokenizer *t, const struct str *stops, size_t n_stops, bool keep_special,
                         struct detok **out)
{
	size_t total = 0;
	for (size_t i = 0; i < n_stops; i++) {
		if (!usable(stops[i]))
			continue;
		if (stops[i].n > INT32_MAX - 1 - total)
			return STATUS_LIMIT;
		total += stops[i].n;
	}
	struct detok *d = calloc(1, sizeof *d);
	int32_t *queue = malloc((total + 1) * sizeof *queue);
	if (d) {
		d->texts = malloc(total + 1);
		d->states = malloc((total + 1) * sizeof *d->states);
	}
	if (!d || !queue || !d->texts || !d->states) {
		free(queue);
		detok_destroy(d);
		return STATUS_NOMEM;
	}
	d->tokenizer = t;
	d->keep_special = keep_special;
	d->states[0] = (struct state){d->texts, 0, -1, -1, 0, -1, 0};
	d->n_states = 1;
	char *copy = d->texts;
	for (size_t i = 0; i < n_stops; i++) {
		if (!usable(stops[i]))
			continue;
		memcpy(copy, stops[i].p, stops[i].n);
		add_stop(d, copy, stops[i].n, (int32_t)i);
		copy += stops[i].n;
	}
	link_states(d, queue);
	free(queue);
	*out = d;
	return STATUS_OK;
}

void detok_destroy(struct detok *d)
{
	if (!d)
		return;
	free(d->texts);
	free(d->states);
	free(d);
}

void detok_drop_first_space(struct detok *d)
{
	d->at_start = true;
}

/* Adds whole code points. Releases what can no longer begin a stop string; the index of one that is complete, or -1. */
static int release(struct detok *d, const char *s, size_t n, struct buf *out)
{
	for (size_t i = 0; i < n; i++) {
		const struct state *from = &d->states[d->at];
		d->at = step(d, d->at, s[i]);
		const struct state *to = &d->states[d->at];
		/* The text held now is from's path and this byte. Its last `keep` bytes are not released. */
		size_t keep = to->stop >= 0 ? to->stop_n : to->depth;
		size_t go = from->depth + 1 - keep;
		if (go > from->depth) {
			buf_append(out, from->path, from->depth);
			buf_putc(out, s[i]);
		} else {
			buf_append(out, from->path, go);
		}
		if (to->stop >= 0) {
			d->stopped = true;
			return to->stop;
		}
	}
	return -1;
}

/* Adds one byte to the code point that has begun. */
static int push_byte(struct detok *d, char c, struct buf *out)
{
	if (d->part_n == 0 && (unsigned char)c < 0x80)
		return release(d, &c, 1, out);
	d->part[d->part_n++] = c;
	uint32_t cp;
	size_t whole = utf8_decode(d->part, d->part_n, &cp);
	if (whole > 0) {
		d->part_n = 0;
		return release(d, d->part, whole, out);
	}
	if (utf8_incomplete_tail(d->part, d->part_n) == d->part_n)
		return -1;
	/* The byte does not continue what was there; alone it may begin something new. */
	size_t had = d->part_n - 1;
	d->part_n = 0;
	int stop = release(d, REPLACEMENT, 3, out);
	return stop < 0 && had > 0 ? push_byte(d, c, out) : stop;
}

int detok_push(struct detok *d, int32_t token, struct buf *out)
{
	if (d->stopped || (tokenizer_is_special(d->tokenizer, token) && !d->keep_special))
		return -1;
	struct str piece = tokenizer_piece(d->tokenizer, token, d->at_start);
	d->at_start = false;
	for (size_t i = 0; i < piece.n; i++) {
		int stop = push_byte(d, piece.p[i], out);
		if (stop >= 0)
			return stop;
	}
	return -1;
}

void detok_finish(struct detok *d, struct buf *out)
{
	if (d->stopped)
		return;
	bool part = d->part_n > 0;
	d->part_n = 0;
	/* The replacement character may complete a stop string, as any other text may. */
	if (part && release(d, REPLACEMENT, 3, out) >= 0)
		return;
	buf_append(out, d->states[d->at].path, d->states[d->at].depth);
	d->at = 0;
}
