/* A vocabulary without a model: the offline tools' way to the tokenizer. */
#include <stdlib.h>

#include "engine/model/gguf.h"
#include "engine/splitting.h"
#include "engine/text/tokenizer.h"
#include "engine/tools.h"

struct engine_vocab {
	struct gguf *file;
	struct tokenizer *tokenizer;
};

enum status engine_vocab_open(const char *path, struct engine_vocab **out, struct error *err)
{
	struct engine_vocab *v = calloc(1, sizeof *v);
	if (!v)
		return error_set(err, STATUS_NOMEM, "no memory for a vocabulary");
	enum status status = gguf_open(path, &v->file, err);
	if (!status)
		status = tokenizer_create(v->file, &v->tokenizer, err);
	if (status) {
		engine_vocab_close(v);
		return status;
	}
	*out = v;
	return STATUS_OK;
}

void engine_vocab_close(struct engine_vocab *v)
{
	if (!v)
		return;
	tokenizer_destroy(v->tokenizer);
	gguf_close(v->file);
	free(v);
}

enum status engine_vocab_encode(const struct engine_vocab *v, const char *text, size_t n, bool add_special,
                                bool parse_special, int32_t **ids, size_t *n_ids, struct error *err)
{
	unsigned flags = (add_special ? TOKENIZE_ADD_BOS_EOS : 0u) | (parse_special ? TOKENIZE_SPECIAL : 0u);
	struct token_buf tokens = {0};
	enum status status = tokenizer_encode(v->tokenizer, text, n, NULL, 0, flags, &tokens, err);
	if (status) {
		token_buf_free(&tokens);
		return status;
	}
	*ids = tokens.ids;
	*n_ids = tokens.n;
	return STATUS_OK;
}

enum status engine_vocab_split(const struct engine_vocab *v, struct str text, const struct engine_split_params *params,
                               struct engine_chunk **chunks, size_t *n_chunks, struct error *err)
{
	struct splitting *s = splitting_create(params);
	bool done = false;
	enum status status = s ? STATUS_OK : error_set(err, STATUS_NOMEM, "no memory to cut a document");
	while (!status && !done)
		status = splitting_next(s, v->tokenizer, text, &done, err);
	if (!status)
		splitting_take(s, chunks, n_chunks);
	splitting_destroy(s);
	return status;
}
