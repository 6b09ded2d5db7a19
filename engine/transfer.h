/*
 * Sessions that move between daemons: an export is a stream of bytes, which another daemon of the same model imports.
 *
 * The stream is a header, a record for each page that the session has in the index or, behind those, in a tier, and a
 * last record without a page. All fields are in the byte order of the machine, which the header tells. The header binds
 * the stream to what pages depend on (model, layout, KV type, backend, version) and to the name of the tenant. The
 * header and each record end in a tag (HMAC-SHA-256 under the key that the daemons share) of the tag before it and all
 * that follows up to it: so nothing can be changed, left out, put in or moved, and a page is taken only when it is
 * known to come from a daemon that has the key. That is more than a checksum because the pages join the prefix index,
 * where others who begin alike may find them.
 *
 * Neither direction holds a page between two calls. A page that is evicted while its session is exported is read from
 * the tier it went to, or else ends the export; one that is evicted while it is imported is computed again later, as
 * ever. The server asks for one part at a time, so nothing grows.
 *
 * The worker owns the table.
 */
#pragma once

#include "engine/base/list.h"
#include "engine/engine_internal.h"
#include "engine/session.h"

enum { TRANSFERS_MAX = 16 }; /* under way at once */

struct transfers {
	struct list all;
	int32_t n;
};

void transfers_init(struct transfers *t);
/* Ends all of them. */
void transfers_free(struct transfers *t, const struct engine *e);

/* UNSUPPORTED: this daemon has no key. LIMIT: too many are under way. NOMEM. */
enum status export_begin(struct transfers *t, struct engine *e, uint64_t id, const struct session_table *sessions,
                         const struct session *s, struct error *err);
/*
 * Appends the next part of about a megabyte; *more: there are others. When there are none, or on an error, the export
 * has ended. *later: nothing was appended, since the next page is on its way from a tier; to be called again when tiers
 * have moved on.
 */
enum status export_next(struct transfers *t, struct engine *e, uint64_t id, struct buf *out, bool *more, bool *later,
                        struct error *err);

/* The session will have the id and tenant of *p. As export_begin(). */
enum status import_begin(struct transfers *t, struct engine *e, uint64_t id, const struct engine_session_params *p,
                         struct error *err);
/*
 * The next bytes of a stream, which may be cut anywhere; n == 0: its end. *out is the session once all is there, else
 * NULL. INVALID (another model or version, another tenant, damaged), EXISTS, LIMIT, NOMEM, NOT_FOUND (its TTL has
 * passed); then the import has ended, and the caller ends the session in *out, which may be NULL.
 */
enum status import_data(struct transfers *t, struct engine *e, struct session_table *sessions, uint64_t id,
                        const char *data, size_t n, struct session **out, struct error *err);
/* Forgets a transfer, if there is one of that id. The session that it was making, which the caller ends, or NULL. */
struct session *transfer_cancel(struct transfers *t, const struct engine *e, struct session_table *sessions,
                                uint64_t id);
