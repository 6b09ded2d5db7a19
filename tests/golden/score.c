/*
 * score: runs token sequences through a model and prints what it thinks of them. The bench on which the numeric tests
 * stand: it needs nothing of the engine but the model room and a backend.
 *
 *   score --model FILE [--device NAME] [--threads N] [--chunk ROWS] [--together] [--sparse N] [--top K] [--logits FILE]
 *         [--kv-type int8|fp8_e4m3] [--kv-dtype int8|fp8_e4m3] [--rope-scaling TYPE:FACTOR]
 *
 * Standard input: one sequence per line, token ids separated by blanks. Standard output: a line `vocab N backend NAME`,
 * then for each sequence, position by position,
 *
 *   SEQUENCE POSITION LOGPROB ARGMAX [ID:LOGPROB ...]
 *
 * where LOGPROB is that of the sequence's next token (nan at its end) and the K most likely tokens follow. --logits
 * also writes the raw logits as float32, [rows][vocab] in the order of the lines. A sequence is computed in chunks of
 * --chunk rows; with --together all sequences share each step, else they run one after the other. --sparse N asks for
 * the logits of every Nth row of a chunk only. KV pages are handed out in a scattered order, so that block tables are
 * not the identity. --kv-type narrows each page once it is full, but for a sequence's first: as if it had gone through
 * a tier of that type (engine/kv/tier_codec.h) before anybody attends to it again. --kv-dtype has the pool keep pages
 * that way, with the first page of a sequence, and the last one of each chunk while that is computed, in f16 as well.
 * --rope-scaling is the daemon's.
 */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/kv/pool.h"
#include "engine/kv/tier_codec.h"
#include "engine/model/forward.h"
#include "engine/sample/sampler.h"

struct sequence {
	int32_t *ids; /* [n] */
	int32_t n, done;
	int32_t *table; /* [n_pages] */
	int32_t n_pages;
	size_t first_line; /* of its position 0 among all positions */
};

/* What is known of one position. */
struct scored {
	bool wanted;
	int32_t argmax;
	float logprob;
	int32_t n_top;
	struct token_logprob top[SAMPLING_MAX_TOP_LOGPROBS];
};

struct options {
	const char *model, *device, *logits, *kv_type, *kv_dtype, *rope_scaling;
	int32_t threads, chunk, sparse, top;
	bool together;
};

struct score {
	struct options opt;
	struct sequence *seqs;
	int32_t n_seqs;
	size_t n_positions;
	struct scored *scored; /* [n_positions] */
	FILE *logits;
};

static int fail(const char *what)
{
	fprintf(stderr, "score: %s\n", what);
	return 1;
}

static bool parse_options(int argc, char **argv, struct options *o)
{
	*o = (struct options){.device = "cpu-reference", .chunk = 64, .sparse = 1};
	for (int i = 1; i < argc; i++) {
		const struct {
			const char *name;
			const char **text;
			int32_t *number;
		} rows[] = {
			{"--model", &o->model, NULL},
			{"--device", &o->device, NULL},
			{"--logits", &o->logits, NULL},
			{"--threads", NULL, &o->threads},
			{"--kv-type", &o->kv_type, NULL},
			{"--kv-dtype", &o->kv_dtype, NULL},
			{"--rope-scaling", &o->rope_scaling, NULL},
			{"--chunk", NULL, &o->chunk},
			{"--sparse", NULL, &o->sparse},
			{"--top", NULL, &o->top},
		};
		bool found = strcmp(argv[i], "--together") == 0;
		o->together = o->together || found;
		for (size_t j = 0; j < sizeof rows / sizeof rows[0] && !found; j++) {
			if (strcmp(argv[i], rows[j].name) != 0 || i + 1 >= argc)
				continue;
			found = true;
			i++;
			if (rows[j].text)
				*rows[j].text = argv[i];
			else
				*rows[j].number = (int32_t)strtol(argv[i], NULL, 10);
		}
		if (!found)
			return false;
	}
	return o->model && o->chunk > 0 && o->chunk <= 1 << 16 && o->sparse > 0 && o->top >= 0 &&
	       o->top <= SAMPLING_MAX_TOP_LOGPROBS;
}

/* Reads all sequences from standard input; false on bad text or no memory. */
static bool read_sequences(struct score *s)
{
	char *line = NULL;
	size_t cap = 0;
	bool ok = true;
	while (ok && getline(&line, &cap, stdin) > 0) {
		struct sequence *seqs = realloc(s->seqs, ((size_t)s->n_seqs + 1) * sizeof *seqs);
		if (!seqs) {
			ok = false;
			break;
		}
		s->seqs = seqs;
		struct sequence *q = &seqs[s->n_seqs++];
		*q = (struct sequence){.first_line = s->n_positions};
		/* A token takes at least two characters, so this is room enough. */
		q->ids = malloc((strlen(line) / 2 + 1) * sizeof *q->ids);
		ok = q->ids != NULL;
		for (char *at = line; ok && at[strspn(at, " \t\r\n")];) {
			char *end;
			errno = 0;
			long id = strtol(at, &end, 10);
			ok = end != at && errno == 0 && id >= 0 && id <= INT32_MAX;
			if (ok)
				q->ids[q->n++] = (int32_t)id;
			at = end;
		}
		ok = ok && q->n > 0;
		s->n_positions += (size_t)q->n;
	}
	free(line);
	return ok && s->n_seqs > 0;
}

/* Gives every sequence its pages, taken from both ends of the slab in turn. Returns their number, or -1. */
static int32_t assign_pages(struct score *s)
{
	int32_t n_pages = 0, k = 0;
	for (int32_t i = 0; i < s->n_seqs; i++) {
		s->seqs[i].n_pages = (s->seqs[i].n + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
		n_pages += s->seqs[i].n_pages;
	}
	for (int32_t i = 0; i < s->n_seqs; i++) {
		struct sequence *q = &s->seqs[i];
		q->table = malloc((size_t)q->n_pages * sizeof *q->table);
		if (!q->table)
			return -1;
		for (int32_t j = 0; j < q->n_pages; j++, k++)
			q->table[j] = k % 2 ? n_pages - 1 - k / 2 : k / 2;
	}
	return n_pages;
}

/* Arrays of one step, for up to max_rows rows. */
struct step {
	struct batch batch;
	int32_t *token, *position, *output_row;
	struct batch_seq *seq;
	size_t *line;  /* [n_outputs] which position of all the output is of */
	int32_t *next; /* [n_outputs] the token that follows, or -1 */
};

static bool step_alloc(struct step *t, int32_t max_rows, int32_t n_seqs)
{
	size_t rows = (size_t)max_rows;
	t->token = malloc(rows * sizeof *t->token);
	t->position = malloc(rows * sizeof *t->position);
	t->output_row = malloc(rows * sizeof *t->output_row);
	t->line = malloc(rows * sizeof *t->line);
	t->next = malloc(rows * sizeof *t->next);
	t->seq = malloc((size_t)n_seqs * sizeof *t->seq);
	t->batch =
		(struct batch){.token = t->token, .position = t->position, .output_row = t->output_row, .seq = t->seq};
	return t->token && t->position && t->output_row && t->line && t->next && t->seq;
}

static void step_free(struct step *t)
{
	free(t->token);
	free(t->position);
	free(t->output_row);
	free(t->line);
	free(t->next);
	free(t->seq);
}

/* Adds the sequence's next chunk to the step. */
static void step_add(struct step *t, const struct options *o, struct sequence *q)
{
	struct batch *b = &t->batch;
	int32_t n = q->n - q->done < o->chunk ? q->n - q->done : o->chunk;
	t->seq[b->n_seqs++] = (struct batch_seq){
		.first_row = b->n_rows,
		.n_rows = n,
		.first_position = q->done,
		.block_table = q->table,
		.n_pages = q->n_pages,
	};
	for (int32_t i = 0; i < n; i++, q->done++) {
		if ((i + 1) % o->sparse == 0) {
			t->output_row[b->n_outputs] = b->n_rows;
			t->line[b->n_outputs] = q->first_line + (size_t)q->done;
			t->next[b->n_outputs] = q->done + 1 < q->n ? q->ids[q->done + 1] : -1;
			b->n_outputs++;
		}
		t->token[b->n_rows] = q->ids[q->done];
		t->position[b->n_rows] = q->done;
		b->n_rows++;
	}
}

/* Keeps what was asked for of the step's logits. */
static bool step_keep(struct score *s, const struct step *t, const float *logits, int32_t n_vocab)
{
	for (int32_t i = 0; i < t->batch.n_outputs; i++) {
		const float *row = logits + (size_t)i * (size_t)n_vocab;
		struct scored *out = &s->scored[t->line[i]];
		struct sample_result r;
		sampler_logprobs(row, n_vocab, t->next[i], s->opt.top > 0 ? s->opt.top : 1, &r);
		out->wanted = true;
		out->logprob = t->next[i] < 0 ? NAN : r.logprob;
		out->argmax = r.n_top > 0 ? r.top[0].token : -1;
		out->n_top = s->opt.top;
		memcpy(out->top, r.top, sizeof out->top);
		long at = (long)(t->line[i] * (size_t)n_vocab * sizeof *row);
		if (s->logits && (fseek(s->logits, at, SEEK_SET) != 0 ||
		                  fwrite(row, sizeof *row, (size_t)n_vocab, s->logits) != (size_t)n_vocab))
			return false;
	}
	return true;
}

/* What narrows pages; NULL type: nothing. */
struct narrow {
	struct kv_layout layout;
	struct kv_order order;
	enum kv_form type;
	char *packed;
};

/* Narrows the pages of q that have become full since position `from`. */
static bool narrow_pages(const struct narrow *w, const struct sequence *q, int32_t from, char *kv)
{
	int32_t first = from / KV_PAGE_TOKENS > 0 ? from / KV_PAGE_TOKENS : 1;
	for (int32_t i = first; i < q->done / KV_PAGE_TOKENS; i++) {
		char *page = kv + (size_t)q->table[i] * w->layout.page_stride;
		if (!kv_codec_pack(&w->layout, w->order, w->type, page, w->packed))
			return false;
		kv_codec_unpack(&w->layout, w->order, w->type, w->packed, page);
	}
	return true;
}

/*
 * The first page of each sequence of the step, and the last of its chunk, have wide copies; afterwards only the first
 * has.
 */
static void keep_wide(struct kv_pool *pool, const struct batch *b, bool computed)
{
	for (int32_t i = 0; i < b->n_seqs; i++) {
		const struct batch_seq *q = &b->seq[i];
		int32_t last = (q->first_position + q->n_rows - 1) / KV_PAGE_TOKENS;
		if (!computed && q->first_position == 0)
			kv_pool_widen(pool, q->block_table[0]);
		if (!computed && q->first_position <= last * KV_PAGE_TOKENS)
			kv_pool_widen(pool, q->block_table[last]);
		if (computed && last > 0 && (q->first_position + q->n_rows) % KV_PAGE_TOKENS == 0)
			kv_pool_narrow(pool, q->block_table[last]);
	}
}

static int run(struct score *s, struct model *m, struct kv_pool *pool, int32_t max_rows, const struct narrow *narrow)
{
	void *kv = kv_pool_slab(pool);
	struct step t = {0};
	int rc = 0;
	if (!step_alloc(&t, max_rows, s->n_seqs)) {
		rc = fail("out of memory");
		goto out;
	}
	for (;;) {
		float *logits;
		t.batch.n_rows = t.batch.n_seqs = t.batch.n_outputs = 0;
		for (int32_t i = 0; i < s->n_seqs && (s->opt.together || t.batch.n_seqs == 0); i++) {
			if (s->seqs[i].done < s->seqs[i].n)
				step_add(&t, &s->opt, &s->seqs[i]);
		}
		if (t.batch.n_seqs == 0)
			break;
		keep_wide(pool, &t.batch, false);
		enum status st = model_forward(m, &t.batch, kv, &logits);
		if (st != STATUS_OK) {
			rc = fail(status_text(st));
			goto out;
		}
		if (!step_keep(s, &t, logits, model_params(m)->n_vocab)) {
			rc = fail("cannot write the logits");
			goto out;
		}
		keep_wide(pool, &t.batch, true);
		for (int32_t i = 0; narrow && i < t.batch.n_seqs; i++) {
			const struct batch_seq *seq = &t.batch.seq[i];
			for (int32_t j = 0; j < s->n_seqs; j++) {
				if (s->seqs[j].table == seq->block_table &&
				    !narrow_pages(narrow, &s->seqs[j], seq->first_position, kv))
					rc = fail("a page has no narrow form");
			}
		}
	}
out:
	step_free(&t);
	return rc;
}

static void print(const struct score *s, int32_t n_vocab, const char *backend)
{
	printf("vocab %" PRId32 " backend %s\n", n_vocab, backend);
	for (int32_t i = 0; i < s->n_seqs; i++) {
		for (int32_t j = 0; j < s->seqs[i].n; j++) {
			const struct scored *r = &s->scored[s->seqs[i].first_line + (size_t)j];
			if (!r->wanted)
				continue;
			printf("%" PRId32 " %" PRId32 " %.7g %" PRId32, i, j, (double)r->logprob, r->argmax);
			for (int32_t k = 0; k < r->n_top; k++)
				printf(" %" PRId32 ":%.7g", r->top[k].token, (double)r->top[k].logprob);
			putchar('\n');
		}
	}
}

/* Loads, reserves, runs, prints; everything it made is undone in reverse. */
static int score(struct score *s, const struct gguf *g, struct backend *b)
{
	struct error err = {0};
	struct model *m;
	struct kv_layout layout;
	struct kv_pool *pool = NULL;
	enum kv_form form = KV_FORM_F16;
	int rc = 1;
	int32_t n_pages, max_rows = s->opt.chunk * (s->opt.together ? s->n_seqs : 1);
	struct rope_choice rope;
	if (rope_choice_parse(s->opt.rope_scaling, &rope, &err) != STATUS_OK ||
	    model_load_stretched(g, b, &rope, &m, &err) != STATUS_OK)
		return fail(err.message);
	const struct model_params *p = model_params(m);
	if (kv_layout_for(b, &layout, p->n_layer, p->n_head_kv, p->head_dim) != STATUS_OK) {
		fail("no KV layout for this model");
		goto fail_layout;
	}
	if (s->opt.kv_dtype && !kv_form_find(s->opt.kv_dtype, &form)) {
		fail("--kv-dtype must be f16, int8 or fp8_e4m3");
		goto fail_layout;
	}
	if (form != KV_FORM_F16)
		kv_layout_narrow(&layout, form);
	n_pages = assign_pages(s);
	if (n_pages < 0 || kv_pool_create_narrow(b, &layout, n_pages, form == KV_FORM_F16 ? 0 : 2 * s->n_seqs, &pool,
	                                         &err) != STATUS_OK) {
		fail("no memory for the KV pages");
		goto fail_layout;
	}
	layout = *kv_pool_layout(pool);
	if (model_reserve(m, max_rows, max_rows, &layout, &err) != STATUS_OK) {
		fail(err.message);
		goto fail_layout;
	}
	struct narrow narrow = {.layout = layout};
	if (s->opt.kv_type) {
		struct backend_info info;
		b->ops->info(b, &info);
		narrow.order = info.kv_order;
		narrow.packed = malloc(layout.page_bytes * 2);
		if (!narrow.packed || !kv_form_find(s->opt.kv_type, &narrow.type)) {
			fail("--kv-type must be f16, int8 or fp8_e4m3");
			goto fail_run;
		}
	}
	rc = run(s, m, pool, max_rows, s->opt.kv_type ? &narrow : NULL);
	if (rc == 0) {
		struct backend_info info;
		b->ops->info(b, &info);
		print(s, p->n_vocab, info.name);
	}
fail_run:
	free(narrow.packed);
fail_layout:
	kv_pool_destroy(pool);
	model_destroy(m);
	return rc;
}

int main(int argc, char **argv)
{
	struct score s = {0};
	struct error err = {0};
	struct gguf *g = NULL;
	struct backend *b = NULL;
	int rc = 1;
	if (!parse_options(argc, argv, &s.opt)) {
		fprintf(stderr, "usage: score --model FILE [--device NAME] [--threads N] [--chunk ROWS] [--together] "
		                "[--sparse N] [--top K] [--logits FILE] < IDS\n");
		return 2;
	}
	if (!read_sequences(&s)) {
		fail("standard input must hold lines of token ids");
		goto out;
	}
	s.scored = calloc(s.n_positions, sizeof *s.scored);
	if (!s.scored) {
		fail("out of memory");
		goto out;
	}
	if (s.opt.logits && !(s.logits = fopen(s.opt.logits, "wb"))) {
		fail("cannot open the file for the logits");
		goto out;
	}
	if (gguf_open(s.opt.model, &g, &err) != STATUS_OK ||
	    backend_create(&(struct backend_options){s.opt.device, s.opt.threads}, &b, &err) != STATUS_OK) {
		fail(err.message);
		/* The status that tells a test to skip: the machine cannot run this device. */
		rc = err.status == STATUS_UNSUPPORTED && g ? 77 : 1;
	} else {
		rc = score(&s, g, b);
	}
	if (s.logits && fclose(s.logits) != 0)
		rc = fail("cannot write the logits");
	if (b)
		b->ops->destroy(b);
	gguf_close(g);
out:
	for (int32_t i = 0; i < s.n_seqs; i++) {
		free(s.seqs[i].ids);
		free(s.seqs[i].table);
	}
	free(s.seqs);
	free(s.scored);
	return rc;
}
