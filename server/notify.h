/* Tells a service manager how the daemon is doing (the protocol of sd_notify(3)); does nothing when nobody asked. */
#pragma once

/* `state` is one assignment, such as "READY=1" or "STOPPING=1". Failures are ignored: nobody could act on them. */
void notify_service_manager(const char *state);
