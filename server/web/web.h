/* The chat page, embedded by the build (server/web/embed.py). */
#pragma once

#include <stddef.h>

extern const unsigned char web_index_html[]; /* [web_index_html_len], and a NUL after it */
extern const size_t web_index_html_len;
extern const char web_index_csp[]; /* its Content-Security-Policy */
