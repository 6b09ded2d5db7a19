#include "server/tls.h"

#include <errno.h>
#include <limits.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <stdlib.h>
#include <string.h>

struct tls_context {
	SSL_CTX *ctx;
};

struct tls {
	SSL *ssl;
	bool recv_blocks_on_write, met_http;
	const char *failure;
};

/* ---- Context ---- */

/* Why OpenSSL's last call failed; the queue is empty afterwards. */
static const char *reason(void)
{
	unsigned long first = ERR_get_error();
	const char *text = first ? ERR_reason_error_string(first) : NULL;
	if (first && ERR_SYSTEM_ERROR(first))
		text = strerror(ERR_GET_REASON(first));
	ERR_clear_error();
	return text ? text : "the reason is not known";
}

/* There is nobody to ask for a passphrase. */
static int no_passphrase(char *buf, int size, int writing, void *arg)
{
	(void)buf, (void)size, (void)writing, (void)arg;
	return 0;
}

static int choose_protocol(SSL *ssl, const unsigned char **out, unsigned char *out_n, const unsigned char *in,
                           unsigned n, void *arg)
{
	static const unsigned char ours[] = "\x08http/1.1";
	(void)ssl, (void)arg;
	return SSL_select_next_proto((unsigned char **)out, out_n, ours, sizeof ours - 1, in, n) ==
	                       OPENSSL_NPN_NEGOTIATED
	               ? SSL_TLSEXT_ERR_OK
	               : SSL_TLSEXT_ERR_ALERT_FATAL;
}

enum status tls_context_create(const char *certificate, const char *key, struct tls_context **out, struct error *err)
{
	struct tls_context *x = calloc(1, sizeof *x);
	enum status st;
	if (!x)
		return error_set(err, STATUS_NOMEM, "no memory for TLS");
	x->ctx = SSL_CTX_new(TLS_server_method());
	if (!x->ctx) {
		st = error_set(err, STATUS_NOMEM, "TLS cannot be set up: %s", reason());
		goto fail;
	}
	SSL_CTX_set_min_proto_version(x->ctx, TLS1_2_VERSION);
	SSL_CTX_set_options(x->ctx, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION | SSL_OP_CIPHER_SERVER_PREFERENCE |
	                                    SSL_OP_IGNORE_UNEXPECTED_EOF);
	SSL_CTX_set_mode(x->ctx, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER |
	                                 SSL_MODE_RELEASE_BUFFERS);
	SSL_CTX_set_alpn_select_cb(x->ctx, choose_protocol, NULL);
	SSL_CTX_set_default_passwd_cb(x->ctx, no_passphrase);
	if (SSL_CTX_use_certificate_chain_file(x->ctx, certificate) != 1) {
		st = error_set_param(err, STATUS_INVALID, "tls-cert", "no certificate can be read from %.200s: %s",
		                     certificate, reason());
		goto fail;
	}
	if (SSL_CTX_use_PrivateKey_file(x->ctx, key, SSL_FILETYPE_PEM) != 1) {
		st = error_set_param(err, STATUS_INVALID, "tls-key", "no private key can be read from %.200s: %s", key,
		                     reason());
		goto fail;
	}
	if (SSL_CTX_check_private_key(x->ctx) != 1) {
		reason();
		st = error_set_param(err, STATUS_INVALID, "tls-key",
		                     "the private key in %.200s is not that of the certificate in %.200s", key,
		                     certificate);
		goto fail;
	}
	*out = x;
	return STATUS_OK;

fail:
	tls_context_destroy(x);
	return st;
}

void tls_context_destroy(struct tls_context *x)
{
	if (!x)
		return;
	SSL_CTX_free(x->ctx);
	free(x);
}

/* ---- Connections ---- */

static struct tls *over_socket(SSL_CTX *ctx, int fd)
{
	struct tls *t = calloc(1, sizeof *t);
	if (!t)
		return NULL;
	t->failure = "";
	t->ssl = SSL_new(ctx);
	if (!t->ssl || SSL_set_fd(t->ssl, fd) != 1) {
		tls_free(t);
		ERR_clear_error();
		return NULL;
	}
	return t;
}

struct tls *tls_accept(const struct tls_context *x, int fd)
{
	struct tls *t = over_socket(x->ctx, fd);
	if (t)
		SSL_set_accept_state(t->ssl);
	return t;
}

struct tls *tls_connect(int fd)
{
	SSL_CTX *ctx = SSL_CTX_new(TLS_client_method());
	struct tls *t;
	if (!ctx)
		return NULL;
	SSL_CTX_set_options(ctx, SSL_OP_IGNORE_UNEXPECTED_EOF);
	t = over_socket(ctx, fd);
	SSL_CTX_free(ctx); /* t has a reference */
	if (t)
		SSL_set_connect_state(t->ssl);
	return t;
}

void tls_free(struct tls *t)
{
	if (!t)
		return;
	SSL_free(t->ssl);
	free(t);
}

/* What the result of a read or write means; n is what it gave. */
static ssize_t outcome(struct tls *t, int n, bool reading)
{
	int system = errno;
	if (n > 0)
		return n;
	switch (SSL_get_error(t->ssl, n)) {
	case SSL_ERROR_WANT_WRITE:
		t->recv_blocks_on_write = reading;
		/* fall through */
	case SSL_ERROR_WANT_READ:
		errno = EAGAIN;
		return -1;
	case SSL_ERROR_ZERO_RETURN:
		return 0;
	case SSL_ERROR_SYSCALL:
		errno = system ? system : ECONNRESET;
		return -1;
	default:
		t->met_http = ERR_GET_REASON(ERR_peek_error()) == SSL_R_HTTP_REQUEST;
		t->failure = reason();
		errno = EPROTO;
		return -1;
	}
}

ssize_t tls_recv(struct tls *t, void *p, size_t n)
{
	t->recv_blocks_on_write = false;
	ERR_clear_error();
	errno = 0;
	return outcome(t, SSL_read(t->ssl, p, (int)(n < INT_MAX ? n : INT_MAX)), true);
}

ssize_t tls_send(struct tls *t, const void *p, size_t n)
{
	ERR_clear_error();
	errno = 0;
	return outcome(t, SSL_write(t->ssl, p, (int)(n < INT_MAX ? n : INT_MAX)), false);
}

bool tls_recv_blocks_on_write(const struct tls *t)
{
	return t->recv_blocks_on_write;
}

bool tls_met_http(const struct tls *t)
{
	return t->met_http;
}

bool tls_is_up(const struct tls *t)
{
	return SSL_is_init_finished(t->ssl);
}

void tls_shutdown(struct tls *t)
{
	ERR_clear_error();
	if (tls_is_up(t))
		SSL_shutdown(t->ssl);
	ERR_clear_error();
}

const char *tls_failure(const struct tls *t)
{
	return t->failure;
}
