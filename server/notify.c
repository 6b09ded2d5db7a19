#include "server/notify.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

void notify_service_manager(const char *state)
{
	const char *path = getenv("NOTIFY_SOCKET");
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	size_t n_path = path ? strlen(path) : 0;
	if (n_path < 2 || n_path >= sizeof addr.sun_path)
		return;
	memcpy(addr.sun_path, path, n_path);
	if (path[0] == '@')
		addr.sun_path[0] = '\0'; /* an abstract socket */
	int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return;
	/* A manager that does not read must not hold the loop. */
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &(struct timeval){.tv_usec = 100000}, sizeof(struct timeval));
	ssize_t ignored = sendto(fd, state, strlen(state), MSG_NOSIGNAL, (struct sockaddr *)&addr,
	                         (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n_path));
	(void)ignored;
	close(fd);
}

void notify_status(const char *fmt, ...)
{
	char state[1024] = "STATUS=";
	size_t n = strlen(state);
	va_list args;
	va_start(args, fmt);
	vsnprintf(state + n, sizeof state - n, fmt, args);
	va_end(args);
	/* A newline would begin another assignment. */
	for (char *p = state; *p; p++)
		if ((unsigned char)*p < ' ')
			*p = ' ';
	notify_service_manager(state);
}

uint64_t notify_watchdog_ms(void)
{
	const char *pid = getenv("WATCHDOG_PID"), *period = getenv("WATCHDOG_USEC");
	char *end;
	if (!period || !getenv("NOTIFY_SOCKET") || (pid && strtoll(pid, NULL, 10) != (long long)getpid()))
		return 0;
	unsigned long long us = strtoull(period, &end, 10);
	return *end ? 0 : us / 1000;
}
