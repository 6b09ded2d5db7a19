/*
 * A backend that stands before another one and, while it counts, says how long each kind of operation took and how many
 * bytes of weights and KV were read. The forward pass runs over it unchanged.
 */
#pragma once

#include "engine/backend.h"
#include "engine/base/clock.h"

enum meter_op {
	METER_EMBED,
	METER_NORM,
	METER_QKV,     /* products that make queries, keys and values */
	METER_ROPE,
	METER_KV_WRITE,
	METER_ATTENTION,
	METER_O,       /* the product behind attention */
	METER_GATE_UP,
	METER_GLU,
	METER_DOWN,
	METER_OUTPUT,  /* logits */
	METER_OTHER,
	METER_N_OPS,
};

const char *meter_op_name(enum meter_op op);

struct meter_counts {
	int64_t ns[METER_N_OPS];
	uint64_t weight_bytes; /* of the matrices as the backend keeps them, once for each product */
	uint64_t kv_bytes;     /* of the positions attended to, once for each sequence and layer */
};

struct meter;

/*
 * `inner` stays the caller's and must outlive the meter; all that is made through the meter must be given back through
 * it.
 */
enum status meter_create(struct backend *inner, const struct clock *clock, struct meter **out);
void meter_destroy(struct meter *m); /* NULL is allowed */
struct backend *meter_backend(struct meter *m);

/* Counts from zero. Each operation then waits for its end, which costs a little on a device that runs by itself. */
void meter_start(struct meter *m);
void meter_stop(struct meter *m, struct meter_counts *out);
