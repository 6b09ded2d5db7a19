/* Tells a service manager how the daemon is doing (the protocol of sd_notify(3)); does nothing when nobody asked. */
#pragma once

#include <stdint.h>

/* `state` is one assignment, such as "READY=1" or "STOPPING=1". Failures are ignored: nobody could act on them. */
void notify_service_manager(const char *state);
/* What `systemctl status` shows: one line, made of what is given by blanking what is not printable. */
void notify_status(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* How often the service manager wants to hear WATCHDOG=1 from this process, in milliseconds; 0: never. */
uint64_t notify_watchdog_ms(void);
