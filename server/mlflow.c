#include "server/mlflow.h"

#include <string.h>

enum status mlflow_check_url(const char *url, struct error *err)
{
	size_t skip = strncmp(url, "http://", 7) == 0 ? 7 : strncmp(url, "https://", 8) == 0 ? 8 : 0;
	if (!skip || !url[skip] || url[skip] == '/' || strpbrk(url, " \t\r\n"))
		return error_set_param(err, STATUS_INVALID, "mlflow",
		                       "mlflow: the tracking server's address must begin with http:// or https://");
	return STATUS_OK;
}

#ifndef KVASIR_CURL

enum status mlflow_create(const struct mlflow_options *options, struct mlflow **out, struct error *err)
{
	(void)options;
	(void)out;
	return error_set_param(err, STATUS_UNSUPPORTED, "mlflow", "mlflow: this build has no libcurl (-Dmlflow)");
}

void mlflow_destroy(struct mlflow *m)
{
	(void)m;
}

void mlflow_set_param(struct mlflow *m, const char *key, const char *value)
{
	(void)m;
	(void)key;
	(void)value;
}

void mlflow_add(struct mlflow *m, const struct engine_usage *usage, int64_t total_ns)
{
	(void)m;
	(void)usage;
	(void)total_ns;
}

void mlflow_stats(struct mlflow *m, struct mlflow_stats *out)
{
	(void)m;
	*out = (struct mlflow_stats){0};
}

#else

#include <curl/curl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "server/json.h"
#include "server/mlflow_record.h"

enum {
	QUEUE = 4096,
	GATHER_MS = 1000,      /* how long a record waits for others */
	RETRY_MS = 500, RETRY_MAX_MS = 30000,
	CONNECT_MS = 3000, CALL_MS = 10000,
	LAST_MS = 1000,        /* for what is left at the end */
	LOOK_MS = 100,         /* how soon the end of the process ends a call */
	ANSWER_BYTES = 1 << 20,
	ID_MAX = 128,
	PARAMS_MAX = 32,
};

/*
 * Shared by the loop and its thread. Who lets go last frees it: a thread that hangs in a name server at the end of the
 * process is left behind.
 */
struct mlflow {
	char *url, *experiment;
	_Atomic int n_holders;
	_Atomic int64_t stop_at_ms; /* when the rest is given up; 0: the end has not come */

	pthread_mutex_t lock;
	pthread_cond_t changed, ended;
	struct mlflow_record *queue; /* [cap], a ring; under lock, and so is all below */
	int32_t cap, first, n;
	int64_t step;
	bool thread_ended;
	struct mlflow_stats stats;
	char *params[PARAMS_MAX][2];
	size_t n_params;

	/* The thread's own. */
	CURLM *multi;
	CURL *curl;
	char experiment_id[ID_MAX], run_id[ID_MAX];
	bool told_down;
};

/* ---- Life ---- */

static void release(struct mlflow *m)
{
	if (atomic_fetch_sub(&m->n_holders, 1) > 1)
		return;
	for (size_t i = 0; i < m->n_params; i++) {
		free(m->params[i][0]);
		free(m->params[i][1]);
	}
	pthread_cond_destroy(&m->changed);
	pthread_cond_destroy(&m->ended);
	pthread_mutex_destroy(&m->lock);
	free(m->queue);
	free(m->url);
	free(m->experiment);
	free(m);
}

static int64_t now_ms(void)
{
	return clock_now_ms(clock_system());
}

static int64_t unix_ms(void)
{
	struct timespec t;
	clock_gettime(CLOCK_REALTIME, &t);
	return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* Waits for a change, under the lock, up to a time of the monotonic clock. */
static void wait_until(pthread_cond_t *c, pthread_mutex_t *lock, int64_t at_ms)
{
	const struct timespec at = {.tv_sec = at_ms / 1000, .tv_nsec = at_ms % 1000 * 1000000};
	pthread_cond_timedwait(c, lock, &at);
}

/* ---- Calls ---- */

enum outcome {
	TAKEN,
	AGAIN,   /* it may work later */
	REFUSED, /* it never will */
	GONE,    /* what it was about is not there */
};

static size_t take_answer(char *data, size_t size, size_t n, void *arg)
{
	struct buf *answer = arg;
	if (answer->len + n * size > ANSWER_BYTES)
		return 0;
	buf_append(answer, data, n * size);
	return answer->failed ? 0 : n * size;
}

static bool is_over(struct mlflow *m)
{
	int64_t at = atomic_load(&m->stop_at_ms);
	return at && now_ms() >= at;
}

/* Runs the call that m->curl is set up for, and looks now and then whether the process waits for its end. */
static CURLcode perform(struct mlflow *m)
{
	CURLcode result = CURLE_ABORTED_BY_CALLBACK;
	int running = 1, left;
	if (curl_multi_add_handle(m->multi, m->curl) != CURLM_OK)
		return CURLE_OUT_OF_MEMORY;
	while (running && !is_over(m)) {
		if (curl_multi_perform(m->multi, &running) != CURLM_OK ||
		    (running && curl_multi_poll(m->multi, NULL, 0, LOOK_MS, NULL) != CURLM_OK))
			break;
	}
	for (const CURLMsg *msg; (msg = curl_multi_info_read(m->multi, &left)) != NULL;)
		if (msg->msg == CURLMSG_DONE)
			result = msg->data.result;
	curl_multi_remove_handle(m->multi, m->curl);
	return result;
}

static void say_down(struct mlflow *m, const char *why)
{
	if (!m->told_down)
		log_msg(LOG_WARN, "mlflow",
		        "the tracking server does not take figures: %s; it is tried again, and no request waits for it",
		        why);
	m->told_down = true;
}

/* path: "runs/create". body NULL: a GET. */
static enum outcome call(struct mlflow *m, const char *path, const struct buf *body, struct buf *answer)
{
	char url[2048], why[CURL_ERROR_SIZE] = "";
	long code = 0;
	struct curl_slist *headers = curl_slist_append(NULL, "Content-Type: application/json");
	if (is_over(m) || !headers || (body && body->failed) ||
	    snprintf(url, sizeof url, "%s/api/2.0/mlflow/%s", m->url, path) >= (int)sizeof url) {
		curl_slist_free_all(headers);
		return AGAIN;
	}
	buf_clear(answer);
	curl_easy_reset(m->curl);
	curl_easy_setopt(m->curl, CURLOPT_URL, url);
	curl_easy_setopt(m->curl, CURLOPT_PROTOCOLS_STR, "http,https");
	curl_easy_setopt(m->curl, CURLOPT_NOSIGNAL, 1L);
	curl_easy_setopt(m->curl, CURLOPT_CONNECTTIMEOUT_MS, (long)CONNECT_MS);
	curl_easy_setopt(m->curl, CURLOPT_TIMEOUT_MS, (long)CALL_MS);
	curl_easy_setopt(m->curl, CURLOPT_WRITEFUNCTION, take_answer);
	curl_easy_setopt(m->curl, CURLOPT_WRITEDATA, answer);
	curl_easy_setopt(m->curl, CURLOPT_ERRORBUFFER, why);
	curl_easy_setopt(m->curl, CURLOPT_HTTPHEADER, headers);
	curl_easy_setopt(m->curl, CURLOPT_USERAGENT, "kvasir/" KVASIR_VERSION);
	if (body) {
		curl_easy_setopt(m->curl, CURLOPT_POSTFIELDS, body->data);
		curl_easy_setopt(m->curl, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)body->len);
	}
	CURLcode done = perform(m);
	curl_slist_free_all(headers);
	if (done != CURLE_OK) {
		say_down(m, why[0] ? why : curl_easy_strerror(done));
		return AGAIN;
	}
	curl_easy_getinfo(m->curl, CURLINFO_RESPONSE_CODE, &code);
	if (code == 200) {
		if (m->told_down)
			log_msg(LOG_INFO, "mlflow", "the tracking server takes figures again");
		m->told_down = false;
		return TAKEN;
	}
	snprintf(why, sizeof why, "%s answered %ld", path, code);
	say_down(m, why);
	if (code == 404)
		return GONE;
	return code == 429 || code == 408 || code >= 500 ? AGAIN : REFUSED;
}

/* The text at a path of the answer, of at most four keys; false when there is none that fits. */
static bool read_text(const struct buf *answer, const char *const *path, char out[ID_MAX])
{
	struct json_doc *doc;
	struct json at[5];
	struct error err;
	size_t depth = 0;
	if (json_parse(buf_str(answer), "The answer", &doc, &at[0], &err) != STATUS_OK)
		return false;
	for (; path[depth] && depth < 4; depth++)
		at[depth + 1] = json_get(&at[depth], path[depth]);
	struct str s = json_text(&at[depth]);
	bool fits = s.p && s.n > 0 && s.n < ID_MAX && !memchr(s.p, 0, s.n);
	if (fits)
		snprintf(out, ID_MAX, "%.*s", STR_ARG(s));
	json_doc_free(doc);
	return fits;
}

static enum outcome find_experiment(struct mlflow *m, struct buf *body, struct buf *answer)
{
	static const char *const found[] = {"experiment", "experiment_id", NULL};
	static const char *const made[] = {"experiment_id", NULL};
	char path[1024];
	char *name = curl_easy_escape(m->curl, m->experiment, 0);
	if (!name)
		return AGAIN;
	int n = snprintf(path, sizeof path, "experiments/get-by-name?experiment_name=%s", name);
	curl_free(name);
	enum outcome o = n < (int)sizeof path ? call(m, path, NULL, answer) : REFUSED;
	if (o == TAKEN)
		return read_text(answer, found, m->experiment_id) ? TAKEN : AGAIN;
	if (o != GONE)
		return o;
	buf_clear(body);
	buf_puts(body, "{\"name\":");
	buf_json_string(body, m->experiment, strlen(m->experiment));
	buf_putc(body, '}');
	o = call(m, "experiments/create", body, answer);
	/* Another daemon may have made it in between: then it is found the next time. */
	return o == TAKEN ? (read_text(answer, made, m->experiment_id) ? TAKEN : AGAIN) : o == REFUSED ? AGAIN : o;
}

static enum outcome send_params(struct mlflow *m, struct buf *body, struct buf *answer)
{
	buf_clear(body);
	buf_puts(body, "{\"run_id\":");
	buf_json_string(body, m->run_id, strlen(m->run_id));
	buf_puts(body, ",\"params\":[");
	pthread_mutex_lock(&m->lock);
	for (size_t i = 0; i < m->n_params; i++) {
		buf_puts(body, i ? ",{\"key\":" : "{\"key\":");
		buf_json_string(body, m->params[i][0], strlen(m->params[i][0]));
		buf_puts(body, ",\"value\":");
		buf_json_string(body, m->params[i][1], strlen(m->params[i][1]));
		buf_putc(body, '}');
	}
	pthread_mutex_unlock(&m->lock);
	buf_puts(body, "]}");
	return call(m, "runs/log-batch", body, answer);
}

static enum outcome start_run(struct mlflow *m, struct buf *body, struct buf *answer)
{
	static const char *const id[] = {"run", "info", "run_id", NULL};
	buf_clear(body);
	buf_puts(body, "{\"experiment_id\":");
	buf_json_string(body, m->experiment_id, strlen(m->experiment_id));
	buf_printf(body,
	           ",\"start_time\":%lld,\"run_name\":\"kvasir-%lld\",\"tags\":[{\"key\":\"mlflow.source.name\","
	           "\"value\":\"kvasir %s\"}]}",
	           (long long)unix_ms(), (long long)unix_ms(), KVASIR_VERSION);
	enum outcome o = call(m, "runs/create", body, answer);
	if (o == GONE)
		m->experiment_id[0] = '\0';
	if (o == TAKEN && !read_text(answer, id, m->run_id))
		return AGAIN;
	return o;
}

/* An experiment and a run, as far as they are not there yet. */
static enum outcome prepare(struct mlflow *m, struct buf *body, struct buf *answer)
{
	enum outcome o = TAKEN;
	if (!m->experiment_id[0])
		o = find_experiment(m, body, answer);
	if (o != TAKEN || m->run_id[0])
		return o;
	o = start_run(m, body, answer);
	/* Parameters are a nicety: figures go on without them. */
	return o == TAKEN && send_params(m, body, answer) == AGAIN ? AGAIN : o;
}

static enum outcome send_batch(struct mlflow *m, const struct mlflow_record *batch, size_t n, struct buf *body,
                               struct buf *answer)
{
	enum outcome o = prepare(m, body, answer);
	if (o != TAKEN)
		return o == GONE ? AGAIN : o;
	buf_clear(body);
	mlflow_write_batch(m->run_id, batch, n, body);
	o = call(m, "runs/log-batch", body, answer);
	/* The run was deleted: the next attempt makes another one. */
	if (o == GONE)
		m->run_id[0] = '\0';
	return o == GONE ? AGAIN : o;
}

/* ---- The thread ---- */

/* Under the lock: waits until there is something to send, and for others to join it. False at the end. */
static bool wait_for_work(struct mlflow *m)
{
	while (m->n == 0 && !atomic_load(&m->stop_at_ms))
		pthread_cond_wait(&m->changed, &m->lock);
	int64_t until = now_ms() + GATHER_MS;
	while (m->n > 0 && m->n < MLFLOW_BATCH && !atomic_load(&m->stop_at_ms) && now_ms() < until)
		wait_until(&m->changed, &m->lock, until);
	return m->n > 0;
}

/* Under the lock: until the next attempt, or the end. */
static void wait_for_retry(struct mlflow *m, int64_t delay_ms)
{
	int64_t until = now_ms() + delay_ms;
	while (!atomic_load(&m->stop_at_ms) && now_ms() < until)
		wait_until(&m->changed, &m->lock, until);
	if (atomic_load(&m->stop_at_ms))
		wait_until(&m->changed, &m->lock, now_ms() + LOOK_MS);
}

static void finish_run(struct mlflow *m, struct buf *body, struct buf *answer)
{
	if (!m->run_id[0])
		return;
	buf_clear(body);
	buf_puts(body, "{\"run_id\":");
	buf_json_string(body, m->run_id, strlen(m->run_id));
	buf_printf(body, ",\"status\":\"FINISHED\",\"end_time\":%lld}", (long long)unix_ms());
	call(m, "runs/update", body, answer);
}

static void *thread_main(void *arg)
{
	struct mlflow *m = arg;
	struct mlflow_record batch[MLFLOW_BATCH];
	struct buf body = BUF_INIT, answer = BUF_INIT;
	int64_t delay_ms = RETRY_MS;
	pthread_mutex_lock(&m->lock);
	while (wait_for_work(m)) {
		size_t n = m->n < MLFLOW_BATCH ? (size_t)m->n : MLFLOW_BATCH;
		for (size_t i = 0; i < n; i++)
			batch[i] = m->queue[((size_t)m->first + i) % (size_t)m->cap];
		pthread_mutex_unlock(&m->lock);
		enum outcome o = send_batch(m, batch, n, &body, &answer);
		pthread_mutex_lock(&m->lock);
		m->stats.up = o == TAKEN;
		if (o == AGAIN) {
			m->stats.failures++;
			if (is_over(m))
				break;
			wait_for_retry(m, delay_ms);
			delay_ms = 2 * delay_ms < RETRY_MAX_MS ? 2 * delay_ms : RETRY_MAX_MS;
			continue;
		}
		/* Only this thread takes from the queue, so they are still its first. */
		m->first = (int32_t)(((size_t)m->first + n) % (size_t)m->cap);
		m->n -= (int32_t)n;
		m->stats.failures += o != TAKEN;
		*(o == TAKEN ? &m->stats.sent : &m->stats.rejected) += n;
		delay_ms = RETRY_MS;
	}
	pthread_mutex_unlock(&m->lock);
	finish_run(m, &body, &answer);
	curl_easy_cleanup(m->curl);
	curl_multi_cleanup(m->multi);
	buf_free(&body);
	buf_free(&answer);
	pthread_mutex_lock(&m->lock);
	m->thread_ended = true;
	pthread_cond_broadcast(&m->ended);
	pthread_mutex_unlock(&m->lock);
	release(m);
	return NULL;
}

/* ---- The loop's side ---- */

static enum status start_thread(struct mlflow *m, struct error *err)
{
	pthread_t thread;
	m->curl = curl_easy_init();
	m->multi = curl_multi_init();
	if (!m->curl || !m->multi) {
		curl_easy_cleanup(m->curl);
		curl_multi_cleanup(m->multi);
		return error_set_param(err, STATUS_NOMEM, "mlflow", "mlflow: there is no memory for libcurl");
	}
	atomic_store(&m->n_holders, 2);
	if (pthread_create(&thread, NULL, thread_main, m) != 0) {
		curl_easy_cleanup(m->curl);
		curl_multi_cleanup(m->multi);
		atomic_store(&m->n_holders, 1);
		return error_set_param(err, STATUS_NOMEM, "mlflow", "mlflow: no thread can be started");
	}
	pthread_detach(thread);
	return STATUS_OK;
}

enum status mlflow_create(const struct mlflow_options *options, struct mlflow **out, struct error *err)
{
	enum status st = mlflow_check_url(options->url, err);
	pthread_condattr_t attr;
	if (st != STATUS_OK)
		return st;
	struct mlflow *m = calloc(1, sizeof *m);
	if (!m)
		return error_set_param(err, STATUS_NOMEM, "mlflow", "mlflow: out of memory");
	atomic_store(&m->n_holders, 1);
	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_mutex_init(&m->lock, NULL);
	pthread_cond_init(&m->changed, &attr);
	pthread_cond_init(&m->ended, &attr);
	pthread_condattr_destroy(&attr);
	m->cap = options->queue ? options->queue : QUEUE;
	m->queue = calloc((size_t)m->cap, sizeof *m->queue);
	m->url = strdup(options->url);
	m->experiment = strdup(options->experiment);
	if (!m->queue || !m->url || !m->experiment) {
		st = error_set_param(err, STATUS_NOMEM, "mlflow", "mlflow: out of memory");
		goto fail;
	}
	for (size_t n = strlen(m->url); n > 0 && m->url[n - 1] == '/'; n--)
		m->url[n - 1] = '\0';
	if (curl_global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK) {
		st = error_set_param(err, STATUS_INTERNAL, "mlflow", "mlflow: libcurl does not start");
		goto fail;
	}
	st = start_thread(m, err);
	if (st != STATUS_OK)
		goto fail;
	*out = m;
	return STATUS_OK;
fail:
	release(m);
	return st;
}

void mlflow_destroy(struct mlflow *m)
{
	if (!m)
		return;
	pthread_mutex_lock(&m->lock);
	atomic_store(&m->stop_at_ms, now_ms() + LAST_MS);
	pthread_cond_broadcast(&m->changed);
	for (int64_t until = now_ms() + LAST_MS + LAST_MS / 2; !m->thread_ended && now_ms() < until;)
		wait_until(&m->ended, &m->lock, until);
	if (m->n > 0)
		log_msg(LOG_WARN, "mlflow", "the figures of %d requests were not sent", (int)m->n);
	pthread_mutex_unlock(&m->lock);
	release(m);
}

void mlflow_set_param(struct mlflow *m, const char *key, const char *value)
{
	if (!m)
		return;
	char *k = strdup(key), *v = strdup(value);
	pthread_mutex_lock(&m->lock);
	if (k && v && m->n_params < PARAMS_MAX) {
		m->params[m->n_params][0] = k;
		m->params[m->n_params++][1] = v;
		k = v = NULL;
	}
	pthread_mutex_unlock(&m->lock);
	free(k);
	free(v);
}

void mlflow_add(struct mlflow *m, const struct engine_usage *usage, int64_t total_ns)
{
	if (!m)
		return;
	pthread_mutex_lock(&m->lock);
	if (m->n == m->cap) {
		m->stats.dropped++;
	} else {
		size_t at = ((size_t)m->first + (size_t)m->n) % (size_t)m->cap;
		m->queue[at] = (struct mlflow_record){*usage, total_ns, unix_ms(), m->step++};
		m->n++;
		/* The first one wakes the thread, and a whole batch does. */
		if (m->n == 1 || m->n == MLFLOW_BATCH)
			pthread_cond_signal(&m->changed);
	}
	pthread_mutex_unlock(&m->lock);
}

void mlflow_stats(struct mlflow *m, struct mlflow_stats *out)
{
	*out = (struct mlflow_stats){0};
	if (!m)
		return;
	pthread_mutex_lock(&m->lock);
	*out = m->stats;
	out->queued = m->n;
	pthread_mutex_unlock(&m->lock);
}

#endif
