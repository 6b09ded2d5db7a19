/*
 * TLS on the client's side of a connection, by OpenSSL. The calls look like those of a non-blocking socket, so that
 * conn.c need not know which of the two it has.
 *
 * A read takes a whole record (see tls_recv), so nothing that has been decrypted ever waits inside: what is still to be
 * read is with the kernel, and polling the descriptor tells the truth.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#include "engine/base/status.h"

struct tls_context;
struct tls;

/* Room that a read must offer: the largest plaintext of a record (RFC 8446, section 5.1). */
enum { TLS_RECORD_BYTES = 16384 };

/*
 * Reads a certificate (PEM: the server's own first, then those that lead to its root) and its private key (PEM, without
 * a passphrase). TLS 1.2 and 1.3; of the application protocols that a client offers, http/1.1 is chosen. INVALID names
 * the file and what is wrong with it, or that the key is another certificate's.
 */
enum status tls_context_create(const char *certificate, const char *key, struct tls_context **out, struct error *err);
/* Connections made from it go on. NULL is allowed. */
void tls_context_destroy(struct tls_context *x);

/*
 * The server's side of a connection over an accepted, non-blocking socket, which stays the caller's. NULL: no memory.
 */
struct tls *tls_accept(const struct tls_context *x, int fd);
/* The client's side over a connected, blocking socket; whom it speaks to is not checked. NULL: no memory. */
struct tls *tls_connect(int fd);
/* Sends nothing. NULL is allowed. */
void tls_free(struct tls *t);

/*
 * As recv(2) and send(2) with a non-blocking socket: bytes, 0 at the end of the stream (with or without a closing
 * alert: the framing of HTTP and WebSocket tells a whole message from a cut one), or -1 and errno, EPROTO for what is
 * not TLS. Both do the handshake first, as far as it goes. tls_recv() wants n >= TLS_RECORD_BYTES. After a send that
 * was cut short or said EAGAIN, the next must begin with the same bytes, and have them all.
 */
ssize_t tls_recv(struct tls *t, void *p, size_t n);
ssize_t tls_send(struct tls *t, const void *p, size_t n);
/* The last tls_recv() waits for the socket to be writable. */
bool tls_recv_blocks_on_write(const struct tls *t);
/* The handshake is done: an answer can be sent. */
bool tls_is_up(const struct tls *t);
/* What failed to be a handshake was an HTTP request without TLS. */
bool tls_met_http(const struct tls *t);
/* Says that nothing more will be sent, as far as the socket takes it. */
void tls_shutdown(struct tls *t);
/* Why the connection failed, for the log: static text or "". */
const char *tls_failure(const struct tls *t);
