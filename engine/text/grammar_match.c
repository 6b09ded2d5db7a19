/*
 * Running a grammar's program over tokens.
 *
 * Where the machine can be after some text is a set of threads; each set that is met becomes a state of a deterministic
 * machine that is built as it is needed, with a table of where each byte leads. So the walk over the vocabulary mostly
 * costs one look-up a byte, and a state that comes again (inside of a string, say) has its mask already.
 *
 * Stacks are shared from below: a frame is a return address on top of another frame, and equal frames are one, so that
 * equal threads have equal numbers. States and masks are thrown away when there are too many, and made again from the
 * threads at hand; frames stay, as there are no more of them than ways to nest.
 */
#include <stdlib.h>
#include <string.h>

#include "engine/base/hash.h"
#include "engine/text/grammar_impl.h"
#include "engine/text/grammar_vocab.h"

enum {
	KEEP_STATES = 2048, /* between tokens; a token's walk may add more */
	MAX_STATES = 1 << 16,
	KEEP_MASKS = 32,
	MAX_THREADS = 1024, /* of one state */
	MAX_FRAMES = 1 << 20,
	MAX_WORK = 4 << 20, /* a tenth of a second or so */
	DEAD = -1,
	UNKNOWN = -2,
};

struct thread {
	uint32_t pc, frame;
};

struct frame {
	uint32_t below, ret, depth; /* frame 0 is the bottom */
};

struct state {
	struct thread *threads; /* [n] at instructions that consume a byte, sorted */
	uint32_t n;
	bool whole; /* the text may end here */
	uint64_t hash;
	int32_t *next; /* [256] DEAD, UNKNOWN or a state; NULL until asked for */
	uint64_t *mask;
};

/* Numbers found by what they stand for: open addressing, slot = number + 1. */
struct index {
	uint32_t *slots; /* [n_slots] */
	uint32_t n_slots, n_used;
};

struct grammar_matcher {
	struct grammar *g;
	const struct grammar_vocab *v;
	struct state *states; /* [n_states] */
	uint32_t n_states, cap_states;
	struct index state_index;
	struct frame *frames; /* [n_frames] */
	uint32_t n_frames, cap_frames;
	struct index frame_index;
	int32_t at;       /* state */
	uint32_t n_masks; /* states that have one */

	/* What step() works on: threads to follow, those that have been seen, those that consume. */
	struct thread *todo, *found;
	uint32_t n_todo, n_found;
	struct thread *seen; /* [SEEN_SLOTS], a table; .pc is +1 */
	uint16_t *seen_at;   /* [n_seen] the slots that are taken */
	uint32_t n_seen;
	bool whole;
	uint32_t work;      /* threads that have been followed for the mask or token at hand */
	enum status failed; /* of the last step */
	int32_t *walk; /* [longest + 1] states along a token */
};

enum { SEEN_SLOTS = 16384, MAX_SEEN = SEEN_SLOTS / 2 };

/* ---- Index ---- */

static bool index_grow(struct index *x, uint64_t (*hash_of)(const struct grammar_matcher *, uint32_t),
                       const struct grammar_matcher *m)
{
	uint32_t n = x->n_slots ? x->n_slots * 2 : 256;
	uint32_t *slots = calloc(n, sizeof *slots);
	if (!slots)
		return false;
	for (uint32_t i = 0; i < x->n_slots; i++) {
		if (!x->slots[i])
			continue;
		uint32_t at = (uint32_t)hash_of(m, x->slots[i] - 1) & (n - 1);
		while (slots[at])
			at = (at + 1) & (n - 1);
		slots[at] = x->slots[i];
	}
	free(x->slots);
	x->slots = slots;
	x->n_slots = n;
	return true;
}

static uint64_t frame_hash(const struct grammar_matcher *m, uint32_t i)
{
	return hash64(&m->frames[i], 2 * sizeof(uint32_t), 0);
}

static uint64_t state_hash(const struct grammar_matcher *m, uint32_t i)
{
	return m->states[i].hash;
}

/* ---- Frames ---- */

/* The frame `ret` on top of `below`; 0 on failure, as no such frame is the bottom. */
static uint32_t push_frame(struct grammar_matcher *m, uint32_t below, uint32_t ret)
{
	struct frame f = {below, ret, m->frames[below].depth + 1};
	struct index *x = &m->frame_index;
	uint32_t at;
	if (x->n_used * 2 >= x->n_slots && !index_grow(x, frame_hash, m)) {
		m->failed = STATUS_NOMEM;
		return 0;
	}
	at = (uint32_t)hash64(&f, 2 * sizeof(uint32_t), 0) & (x->n_slots - 1);
	for (; x->slots[at]; at = (at + 1) & (x->n_slots - 1)) {
		const struct frame *o = &m->frames[x->slots[at] - 1];
		if (o->below == below && o->ret == ret)
			return x->slots[at] - 1;
	}
	if (m->n_frames == m->cap_frames) {
		struct frame *more;
		if (m->n_frames >= MAX_FRAMES) {
			m->failed = STATUS_LIMIT;
			return 0;
		}
		more = realloc(m->frames, 2 * (size_t)m->cap_frames * sizeof *more);
		if (!more) {
			m->failed = STATUS_NOMEM;
			return 0;
		}
		m->frames = more;
		m->cap_frames *= 2;
	}
	m->frames[m->n_frames] = f;
	x->slots[at] = m->n_frames + 1;
	x->n_used++;
	return m->n_frames++;
}

/* ---- Following what consumes nothing ---- */

static void add_thread(struct grammar_matcher *m, uint32_t pc, uint32_t frame)
{
	struct thread key = {pc + 1, frame};
	uint32_t at = (uint32_t)hash64(&key, sizeof key, 0) & (SEEN_SLOTS - 1);
	for (; m->seen[at].pc; at = (at + 1) & (SEEN_SLOTS - 1))
		if (m->seen[at].pc == key.pc && m->seen[at].frame == frame)
			return;
	if (m->n_seen == MAX_SEEN || ++m->work > MAX_WORK) {
		m->failed = STATUS_LIMIT;
		return;
	}
	m->seen[at] = key;
	m->seen_at[m->n_seen++] = (uint16_t)at;
	m->todo[m->n_todo++] = (struct thread){pc, frame};
}

static void call(struct grammar_matcher *m, uint32_t pc, uint32_t frame)
{
	const struct grammar *g = m->g;
	/* A call that is the last thing leaves no frame of its own. */
	if (g->code[pc + 1].op != GRAMMAR_RETURN) {
		if (m->frames[frame].depth >= GRAMMAR_MAX_FRAMES)
			return;
		frame = push_frame(m, frame, pc + 1);
	}
	if (!m->failed)
		add_thread(m, g->entry[g->code[pc].a], frame);
}

static void follow(struct grammar_matcher *m)
{
	const struct grammar *g = m->g;
	while (m->n_todo > 0 && !m->failed) {
		struct thread t = m->todo[--m->n_todo];
		const struct grammar_instr *i = &g->code[t.pc];
		switch ((enum grammar_op)i->op) {
		case GRAMMAR_BYTE:
		case GRAMMAR_SET:
			if (m->n_found == MAX_THREADS)
				m->failed = STATUS_LIMIT;
			else
				m->found[m->n_found++] = t;
			break;
		case GRAMMAR_SPLIT:
			add_thread(m, i->b, t.frame);
			/* fall through */
		case GRAMMAR_JUMP:
			add_thread(m, i->a, t.frame);
			break;
		case GRAMMAR_CALL:
			call(m, t.pc, t.frame);
			break;
		case GRAMMAR_NEST:
			if (m->frames[t.frame].depth < GRAMMAR_MAX_NESTED)
				add_thread(m, t.pc + 1, t.frame);
			break;
		case GRAMMAR_RETURN:
			add_thread(m, m->frames[t.frame].ret, m->frames[t.frame].below);
			break;
		case GRAMMAR_FAIL:
			break;
		case GRAMMAR_END:
			m->whole = true;
			break;
		}
	}
}

/* ---- States ---- */

static int compare_threads(const void *a, const void *b)
{
	const struct thread *x = a, *y = b;
	if (x->pc != y->pc)
		return x->pc < y->pc ? -1 : 1;
	return x->frame < y->frame ? -1 : x->frame > y->frame;
}

static void begin_set(struct grammar_matcher *m)
{
	for (uint32_t i = 0; i < m->n_seen; i++)
		m->seen[m->seen_at[i]].pc = 0;
	m->n_seen = m->n_todo = m->n_found = 0;
	m->whole = false;
	m->failed = STATUS_OK;
}

/* The state of the threads that were found; DEAD when there is none or m->failed. */
static int32_t intern_state(struct grammar_matcher *m)
{
	struct index *x = &m->state_index;
	struct state *s;
	uint64_t hash;
	uint32_t at;
	if (m->failed || (m->n_found == 0 && !m->whole))
		return DEAD;
	qsort(m->found, m->n_found, sizeof *m->found, compare_threads);
	hash = hash64(m->found, m->n_found * sizeof *m->found, m->whole);
	m->failed = STATUS_NOMEM;
	if (x->n_used * 2 >= x->n_slots && !index_grow(x, state_hash, m))
		return DEAD;
	for (at = (uint32_t)hash & (x->n_slots - 1); x->slots[at]; at = (at + 1) & (x->n_slots - 1)) {
		s = &m->states[x->slots[at] - 1];
		if (s->hash == hash && s->n == m->n_found && s->whole == m->whole &&
		    (s->n == 0 || memcmp(s->threads, m->found, s->n * sizeof *s->threads) == 0)) {
			m->failed = STATUS_OK;
			return (int32_t)x->slots[at] - 1;
		}
	}
	if (m->n_states == MAX_STATES) {
		m->failed = STATUS_LIMIT;
		return DEAD;
	}
	if (m->n_states == m->cap_states) {
		struct state *more = realloc(m->states, 2 * (size_t)m->cap_states * sizeof *more);
		if (!more)
			return DEAD;
		m->states = more;
		m->cap_states *= 2;
	}
	s = &m->states[m->n_states];
	*s = (struct state){.n = m->n_found, .whole = m->whole, .hash = hash};
	s->threads = malloc(m->n_found * sizeof *s->threads + 1);
	if (!s->threads)
		return DEAD;
	memcpy(s->threads, m->found, m->n_found * sizeof *s->threads);
	x->slots[at] = m->n_states + 1;
	x->n_used++;
	m->failed = STATUS_OK;
	return (int32_t)m->n_states++;
}

/* Where a byte leads; DEAD also when m->failed. */
static int32_t step(struct grammar_matcher *m, int32_t from, unsigned char c)
{
	struct state *s = &m->states[from];
	int32_t to;
	if (!s->next) {
		s->next = malloc(256 * sizeof *s->next);
		if (!s->next) {
			m->failed = STATUS_NOMEM;
			return DEAD;
		}
		for (int i = 0; i < 256; i++)
			s->next[i] = UNKNOWN;
	}
	if (s->next[c] != UNKNOWN)
		return s->next[c];
	begin_set(m);
	for (uint32_t i = 0; i < s->n; i++) {
		const struct grammar_instr *in = &m->g->code[s->threads[i].pc];
		if (in->op == GRAMMAR_BYTE ? in->a == c : grammar_set_has(&m->g->sets[in->a], c))
			add_thread(m, s->threads[i].pc + 1, s->threads[i].frame);
		follow(m);
	}
	to = intern_state(m);
	if (!m->failed)
		m->states[from].next[c] = to; /* the states may have moved */
	return to;
}

static void free_states(struct grammar_matcher *m)
{
	for (uint32_t i = 0; i < m->n_states; i++) {
		free(m->states[i].threads);
		free(m->states[i].next);
		free(m->states[i].mask);
	}
	m->n_states = 0;
	m->n_masks = 0;
	if (m->state_index.slots)
		memset(m->state_index.slots, 0, m->state_index.n_slots * sizeof *m->state_index.slots);
	m->state_index.n_used = 0;
}

/* Forgets all states but the one at hand. */
static enum status forget_states(struct grammar_matcher *m)
{
	struct state *s = &m->states[m->at];
	uint32_t n = s->n;
	bool whole = s->whole;
	begin_set(m);
	memcpy(m->found, s->threads, n * sizeof *m->found);
	m->n_found = n;
	m->whole = whole;
	free_states(m);
	m->at = intern_state(m);
	return m->failed;
}

/* ---- Masks ---- */

static void allow(uint64_t *mask, int32_t token)
{
	mask[token >> 6] |= UINT64_C(1) << (token & 63);
}

static size_t mask_words(const struct grammar_matcher *m)
{
	return ((size_t)m->v->n_vocab + 63) / 64;
}

/* Marks the tokens that lead somewhere; false when there are none. */
static bool walk_vocab(struct grammar_matcher *m, uint64_t *mask)
{
	const struct grammar_vocab *v = m->v;
	size_t good = 0; /* bytes of the token before that lead somewhere; walk[0..good] are their states */
	bool any = false;
	m->walk[0] = m->at;
	for (int32_t i = 0; i < v->n_ids && !m->failed; i++) {
		struct str piece = tokenizer_piece(v->tokenizer, v->ids[i], false);
		size_t n = v->shared[i];
		/* It begins with the bytes at which the one before failed. */
		if (n > good)
			continue;
		for (good = n; good < piece.n; good++) {
			int32_t to = step(m, m->walk[good], (unsigned char)piece.p[good]);
			if (to == DEAD)
				break;
			m->walk[good + 1] = to;
		}
		if (good == piece.n) {
			allow(mask, v->ids[i]);
			any = true;
		}
	}
	return any;
}

static enum status failed(const struct grammar_matcher *m, struct error *err)
{
	if (m->failed == STATUS_LIMIT)
		return error_set(err, STATUS_LIMIT, "the answer's schema is too ambiguous");
	return error_set(err, m->failed, "no memory for the answer's grammar");
}

enum status grammar_matcher_mask(struct grammar_matcher *m, const uint64_t **mask, struct error *err)
{
	uint64_t *bits = m->states[m->at].mask;
	bool any, whole;
	if (bits) {
		*mask = bits;
		return STATUS_OK;
	}
	m->failed = STATUS_OK;
	m->work = 0;
	if ((m->n_masks >= KEEP_MASKS || m->n_states > KEEP_STATES) && forget_states(m) != STATUS_OK)
		return error_set(err, m->failed, "no memory for the answer's grammar");
	bits = calloc(mask_words(m), sizeof *bits);
	if (!bits)
		return error_set(err, STATUS_NOMEM, "no memory for the answer's grammar");
	whole = m->states[m->at].whole;
	any = walk_vocab(m, bits);
	for (int32_t i = 0; whole && i < m->v->n_end; i++)
		allow(bits, m->v->end[i]);
	if (m->failed || (!any && !(whole && m->v->n_end))) {
		free(bits);
		if (m->failed)
			return failed(m, err);
		return error_set(err, STATUS_INVALID,
		                 "the model's vocabulary cannot spell what the answer's schema demands next");
	}
	m->states[m->at].mask = bits;
	m->n_masks++;
	*mask = bits;
	return STATUS_OK;
}

enum status grammar_matcher_accept(struct grammar_matcher *m, int32_t token, bool *complete, struct error *err)
{
	struct str piece = tokenizer_piece(m->v->tokenizer, token, false);
	int32_t at = m->at;
	m->failed = STATUS_OK;
	m->work = 0;
	for (size_t i = 0; i < piece.n && at != DEAD; i++)
		at = step(m, at, (unsigned char)piece.p[i]);
	if (m->failed)
		return failed(m, err);
	if (at == DEAD)
		return error_set(err, STATUS_INVALID, "token %d does not belong to the answer's schema", token);
	m->at = at;
	*complete = m->states[at].whole && m->states[at].n == 0;
	return STATUS_OK;
}

/* ---- Life ---- */

enum status grammar_matcher_create(struct grammar *g, const struct grammar_vocab *v, bool drop_first_space,
                                   struct grammar_matcher **out)
{
	struct grammar_matcher *m = calloc(1, sizeof *m);
	enum status status = STATUS_NOMEM;
	if (!m)
		return status;
	m->g = grammar_ref(g);
	m->v = v;
	m->cap_states = 64;
	m->cap_frames = 256;
	m->states = malloc(m->cap_states * sizeof *m->states);
	m->frames = malloc(m->cap_frames * sizeof *m->frames);
	/* A thread is put on the list once for each time it is new. */
	m->todo = malloc(MAX_SEEN * sizeof *m->todo);
	m->found = malloc(MAX_THREADS * sizeof *m->found);
	m->seen = calloc(SEEN_SLOTS, sizeof *m->seen);
	m->seen_at = malloc(MAX_SEEN * sizeof *m->seen_at);
	m->walk = malloc((v->longest + 1) * sizeof *m->walk);
	if (!m->states || !m->frames || !m->todo || !m->found || !m->seen || !m->seen_at || !m->walk)
		goto fail;
	m->frames[0] = (struct frame){0, 0, 0};
	m->n_frames = 1;
	begin_set(m);
	add_thread(m, drop_first_space ? 2 : 0, 0);
	follow(m);
	m->at = intern_state(m);
	status = m->failed;
	if (status != STATUS_OK || m->at == DEAD)
		goto fail;
	*out = m;
	return STATUS_OK;

fail:
	grammar_matcher_destroy(m);
	return status == STATUS_OK ? STATUS_INVALID : status;
}

void grammar_matcher_destroy(struct grammar_matcher *m)
{
	if (!m)
		return;
	free_states(m);
	free(m->states);
	free(m->state_index.slots);
	free(m->frames);
	free(m->frame_index.slots);
	free(m->todo);
	free(m->found);
	free(m->seen);
	free(m->seen_at);
	free(m->walk);
	grammar_unref(m->g);
	free(m);
}
