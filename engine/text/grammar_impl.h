/*
 * The program of a grammar, between the files that build it and grammar_match.c, which runs it.
 *
 * A nondeterministic machine over bytes with a return stack. A thread is a program counter and a stack; all threads
 * advance together by a byte, and the text is whole when one of them has reached END.
 */
#pragma once

#include <stdatomic.h>

#include "engine/text/grammar.h"

enum grammar_op {
	GRAMMAR_BYTE,  /* consumes the byte a */
	GRAMMAR_SET,   /* consumes a byte of class a */
	GRAMMAR_SPLIT, /* goes on at a and at b */
	GRAMMAR_JUMP,  /* goes on at a */
	GRAMMAR_CALL,  /* runs routine a, then goes on behind */
	GRAMMAR_NEST,  /* ends the thread when it is nested too deep */
	GRAMMAR_RETURN,
	GRAMMAR_FAIL, /* ends the thread */
	GRAMMAR_END,
};

struct grammar_instr {
	uint32_t op, a, b;
};

struct grammar_set {
	uint64_t bits[4];
};

/*
 * The stack is GRAMMAR_MAX_FRAMES deep; objects and arrays begin only in the part below GRAMMAR_MAX_NESTED, so that
 * there is room to end what has begun.
 */
enum { GRAMMAR_MAX_INSTRS = 1 << 17, GRAMMAR_MAX_NESTED = 160, GRAMMAR_MAX_FRAMES = 224 };

struct grammar {
	_Atomic int refs;
	struct grammar_instr *code; /* [n_code]; the text begins at 0, or at 2 where a space before it is not shown */
	uint32_t n_code;
	struct grammar_set *sets; /* [n_sets] */
	uint32_t n_sets;
	uint32_t *entry; /* [n_routines] where each routine begins */
	uint32_t n_routines;
};

static inline void grammar_set_add(struct grammar_set *s, unsigned from, unsigned to)
{
	for (unsigned c = from; c <= to; c++)
		s->bits[c >> 6] |= UINT64_C(1) << (c & 63);
}

static inline bool grammar_set_has(const struct grammar_set *s, unsigned c)
{
	return s->bits[c >> 6] >> (c & 63) & 1;
}
