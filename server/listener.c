#include "server/listener.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "engine/base/log.h"
#include "server/conn.h"
#include "server/conn_park.h"
#include "server/tls.h"
#include "server/ws_server.h"

enum {
	MAX_SOCKETS = 8, /* addresses a host name may stand for */
	BACKLOG = 1024,
	ACCEPT_ROUNDS = 64, /* connections accepted before others have their turn */
	PAUSE_MS = 100,	    /* when descriptors have run out */
	SPARE_CONNS = 64,   /* connections over the limit that are told so; more are just closed */
	OTHER_FILES = 1024, /* descriptors that are not connections' */
};

struct listener {
	struct conn_host host;
	struct {
		uv_poll_t poll;
		int fd;
	} sockets[MAX_SOCKETS];
	int n_sockets;
	int32_t most; /* connections that there are descriptors for */
	int port;
	uv_timer_t pause;
	bool accepting, paused, exhausted;
	int pending; /* handles and parts that still live, and 1 until listener_close() */
	void (*closed)(void *arg);
	void *closed_arg;
};

static void format_name(char out[72], const struct sockaddr_storage *a)
{
	char ip[INET6_ADDRSTRLEN] = "?";
	if (a->ss_family == AF_INET6) {
		const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)a;
		inet_ntop(AF_INET6, &in6->sin6_addr, ip, sizeof ip);
		snprintf(out, 72, "[%s]:%d", ip, ntohs(in6->sin6_port));
		return;
	}
	const struct sockaddr_in *in = (const struct sockaddr_in *)a;
	inet_ntop(AF_INET, &in->sin_addr, ip, sizeof ip);
	snprintf(out, 72, "%s:%d", ip, ntohs(in->sin_port));
}

/*
 * An IPv4 address, also one that an IPv6 socket shows mapped (RFC 4291, 2.5.5.2), stands for a client; of IPv6, a /64
 * does.
 */
static void describe_peer(struct conn_peer *out, const struct sockaddr_storage *a)
{
	*out = (struct conn_peer){0};
	format_name(out->name, a);
	if (a->ss_family == AF_INET6) {
		const struct in6_addr *in6 = &((const struct sockaddr_in6 *)a)->sin6_addr;
		memcpy(out->site, in6, IN6_IS_ADDR_V4MAPPED(in6) ? 16 : 8);
		return;
	}
	out->site[10] = out->site[11] = 0xff;
	memcpy(out->site + 12, &((const struct sockaddr_in *)a)->sin_addr, 4);
}

static int32_t open_connections(const struct listener *l)
{
	return l->host.n_conns;
}

/* ---- Accepting ---- */

static void poll_sockets(struct listener *l, bool on);

static void on_pause_over(uv_timer_t *handle)
{
	struct listener *l = handle->data;
	l->paused = false;
	if (l->accepting)
		poll_sockets(l, true);
}

/* No descriptor is free. Connections wait in the backlog until one is; asking again at once would only burn time. */
static void pause_accepting(struct listener *l, int error)
{
	if (!l->exhausted)
		log_msg(LOG_WARN, "accept", "accepting pauses: %s", strerror(error));
	l->exhausted = l->paused = true;
	poll_sockets(l, false);
	uv_timer_start(&l->pause, on_pause_over, PAUSE_MS, 0);
}

/* Accepts at most `rounds` connections; false when more may wait. */
static bool accept_some(struct listener *l, int fd, int rounds)
{
	for (int i = 0; i < rounds && l->accepting && !l->paused; i++) {
		struct sockaddr_storage address;
		socklen_t n = sizeof address;
		if (open_connections(l) >= l->most) {
			pause_accepting(l, EMFILE);
			return true;
		}
		int client = accept4(fd, (struct sockaddr *)&address, &n, SOCK_NONBLOCK | SOCK_CLOEXEC);
		if (client < 0) {
			if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
				pause_accepting(l, errno);
			else if (errno == EINTR || errno == ECONNABORTED || errno == EPROTO)
				continue;
			return true;
		}
		l->exhausted = false;
		int64_t over = open_connections(l) - l->host.config->max_connections;
		if (over >= SPARE_CONNS) {
			l->host.stats.refused++;
			close(client);
			continue;
		}
		struct conn_peer peer;
		describe_peer(&peer, &address);
		if (conn_open(&l->host, client, &peer, over >= 0) != STATUS_OK)
			log_msg(LOG_WARN, "accept", "no memory for the connection of %s", peer.name);
	}
	return !l->accepting || l->paused;
}

static void on_acceptable(uv_poll_t *handle, int status, int events)
{
	struct listener *l = handle->data;
	(void)events;
	if (status < 0)
		log_msg(LOG_ERROR, "accept", "polling a listening socket failed: %s", uv_strerror(status));
	for (int i = 0; i < l->n_sockets; i++)
		if (handle == &l->sockets[i].poll)
			accept_some(l, l->sockets[i].fd, ACCEPT_ROUNDS);
}

static void poll_sockets(struct listener *l, bool on)
{
	for (int i = 0; i < l->n_sockets; i++) {
		if (on)
			uv_poll_start(&l->sockets[i].poll, UV_READABLE, on_acceptable);
		else
			uv_poll_stop(&l->sockets[i].poll);
	}
}

/* ---- Starting ---- */

int listener_allow_descriptors(const struct config *config)
{
	struct rlimit limit;
	rlim_t want = (rlim_t)config->max_connections * 3 + OTHER_FILES;
	int32_t connections, pairs;
	rlim_t most = want > (1 << 20) ? want : (1 << 20);
	if (getrlimit(RLIMIT_NOFILE, &limit) != 0)
		return (int)want;
	if (limit.rlim_cur < want || limit.rlim_cur > most) {
		limit.rlim_cur = limit.rlim_cur < want ? want : most;
		if (limit.rlim_max != RLIM_INFINITY && limit.rlim_cur > limit.rlim_max) {
			listener_share_descriptors(config, (int64_t)limit.rlim_max, &connections, &pairs);
			log_msg(LOG_WARN, "descriptors",
			        "%lld connections at work need %lld descriptors, and the hard limit is %lld: room for "
			        "%d connections, %d of them at work",
			        (long long)config->max_connections, (long long)want, (long long)limit.rlim_max,
			        connections, pairs);
			limit.rlim_cur = limit.rlim_max;
		}
		if (setrlimit(RLIMIT_NOFILE, &limit) != 0)
			getrlimit(RLIMIT_NOFILE, &limit);
	}
	return (int)(limit.rlim_cur < want ? limit.rlim_cur : want);
}

void listener_share_descriptors(const struct config *config, int64_t descriptors, int32_t *connections, int32_t *pairs)
{
	int64_t others = descriptors / 4 < OTHER_FILES ? descriptors / 4 : OTHER_FILES;
	int64_t all = descriptors - others;
	int64_t n = config->max_connections < all * 2 / 3 ? config->max_connections : all * 2 / 3;
	int64_t n_pairs = (all - n) / 2;
	*connections = (int32_t)n;
	*pairs = (int32_t)(n_pairs < n ? n_pairs : n);
}

static void share_descriptors(struct listener *l)
{
	struct rlimit limit;
	l->most = INT32_MAX;
	/* Those over the configured limit are accepted, to be told so. */
	if (getrlimit(RLIMIT_NOFILE, &limit) != 0 ||
	    limit.rlim_cur >= (rlim_t)l->host.config->max_connections * 3 + OTHER_FILES)
		return;
	listener_share_descriptors(l->host.config, (int64_t)limit.rlim_cur, &l->most, &l->host.max_pairs);
	if (l->most == l->host.config->max_connections)
		l->most = INT32_MAX;
}

static enum status bind_one(struct listener *l, const struct addrinfo *a, bool only_v6, struct error *err)
{
	struct sockaddr_storage address;
	memcpy(&address, a->ai_addr, a->ai_addrlen);
	/* Port 0: the first address gets a free one, the others the same. */
	if (l->port && a->ai_family == AF_INET6)
		((struct sockaddr_in6 *)&address)->sin6_port = htons((uint16_t)l->port);
	else if (l->port)
		((struct sockaddr_in *)&address)->sin_port = htons((uint16_t)l->port);
	char name[72];
	format_name(name, &address);

	int fd = socket(a->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return error_set(err, STATUS_IO, "A socket for %s could not be made: %s.", name, strerror(errno));
	int on = 1, v6 = only_v6;
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
	if (a->ai_family == AF_INET6)
		setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &v6, sizeof v6);
	if (bind(fd, (struct sockaddr *)&address, a->ai_addrlen) != 0 || listen(fd, BACKLOG) != 0) {
		int e = errno;
		close(fd);
		if (e == EADDRINUSE)
			return error_set(err, STATUS_EXISTS, "The address %s is in use by another program.", name);
		return error_set(err, STATUS_IO, "Listening on %s failed: %s.", name, strerror(e));
	}
	socklen_t n = sizeof address;
	getsockname(fd, (struct sockaddr *)&address, &n);
	l->port = ntohs(a->ai_family == AF_INET6 ? ((struct sockaddr_in6 *)&address)->sin6_port
						 : ((struct sockaddr_in *)&address)->sin_port);
	int i = l->n_sockets;
	if (uv_poll_init(l->host.loop, &l->sockets[i].poll, fd) != 0) {
		close(fd);
		return error_set(err, STATUS_IO, "Polling %s failed.", name);
	}
	l->sockets[i].fd = fd;
	l->sockets[i].poll.data = l;
	l->n_sockets++;
	l->pending++;
	return STATUS_OK;
}

/* Binds every address that the host stands for. */
static enum status bind_all(struct listener *l, const char *host, int64_t port, struct error *err)
{
	struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV}, *list = NULL;
	char name[256], service[8];
	size_t n = strlen(host);
	bool any = n == 0 || strcmp(host, "*") == 0;
	bool bracketed = n > 2 && host[0] == '[' && host[n - 1] == ']';
	snprintf(name, sizeof name, "%.*s", (int)(bracketed ? n - 2 : n), bracketed ? host + 1 : host);
	snprintf(service, sizeof service, "%d", (int)port);
	int r = getaddrinfo(any ? NULL : name, service, &hints, &list);
	if (r != 0)
		return error_set_param(err, STATUS_INVALID, "host", "The host %s cannot be resolved: %s.", host,
				       r == EAI_SYSTEM ? strerror(errno) : gai_strerror(r));
	int families = 0;
	for (const struct addrinfo *a = list; a; a = a->ai_next)
		families |= a->ai_family == AF_INET ? 1 : a->ai_family == AF_INET6 ? 2 : 0;

	enum status status = STATUS_OK;
	l->port = (int)port;
	for (const struct addrinfo *a = list; a && l->n_sockets < MAX_SOCKETS && status == STATUS_OK; a = a->ai_next) {
		if (a->ai_family != AF_INET && a->ai_family != AF_INET6)
			continue;
		struct error one = {0};
		status = bind_one(l, a, families == 3, &one);
		/* A name such as localhost may stand for an address this machine does not have (no IPv6). */
		if (status == STATUS_IO && families == 3 && (a->ai_next || l->n_sockets))
			status = STATUS_OK;
		if (status != STATUS_OK || l->n_sockets == 0)
			*err = one;
	}
	freeaddrinfo(list);
	if (status == STATUS_OK && l->n_sockets == 0)
		return err->message[0] ? STATUS_IO
				       : error_set(err, STATUS_IO, "The host %s has no usable address.", host);
	return status;
}

enum status listener_start(uv_loop_t *loop, const struct config *config, const struct http_app *http,
			   const struct ws_app *ws, struct listener **out, struct error *err)
{
	struct error local = {0};
	err = err ? err : &local;
	struct listener *l = calloc(1, sizeof *l);
	if (!l)
		return error_set(err, STATUS_NOMEM, "There is no memory for the listener.");
	conn_host_init(&l->host, loop, config);
	uv_timer_init(loop, &l->pause);
	l->pause.data = l;
	l->pending = 2 + PARK_HANDLES;
	share_descriptors(l);

	enum status status = listener_reload_tls(l, err);
	if (status != STATUS_OK)
		goto fail;
	status = bind_all(l, config->host ? config->host : "", config->port, err);
	if (status != STATUS_OK)
		goto fail;
	status = http_server_create(loop, config, http, &l->host.meter, &l->host.http, err);
	if (status != STATUS_OK)
		goto fail;
	status = ws_server_create(loop, config, ws, &l->host.stats, &l->host.meter, &l->host.ws, err);
	if (status != STATUS_OK)
		goto fail;
	l->accepting = true;
	poll_sockets(l, true);
	*out = l;
	return STATUS_OK;

fail:
	listener_close(l, NULL, NULL);
	return status;
}

enum status listener_reload_tls(struct listener *l, struct error *err)
{
	const struct config *config = l->host.config;
	struct tls_context *fresh;
	enum status status;
	if (!config->tls_cert && !config->tls_key)
		return STATUS_OK;
	status = tls_context_create(config->tls_cert, config->tls_key, &fresh, err);
	if (status == STATUS_OK) {
		tls_context_destroy(l->host.tls);
		l->host.tls = fresh;
	}
	return status;
}

int listener_port(const struct listener *l)
{
	return l->port;
}

void listener_stats(const struct listener *l, struct listener_stats *out)
{
	*out = l->host.stats;
	out->websockets = ws_server_count(l->host.ws);
	out->connections = open_connections(l);
	out->parked = l->host.n_parked;
	out->client_bytes = l->host.meter.bytes;
}

/* ---- Stopping ---- */

static void on_part_closed(void *arg)
{
	struct listener *l = arg;
	if (--l->pending)
		return;
	void (*closed)(void *) = l->closed;
	void *closed_arg = l->closed_arg;
	tls_context_destroy(l->host.tls);
	free(l);
	if (closed)
		closed(closed_arg);
}

static void on_handle_closed(uv_handle_t *handle)
{
	on_part_closed(handle->data);
}

static void close_sockets(struct listener *l)
{
	for (int i = 0; i < l->n_sockets; i++) {
		uv_close((uv_handle_t *)&l->sockets[i].poll, on_handle_closed);
		close(l->sockets[i].fd);
	}
	l->n_sockets = 0;
	l->accepting = false;
}

void listener_drain(struct listener *l)
{
	l->host.draining = true;
	http_server_drain(l->host.http);
}

void listener_stop_accepting(struct listener *l)
{
	if (!l->accepting)
		return;
	/* The kernel has connected these clients already: closing the socket now would reset them. */
	for (int i = 0; i < l->n_sockets; i++)
		accept_some(l, l->sockets[i].fd, BACKLOG);
	close_sockets(l);
	listener_drain(l);
	conn_close_idle(&l->host);
}

int32_t listener_active(const struct listener *l)
{
	return l->host.n_exchanges + ws_server_count(l->host.ws) + conn_count_expected(&l->host);
}

void listener_close_websockets(struct listener *l, int code, const char *reason)
{
	ws_server_close_all(l->host.ws, code, reason);
}

static void on_empty(struct conn_host *host)
{
	host->empty = NULL;
	on_part_closed(host); /* the first member of struct listener */
}

void listener_close(struct listener *l, void (*closed)(void *arg), void *arg)
{
	l->closed = closed;
	l->closed_arg = arg;
	close_sockets(l);
	uv_close((uv_handle_t *)&l->pause, on_handle_closed);
	conn_park_host_close(&l->host, on_handle_closed); /* the host is the listener's first member */
	if (l->host.n_conns) {
		l->pending++;
		l->host.empty = on_empty;
		conn_close_all(&l->host);
	}
	if (l->host.ws) {
		l->pending++;
		ws_server_close(l->host.ws, on_part_closed, l);
	}
	if (l->host.http) {
		l->pending++;
		http_server_close(l->host.http, on_part_closed, l);
	}
	on_part_closed(l);
}
