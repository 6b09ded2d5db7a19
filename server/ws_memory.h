/*
 * The memory of libwebsockets, whose ways (version 4.1.6) need three things of it.
 *
 * It loses what it has made of a connection, the descriptor among it, when a later step of opening it gets no memory:
 * it then waits for the close callback of a libuv handle that was never made (elops_wsi_logical_close_uv() in its
 * libuv.c). So what opening one takes is set aside before, and taken when there is no other.
 *
 * What it asks for later is little, and it ends the connection without it; so it is told only when there has been none
 * for a while.
 *
 * While its context is destroyed it frees it in the close callback of one of the handles in it, and libuv is not done
 * with the others. So what is freed then is freed when all handles are closed.
 *
 * All of it runs on the loop thread.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

/* For lws_set_allocator(). */
void *ws_memory(void *old, size_t n, const char *reason);
/*
 * Sets aside what opening a connection takes; false when there is no memory for it, and no connection should be opened.
 */
bool ws_memory_reserve(void);
/* From here on nothing is freed until ws_memory_end(), which also gives back what is set aside. */
void ws_memory_hold(void);
void ws_memory_end(void);
