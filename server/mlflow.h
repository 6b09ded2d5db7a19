/*
 * Figures of ended requests, sent to an MLflow tracking server by its REST API
 * (mlflow.org/docs/latest/api_reference/rest-api.html): an experiment that is made if it is not there, a run for each
 * life of the daemon, and `runs/log-batch`.
 *
 * Nobody waits for it. Records go to a bounded queue, from which a thread of its own sends them some at a time; what
 * fails is tried again, after half a second, then at intervals up to half a minute; what finds no room meanwhile is
 * dropped and counted. The end of the process waits for the rest a second at most.
 *
 * The only file with libcurl is mlflow.c; without it mlflow_create() is UNSUPPORTED.
 */
#pragma once

#include <stdint.h>

#include "engine/base/buf.h"
#include "engine/base/status.h"
#include "engine/engine.h"

struct mlflow;

struct mlflow_options {
	const char *url;        /* http:// or https://; may hold user:password@ */
	const char *experiment; /* by name */
	int32_t queue;          /* records; 0: 4,096 */
};

/* Copies the options, and starts a thread. INVALID (mlflow), UNSUPPORTED (mlflow), NOMEM. */
enum status mlflow_create(const struct mlflow_options *options, struct mlflow **out, struct error *err);
/* INVALID (mlflow) unless it could be a tracking server's address. */
enum status mlflow_check_url(const char *url, struct error *err);
/* Sends what is left, a second long at most. NULL is allowed. */
void mlflow_destroy(struct mlflow *m);
/*
 * What the run is said to be about: parameters, sent before the first record. Strings are copied; ignored without
 * memory.
 */
void mlflow_set_param(struct mlflow *m, const char *key, const char *value);

/*
 * An ended request. total_ns: from submission to the end. Never waits; dropped when the queue is full. NULL is allowed.
 */
void mlflow_add(struct mlflow *m, const struct engine_usage *usage, int64_t total_ns);

struct mlflow_stats {
	uint64_t sent, dropped, rejected; /* records: taken by the server; without room; refused by it for good */
	uint64_t failures;                /* attempts that came to nothing */
	int32_t queued;
	bool up;                          /* the last attempt succeeded */
};
/* Zeros for NULL. */
void mlflow_stats(struct mlflow *m, struct mlflow_stats *out);
