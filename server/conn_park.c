/* Idle WebSockets without a library behind them. See conn_park.h. */
#include "server/conn_park.h"

#include <linux/sockios.h>
#include <string.h>
#include <sys/ioctl.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "server/conn_impl.h"
#include "server/ws_server.h"

enum {
	RETRY_MS = 20,	   /* how often those in the queue try again */
	WAKE_ROUNDS = 64,  /* woken before other connections have their turn */
	SOON_MS = 1,	   /* in the next turn of the loop: libuv runs a timer of 0 ms again in the same one */
	MAX_ANSWER = 1024, /* bytes of libwebsockets' 101 */
	/*
	 * Turns of the loop in which libwebsockets has read what it was sent, written what it owes (a pong, of which it
	 * says nothing), and that has been read here; however long a turn takes.
	 */
	QUIET_TURNS = 4,
};

static int64_t now_ms(const struct conn_host *host)
{
	return clock_now_ms(host->clock);
}

/* ---- The states ---- */

static void on_timer(uv_timer_t *handle)
{
	conn_park_run(handle->data);
}

static void run_in(struct conn_host *host, uint64_t ms)
{
	uv_timer_start(&host->park_timer, on_timer, ms, 0);
}

static uint64_t tick_ms(const struct conn_host *host)
{
	int64_t tick = host->config->ws_park_after / 4;
	return tick < 10 ? 10 : tick > 500 ? 500 : (uint64_t)tick;
}

static void enter(struct conn *c, enum park_state state)
{
	struct conn_host *host = c->host;
	struct list *of_state[] = {
		[PARK_AWAKE] = &host->awake,
		[PARK_QUEUED] = &host->to_wake,
		[PARK_WAKING] = &host->waking,
		[PARK_CLOSING] = NULL,
	};
	host->n_parked += (state == PARK_PARKED) - (c->park.state == PARK_PARKED);
	c->park.state = state;
	c->park.since_ms = now_ms(host);
	c->park.since_turn = host->turn;
	list_remove(&c->park.node);
	if (of_state[state])
		list_push_back(of_state[state], &c->park.node);
	if (state == PARK_QUEUED)
		run_in(host, 0);
	else if (of_state[state] && !uv_is_active((uv_handle_t *)&host->park_timer))
		run_in(host, tick_ms(host));
}

void conn_park_begin(struct conn *c)
{
	c->park = (struct park){.state = PARK_AWAKE};
	list_init(&c->park.node);
	enter(c, PARK_AWAKE);
}

void conn_park_leave(struct conn *c)
{
	c->host->n_parked -= c->park.state == PARK_PARKED;
	list_remove(&c->park.node);
}

void conn_park_active(struct conn *c)
{
	if (c->park.state == PARK_AWAKE)
		enter(c, PARK_AWAKE); /* now, and behind those that have been silent for longer */
	else if (c->park.state == PARK_PARKED)
		enter(c, PARK_QUEUED);
}

void conn_park_failed(struct conn *c)
{
	if (c->park.state != PARK_WAKING)
		return;
	c->park.failed = true;
	run_in(c->host, 0);
}

/* ---- Parking ---- */

/* Nothing is under way in either direction: not here, not between the ends of the pair, not behind it. */
static bool is_silent(const struct conn *c)
{
	int unread = 0, unsent = 0;
	if (c->host->turn - c->park.since_turn < QUIET_TURNS || !c->ws || !ws_conn_is_silent(c->ws))
		return false;
	if (c->half_closed || !frame_check_at_rest(&c->frames) || !backlog_empty(&c->up) || !backlog_empty(&c->down))
		return false;
	return c->pair && !c->pair->ended && ioctl(c->pair->fd, FIONREAD, &unread) == 0 && unread == 0 &&
	       ioctl(c->pair->fd, SIOCOUTQ, &unsent) == 0 && unsent == 0;
}

/* Parks those that were silent for so long; those that were for longest come first. */
static void park_silent(struct conn_host *host, int64_t silence_ms, int32_t pairs_enough)
{
	int64_t now = now_ms(host);
	list_each(node, tmp, &host->awake)
	{
		struct conn *c = list_entry(node, struct conn, park.node);
		if (now - c->park.since_ms < silence_ms || host->n_pairs < pairs_enough)
			return;
		if (!is_silent(c))
			continue;
		conn_give_back_pair(c);
		ws_conn_unlink(c->ws);
		enter(c, PARK_PARKED);
		conn_update(c);
	}
}

void conn_park_make_room(struct conn_host *host)
{
	if (host->config->ws_park_after)
		park_silent(host, PARK_PRESSED_MS, host->max_pairs);
}

/* ---- Waking ---- */

size_t park_swallow(struct park_answer *a, const char *p, size_t n)
{
	static const char begins[] = "HTTP/1.1 101 ", ends[] = "\r\n\r\n";
	size_t i = 0;
	while (i < n && a->matched < 4 && !a->wrong) {
		char byte = p[i++];
		if ((a->n < sizeof begins - 1 && byte != begins[a->n]) || a->n >= MAX_ANSWER)
			a->wrong = true;
		a->n++;
		a->matched = byte == ends[a->matched] ? a->matched + 1 : byte == '\r';
	}
	return i;
}

size_t conn_park_filter(struct conn *c, const char *p, size_t n)
{
	if (c->park.state != PARK_WAKING)
		return 0;
	size_t skip = park_swallow(&c->park.answer, p, n);
	if (c->park.answer.wrong) {
		conn_park_failed(c);
		return n;
	}
	if (c->park.answer.matched == 4)
		enter(c, PARK_AWAKE);
	return skip;
}

static bool begin_waking(struct conn *c)
{
	int theirs;
	if (!conn_open_pair(c, &theirs))
		return false;
	c->park.answer = (struct park_answer){0};
	c->park.failed = false;
	if (!ws_conn_link(c->ws, theirs)) {
		conn_give_back_pair(c);
		return false;
	}
	c->host->woken_ms = now_ms(c->host);
	enter(c, PARK_WAKING);
	conn_update(c);
	return true;
}

/* True when more could be woken at once. */
static bool wake_queued(struct conn_host *host)
{
	int64_t now = now_ms(host);
	int rounds = 0;
	list_each(node, tmp, &host->to_wake)
	{
		struct conn *c = list_entry(node, struct conn, park.node);
		if (now - c->park.since_ms >= PARK_WAKE_MS && now - host->woken_ms >= PARK_WAKE_MS) {
			log_msg(LOG_WARN, "websocket", "there are no descriptors or memory to go on with %s",
			        c->peer.name);
			conn_park_end(c, WS_TRY_AGAIN_LATER, "The server has no room for this connection now.");
			conn_update(c);
			continue;
		}
		if (c->frames.quiet)
			continue; /* the rest of a frame that was begun without the library must not reach it */
		if (rounds++ == WAKE_ROUNDS)
			return true;
		if (!begin_waking(c))
			return false; /* who comes behind it would not fare better */
	}
	return false;
}

static void give_up_failed(struct conn_host *host)
{
	int64_t now = now_ms(host);
	list_each(node, tmp, &host->waking)
	{
		struct conn *c = list_entry(node, struct conn, park.node);
		if (!c->park.failed && now - c->park.since_ms < PARK_WAKE_MS)
			continue;
		log_msg(LOG_WARN, "websocket", "the connection of %s could not be woken", c->peer.name);
		conn_park_end(c, WS_INTERNAL_ERROR, "The server could not go on with this connection.");
		conn_update(c);
	}
}

void conn_park_run(struct conn_host *host)
{
	give_up_failed(host);
	if (host->config->ws_park_after)
		park_silent(host, host->config->ws_park_after, 0);
	bool more = wake_queued(host);
	if (!list_empty(&host->to_wake))
		run_in(host, more ? SOON_MS : RETRY_MS);
	else if (!list_empty(&host->awake) || !list_empty(&host->waking))
		run_in(host, tick_ms(host));
	else
		uv_timer_stop(&host->park_timer);
}

/* ---- Control frames without the library ---- */

static bool send_control(struct conn *c, int opcode, const void *payload, size_t n)
{
	uint8_t frame[2 + FRAME_MAX_CONTROL];
	return conn_send(c->fd, c->tls, &c->down, (const char *)frame, frame_put_control(frame, opcode, payload, n));
}

static bool send_close(struct conn *c, int code, const char *reason)
{
	uint8_t frame[2 + FRAME_MAX_CONTROL];
	return conn_send(c->fd, c->tls, &c->down, (const char *)frame, frame_put_close(frame, code, reason));
}

static void linger_if(struct conn *c, bool sent)
{
	if (sent)
		conn_linger(c);
	else
		conn_drop(c);
}

void conn_park_end(struct conn *c, int code, const char *reason)
{
	linger_if(c, c->park.state == PARK_CLOSING || send_close(c, code, reason));
}

void conn_park_pong(struct conn *c)
{
	if (c->park.state != PARK_CLOSING && !send_control(c, FRAME_PONG, c->frames.control, c->frames.n_control))
		conn_drop(c);
}

void conn_park_closed(struct conn *c)
{
	linger_if(c, c->park.state == PARK_CLOSING ||
	                     send_control(c, FRAME_CLOSE, c->frames.control, c->frames.n_control));
}

/* ---- For ws.c ---- */

void conn_ws_active(struct conn *c)
{
	conn_park_active(c);
}

void conn_ws_unlinked(struct conn *c)
{
	conn_park_failed(c);
}

bool conn_ws_is_parked(const struct conn *c)
{
	return c->park.state == PARK_PARKED;
}

bool conn_ws_ping(struct conn *c)
{
	/* One that has not left for want of room in the kernel is enough. */
	bool sent = !backlog_empty(&c->down) || send_control(c, FRAME_PING, NULL, 0);
	conn_update(c);
	return sent;
}

size_t conn_ws_close_payload(const struct conn *c, const void **payload)
{
	*payload = c->frames.control;
	return c->frames.n_control;
}

bool conn_ws_close(struct conn *c, int code, const char *reason)
{
	bool sent = send_close(c, code, reason);
	enter(c, PARK_CLOSING);
	conn_update(c);
	return sent;
}

/* ---- For the listener ---- */

static void on_turn(uv_prepare_t *handle)
{
	((struct conn_host *)handle->data)->turn++;
}

void conn_park_host_init(struct conn_host *host)
{
	host->clock = clock_system();
	host->max_pairs = INT32_MAX;
	list_init(&host->awake);
	list_init(&host->to_wake);
	list_init(&host->waking);
	uv_timer_init(host->loop, &host->park_timer);
	uv_prepare_init(host->loop, &host->park_turns);
	host->park_timer.data = host->park_turns.data = host;
	uv_prepare_start(&host->park_turns, on_turn);
}

void conn_park_host_close(struct conn_host *host, uv_close_cb closed)
{
	uv_close((uv_handle_t *)&host->park_timer, closed);
	uv_close((uv_handle_t *)&host->park_turns, closed);
}
