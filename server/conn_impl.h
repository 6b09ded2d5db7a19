/*
 * The parts of a connection: conn.c (life, sockets, refusals), conn_http.c (requests and their answers) and conn_ws.c
 * (WebSocket). Only these include it.
 */
#pragma once

#include <sys/socket.h>

#include "server/conn.h"
#include "server/conn_park.h"
#include "server/frame.h"
#include "server/tls.h"

struct ws_conn;

enum {
	LINGER_MS = 3000,      /* how long a refused client's remaining bytes are read and thrown away */
	SPARE_OF_SITE = 8,     /* connections over the limit of an address that are told so; more are just closed */
	PUMP_ROUNDS = 16,      /* reads from the pair before other connections have their turn */
	READ_ROUNDS = 4,       /* the same for reads from the client */
	KEEP_BUFFER = 4096,    /* an idle connection keeps a read buffer up to this size */
	KEEP_LINK_MS = 1000,   /* an idle connection keeps its pair and libmicrohttpd's memory for so long */
	UNSENT_BYTES = 131072, /* the kernel may hold this much for a client, and again for us, before writes wait */
};

enum conn_state {
	CONN_HEAD,   /* waiting for a request, or inside its head */
	CONN_BODY,   /* inside a body */
	CONN_WAIT,   /* the request is complete, its answer is not */
	CONN_WS,     /* a WebSocket */
	CONN_LINGER, /* sending what is left, then throwing away what still comes */
	CONN_CLOSED, /* handles are closing */
};

/* Bytes on their way that the kernel had no room for yet. */
struct backlog {
	struct buf bytes;
	size_t at;
};

/* Our end of the socket pair whose other end a library has. */
struct conn_pair {
	uv_poll_t poll;
	struct conn *conn;
	int fd;
	int events; /* polled for */
	bool ended; /* the library has closed its end */
};

struct conn {
	struct list node, site_node; /* of the host's lists */
	struct conn_host *host;
	enum conn_state state;
	int fd;
	struct tls *tls; /* over fd, or NULL */
	int fd_events; /* polled for */
	uv_poll_t poll;
	uv_timer_t timer;
	int n_handles;
	struct conn_pair *pair; /* NULL: none */
	struct http_link *link;
	struct ws_conn *ws;
	union {
		struct {
			struct head head;
			struct body body;
		};
		struct { /* in CONN_WS */
			struct frame_check frames;
			struct park park;
		};
	};
	struct buf in;	     /* read, and not yet passed on */
	struct backlog up;   /* checked, for the pair */
	struct backlog down; /* from the pair, for the client */
	bool served;	     /* a request was answered before */
	bool answered;	     /* libmicrohttpd is done with the current request */
	bool input_waits;    /* in CONN_WAIT: the next request has begun to arrive */
	bool streamed;	     /* the body is taken as it comes: it has no limit */
	bool half_closed;    /* the client sends no more */
	bool shut;	     /* we send no more */
	size_t metered;	     /* bytes of this that the host's meter knows of */
	struct conn_peer peer;
};

static inline bool backlog_empty(const struct backlog *b)
{
	return b->at == b->bytes.len;
}

/*
 * Sends (through tls, if not NULL) what the kernel takes and keeps the rest; false when the socket is broken or there
 * is no memory.
 */
bool conn_send(int fd, struct tls *tls, struct backlog *b, const char *p, size_t n);
/* Sends from the backlog; false when the socket is broken. */
bool conn_send_backlog(int fd, struct tls *tls, struct backlog *b);
void conn_set_state(struct conn *c, enum conn_state state);
/*
 * Polls for what the connection can use now, and counts its memory: at the end of everything that may have changed it.
 */
void conn_update(struct conn *c);
/* (Re)starts the connection's one timer; negative: none. */
void conn_set_deadline(struct conn *c, int64_t ms);
/* Makes a socket pair and polls one end; *theirs is the other. False: no descriptors or memory. */
bool conn_open_pair(struct conn *c, int *theirs);
/* Closes our end of it, and nothing else. */
void conn_give_back_pair(struct conn *c);
/* Lets go of the library behind the pair: the exchange's on_close, or the WebSocket's closed, runs in here. */
void conn_close_pair(struct conn *c);
/* Closes everything now. The memory stays until the handles are closed. */
void conn_drop(struct conn *c);
/* The same with an RST: what the client has not read is not kept for it. */
void conn_reset(struct conn *c);
/*
 * Nothing more will be said: sends what is queued, then FIN, and reads on for a while, so that no RST destroys the
 * answer.
 */
void conn_linger(struct conn *c);
/* Answers with an error of our own and lingers. */
void conn_refuse(struct conn *c, const struct head_error *e);
/*
 * Moves bytes from the pair to the client. True: all that the library has written so far is with the kernel. False:
 * there is a backlog, or more to read, or the connection was dropped.
 */
bool conn_pump(struct conn *c);

/* conn_http.c: goes on with what is in c->in, as far as this request goes. */
void conn_http_advance(struct conn *c);
/* The pair has something to read, or libmicrohttpd is done with the request. */
void conn_http_pump(struct conn *c);
/* The client has sent its last byte. */
void conn_http_ended(struct conn *c);
/* The time of an idle connection, or of its pair, is over. */
void conn_http_idle(struct conn *c);

/* conn_ws.c: makes a WebSocket of a connection whose request was dispatched. */
void conn_ws_begin(struct conn *c);
/* Bytes from the client. */
void conn_ws_receive(struct conn *c, const char *p, size_t n);
void conn_ws_pump(struct conn *c);
