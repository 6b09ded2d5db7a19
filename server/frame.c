#include "server/frame.h"

#include <string.h>

#include "engine/base/utf8.h"

enum { OP_CONTINUATION = 0, OP_TEXT = 1, OP_BINARY = 2 };
enum { FIN = 0x80, RESERVED = 0x70, MASKED = 0x80, MASK_BYTES = 4 };

void frame_check_init(struct frame_check *f, uint64_t max)
{
	memset(f, 0, sizeof *f);
	f->max = max;
}

static bool bad(struct frame_check *f, struct frame_error *err, int code, const char *reason)
{
	f->closed = true;
	*err = (struct frame_error){code, reason};
	return false;
}

static uint8_t opcode(const struct frame_check *f)
{
	return f->header[0] & 0x0F;
}

/* How long the header is, as far as the bytes that are there tell. */
static size_t header_size(const struct frame_check *f)
{
	if (f->n_header < 2)
		return 2;
	uint8_t length = f->header[1] & 0x7F;
	return 2 + (length == 126 ? 2 : length == 127 ? 8 : 0) + MASK_BYTES;
}

/* What can be told from the first two bytes. */
static bool check_start(struct frame_check *f, struct frame_error *err)
{
	uint8_t op = opcode(f), length = f->header[1] & 0x7F;
	bool fin = f->header[0] & FIN;

	if (f->header[0] & RESERVED)
		return bad(f, err, WS_PROTOCOL_ERROR, "A reserved bit is set.");
	if (!(f->header[1] & MASKED))
		return bad(f, err, WS_PROTOCOL_ERROR, "A frame is not masked.");
	switch (op) {
	case FRAME_CLOSE:
	case FRAME_PING:
	case FRAME_PONG:
		if (!fin)
			return bad(f, err, WS_PROTOCOL_ERROR, "A control frame is fragmented.");
		if (length > FRAME_MAX_CONTROL)
			return bad(f, err, WS_PROTOCOL_ERROR, "A control frame is too long.");
		return true;
	case OP_CONTINUATION:
		if (!f->in_message)
			return bad(f, err, WS_PROTOCOL_ERROR, "A continuation frame continues nothing.");
		return true;
	case OP_BINARY:
		return bad(f, err, WS_UNSUPPORTED_DATA, "Only text messages are accepted.");
	case OP_TEXT:
		if (f->in_message)
			return bad(f, err, WS_PROTOCOL_ERROR, "A message begins inside another.");
		return true;
	default:
		return bad(f, err, WS_PROTOCOL_ERROR, "An opcode is reserved.");
	}
}

/* The whole header is there. */
static bool check_header(struct frame_check *f, struct frame_error *err)
{
	uint8_t length = f->header[1] & 0x7F;
	size_t n_extended = length == 126 ? 2 : length == 127 ? 8 : 0;
	uint64_t size = n_extended ? 0 : length;
	for (size_t i = 0; i < n_extended; i++)
		size = size << 8 | f->header[2 + i];
	if ((length == 126 && size < 126) || (length == 127 && (size <= UINT16_MAX || size > INT64_MAX)))
		return bad(f, err, WS_PROTOCOL_ERROR, "A frame length is malformed.");

	f->left = size;
	f->in_payload = true;
	f->n_control = 0;
	if (opcode(f) & 8)
		return true;
	if (opcode(f) == OP_TEXT)
		f->message = 0;
	if (size > f->max - f->message)
		return bad(f, err, WS_TOO_BIG, "The message is larger than this server accepts.");
	f->message += size;
	f->in_message = !(f->header[0] & FIN);
	return true;
}

/* Codes that may be sent on the wire (RFC 6455, 7.4 and the IANA registry up to 1014). */
static bool close_code_valid(int code)
{
	return (code >= 1000 && code <= 1014 && code != 1004 && code != 1005 && code != 1006) ||
	       (code >= 3000 && code <= 4999);
}

static bool end_frame(struct frame_check *f, struct frame_error *err)
{
	f->in_payload = false;
	f->n_header = 0;
	f->quiet = false;
	f->frames++;
	f->pinged = opcode(f) == FRAME_PING;
	if (opcode(f) != FRAME_CLOSE)
		return true;
	f->closed = true;
	if (f->n_control == 1)
		return bad(f, err, WS_PROTOCOL_ERROR, "A close frame has half a code.");
	if (f->n_control >= 2 && !close_code_valid(f->control[0] << 8 | f->control[1]))
		return bad(f, err, WS_PROTOCOL_ERROR, "A close code is not valid.");
	if (f->n_control > 2 && !utf8_valid((const char *)f->control + 2, (size_t)f->n_control - 2))
		return bad(f, err, WS_INVALID_PAYLOAD, "A close reason is not UTF-8.");
	return true;
}

static size_t take_payload(struct frame_check *f, const uint8_t *p, size_t n)
{
	size_t take = f->left < n ? (size_t)f->left : n;
	if (opcode(f) == FRAME_CLOSE || opcode(f) == FRAME_PING) {
		const uint8_t *mask = f->header + 2;
		for (size_t i = 0; i < take; i++, f->n_control++)
			f->control[f->n_control] = p[i] ^ mask[f->n_control & 3];
	}
	f->left -= take;
	return take;
}

/* The first byte of the frame that begins, or has begun and is in its header. */
static uint8_t first_byte(const struct frame_check *f, uint8_t next)
{
	return f->n_header ? f->header[0] : next;
}

bool frame_check_beats(const struct frame_check *f, uint8_t next)
{
	uint8_t first = first_byte(f, next);
	return !f->closed && (!f->in_payload || f->quiet) &&
	       (first == (FIN | FRAME_PING) || first == (FIN | FRAME_PONG));
}

bool frame_check_feed(struct frame_check *f, const uint8_t *p, size_t n, size_t *n_held, size_t *used,
		      struct frame_error *err)
{
	size_t i = 0, old = f->in_payload ? 0 : f->n_header;
	*n_held = *used = 0;
	memcpy(f->held, f->header, old);
	while (i < n && !f->closed) {
		if (!f->in_payload) {
			if (frame_check_beats(f, p[i]))
				break;
			f->header[f->n_header++] = p[i++];
			if (f->n_header == 2 && !check_start(f, err))
				return false;
			if (f->n_header < 2 || f->n_header < header_size(f))
				continue;
			if (!check_header(f, err))
				return false;
			*n_held = old;
		} else {
			i += take_payload(f, p + i, n - i);
		}
		*used = i;
		if (f->left == 0 && !end_frame(f, err))
			return false;
	}
	return true;
}

bool frame_check_quiet(struct frame_check *f, bool close_too, const uint8_t *p, size_t n, size_t *used,
		       struct frame_error *err)
{
	size_t i = 0;
	*used = 0;
	while (i < n && !f->closed && !f->pinged && (!f->in_payload || f->quiet)) {
		if (f->in_payload) {
			i += take_payload(f, p + i, n - i);
		} else {
			if (!frame_check_beats(f, p[i]) && (!close_too || first_byte(f, p[i]) != (FIN | FRAME_CLOSE)))
				break;
			f->header[f->n_header++] = p[i++];
			if (f->n_header == 2 && !check_start(f, err))
				return false;
			*used = i;
			if (f->n_header < 2 || f->n_header < header_size(f))
				continue;
			if (!check_header(f, err))
				return false;
			f->quiet = true;
		}
		*used = i;
		if (f->left == 0 && !end_frame(f, err))
			return false;
	}
	return true;
}

bool frame_check_at_rest(const struct frame_check *f)
{
	return !f->n_header && !f->in_payload && !f->in_message && !f->closed;
}

size_t frame_put_control(uint8_t out[2 + FRAME_MAX_CONTROL], int op, const void *payload, size_t n)
{
	out[0] = (uint8_t)(FIN | op);
	out[1] = (uint8_t)n;
	if (n)
		memcpy(out + 2, payload, n);
	return 2 + n;
}

size_t frame_put_close(uint8_t out[2 + FRAME_MAX_CONTROL], int code, const char *reason)
{
	uint8_t payload[FRAME_MAX_CONTROL] = {(uint8_t)(code >> 8), (uint8_t)code};
	size_t n = reason ? strlen(reason) : 0, most = sizeof payload - 2;
	if (n > most) {
		/* Cut inside a code point? A close reason must be valid UTF-8. */
		for (n = most; n && ((unsigned char)reason[n] & 0xC0) == 0x80;)
			n--;
	}
	if (n)
		memcpy(payload + 2, reason, n);
	return frame_put_control(out, FRAME_CLOSE, payload, 2 + n);
}
