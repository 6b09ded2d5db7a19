/*
 * kvasir health: asks a daemon how it is, for container health checks and scripts: the image needs no HTTP client. Host
 * and port, and whether it speaks TLS, are those of a daemon with the same environment (and KVASIR_CONFIG). Whose
 * certificate it shows is not looked at: the daemon is this machine's own, and nothing secret is said.
 */
#include "server/cli.h"

#include <errno.h>
#include <netdb.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "config/config.h"
#include "server/tls.h"

struct args {
	char *host;
	int64_t port, timeout;
	bool live, tls;
};

static const struct option rows[] = {
	OPTION_ROW_STRING(struct args, host, "host", NULL,
                          "address of the daemon (default: as `kvasir serve` would listen)"),
	OPTION_ROW_INT(struct args, port, "port", 0, 0, 65535, "its port; 0: as `kvasir serve` would listen"),
	OPTION_ROW_BOOL(struct args, live, "live", "ask whether it lives, not whether it takes work"),
	OPTION_ROW_BOOL(struct args, tls, "tls", "ask by HTTPS (default: as `kvasir serve` would speak)"),
	{OPTION_SECONDS, "timeout", offsetof(struct args, timeout), NULL, 0, 2000, 1, 3600000,
         "time to wait for an answer"},
};

static const struct cli_usage usage = {
	"kvasir health [--live] [--tls] [--host ADDRESS] [--port N] [--timeout T]",
	"Ends with status 0 when the daemon is ready (with --live: when it answers), else with 1; prints what it said.",
	{rows, sizeof rows / sizeof *rows},
};

enum { MAX_ANSWER = 64 << 10 };

/* Connects to the first address of the host that answers; -1 and the error when none does. */
static int dial(const char *host, int64_t port, const struct timeval *timeout, struct error *err)
{
	struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *list = NULL;
	char service[8];
	int fd = -1, rc, why = 0;
	snprintf(service, sizeof service, "%d", (int)port);
	rc = getaddrinfo(host, service, &hints, &list);
	if (rc != 0) {
		error_set(err, STATUS_IO, "the host %.200s is not known: %s", host, gai_strerror(rc));
		return -1;
	}
	for (const struct addrinfo *a = list; a && fd < 0; a = a->ai_next) {
		fd = socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol);
		if (fd < 0) {
			why = errno;
			continue;
		}
		/* The send timeout is that of connect(2) too. */
		setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, timeout, sizeof *timeout);
		setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, timeout, sizeof *timeout);
		if (connect(fd, a->ai_addr, a->ai_addrlen) != 0) {
			why = errno == EINPROGRESS ? ETIMEDOUT : errno;
			close(fd);
			fd = -1;
		}
	}
	freeaddrinfo(list);
	if (fd < 0)
		error_set(err, STATUS_IO, "nothing answers at %.200s port %s: %s", host, service, strerror(why));
	return fd;
}

/* Sends the request and reads until the daemon closes. */
static enum status ask(int fd, struct tls *tls, const char *path, struct buf *answer, struct error *err)
{
	char chunk[TLS_RECORD_BYTES];
	ssize_t n;
	int len =
		snprintf(chunk, sizeof chunk, "GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", path);
	n = tls ? tls_send(tls, chunk, (size_t)len) : send(fd, chunk, (size_t)len, MSG_NOSIGNAL);
	if (n != len)
		return error_set(err, STATUS_IO, "the daemon does not take a request: %s",
		                 tls && *tls_failure(tls) ? tls_failure(tls) : strerror(errno));
	while ((n = tls ? tls_recv(tls, chunk, sizeof chunk) : recv(fd, chunk, sizeof chunk, 0)) > 0 &&
	       answer->len < MAX_ANSWER)
		buf_append(answer, chunk, (size_t)n);
	if (n < 0)
		return error_set(err, STATUS_IO, "the daemon does not answer: %s",
		                 errno == EAGAIN ? "the time is over" : strerror(errno));
	return answer->failed ? error_set(err, STATUS_NOMEM, "out of memory") : STATUS_OK;
}

/* Prints the body; OK when the status is 200. */
static enum status judge(struct buf *answer, struct error *err)
{
	int status = 0;
	buf_putc(answer, '\0');
	if (answer->failed)
		return error_set(err, STATUS_NOMEM, "out of memory");
	if (sscanf(answer->data, "HTTP/1.%*d %d", &status) != 1)
		return error_set(err, STATUS_IO, "what answers does not speak HTTP");
	const char *body = strstr(answer->data, "\r\n\r\n");
	if (body) {
		cli_write(body + 4, strlen(body + 4));
		cli_write("\n", 1);
	}
	return status == 200 ? STATUS_OK : error_set(err, STATUS_BUSY, "the daemon answers with status %d", status);
}

/* A daemon that listens everywhere is asked at home. */
static const char *reachable(const char *host)
{
	if (strcmp(host, "0.0.0.0") == 0 || host[0] == '\0')
		return "127.0.0.1";
	return strcmp(host, "::") == 0 ? "::1" : host;
}

int cli_health(int argc, char **argv)
{
	struct args args;
	struct config config = {0};
	struct buf answer = BUF_INIT;
	struct error err;
	struct timeval timeout;
	char *nothing[] = {argv[0], NULL};
	struct tls *tls = NULL;
	int status, fd = -1;
	if (cli_read_args(&usage, &args, argc, argv, NULL, &status) == CLI_STOP)
		goto out;
	status = CLI_FAILED;
	signal(SIGPIPE, SIG_IGN); /* OpenSSL writes to the socket as to any file */
	if (config_init(&config) != STATUS_OK) {
		cli_misuse("out of memory");
		goto out;
	}
	if (config_load(&config, 1, nothing, environ, &err) != STATUS_OK) {
		cli_fail(&err);
		goto out;
	}
	timeout = (struct timeval){args.timeout / 1000, args.timeout % 1000 * 1000};
	fd = dial(reachable(args.host     ? args.host
	                    : config.host ? config.host
	                                  : ""),
	          args.port ? args.port : config.port, &timeout, &err);
	if (fd >= 0 && (args.tls || config.tls_cert)) {
		tls = tls_connect(fd);
		if (!tls) {
			cli_misuse("out of memory");
			goto out;
		}
	}
	if (fd < 0 || ask(fd, tls, args.live ? "/health/live" : "/health/ready", &answer, &err) != STATUS_OK ||
	    judge(&answer, &err) != STATUS_OK)
		cli_fail(&err);
	else
		status = CLI_OK;
out:
	tls_free(tls);
	if (fd >= 0)
		close(fd);
	buf_free(&answer);
	config_free(&config);
	option_free(usage.options, &args);
	return status;
}
