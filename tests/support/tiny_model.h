/*
 * A whole tiny model as a GGUF file: llama architecture, byte-level BPE without merges (a token is a byte), random F32
 * weights from a seed. Small enough that a test can run thousands of steps.
 */
#pragma once

#include <math.h>
#include <stdio.h>
#include <unistd.h>

#include "engine/base/utf8.h"
#include "tests/unit/model/gguf_builder.h"

enum {
	TINY_LAYERS = 2,
	TINY_EMBD = 32,
	TINY_FF = 48,
	TINY_HEADS = 4,
	TINY_KV_HEADS = 2,
	TINY_HEAD_DIM = 8,
	TINY_VOCAB = 259,
	TINY_START = 256, /* <|im_start|> */
	TINY_END = 257,   /* <|im_end|>, the end of an answer */
	TINY_UNUSED = 258,
};

static const char tiny_chat_template[] =
	"{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
        "'\n'}}"
	"{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/* The name of a byte in a GPT-2 vocabulary: printable bytes are themselves, the others follow from U+0100. */
static inline size_t tiny_byte_name(int byte, char out[4])
{
	int n_moved = 0;
	for (int b = 0; b < 256; b++) {
		int printable = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
		if (b == byte)
			return utf8_encode((uint32_t)(printable ? b : 256 + n_moved), out);
		n_moved += !printable;
	}
	return 0;
}

static inline void tiny_vocab(struct buf *b)
{
	put_value_str(b, "tokenizer.ggml.model", "gpt2");
	put_value_str(b, "tokenizer.ggml.pre", "gpt-2");
	put_array(b, "tokenizer.ggml.tokens", GGUF_STRING, TINY_VOCAB);
	for (int i = 0; i < 256; i++) {
		char name[4];
		size_t n = tiny_byte_name(i, name);
		put_u64(b, n);
		buf_append(b, name, n);
	}
	put_str(b, "<|im_start|>");
	put_str(b, "<|im_end|>");
	put_str(b, "<|unused|>");
	put_array(b, "tokenizer.ggml.token_type", GGUF_I32, TINY_VOCAB);
	for (int i = 0; i < TINY_VOCAB; i++)
		put_u32(b, i < 256 ? 1 : 3);
	put_array(b, "tokenizer.ggml.merges", GGUF_STRING, 0);
	put_value_u32(b, "tokenizer.ggml.eos_token_id", TINY_END);
}

struct tiny_tensor {
	char name[48];
	uint32_t n_dims;
	uint64_t dim[2];
};

static inline void tiny_add(struct tiny_tensor *list, int *n, const char *name, uint64_t in, uint64_t out)
{
	struct tiny_tensor *t = &list[(*n)++];
	snprintf(t->name, sizeof t->name, "%s", name);
	t->n_dims = out ? 2 : 1;
	t->dim[0] = in;
	t->dim[1] = out ? out : 1;
}

static inline int tiny_tensors(struct tiny_tensor *list)
{
	static const struct {
		const char *name;
		uint64_t in, out;
	} per_layer[] = {
	        {"attn_norm", TINY_EMBD, 0},
	        {"attn_q", TINY_EMBD, TINY_HEADS * TINY_HEAD_DIM},
	        {"attn_k", TINY_EMBD, TINY_KV_HEADS *TINY_HEAD_DIM},
	        {"attn_v", TINY_EMBD, TINY_KV_HEADS *TINY_HEAD_DIM},
	        {"attn_output", TINY_HEADS * TINY_HEAD_DIM, TINY_EMBD},
	        {"ffn_norm", TINY_EMBD, 0},
	        {"ffn_gate", TINY_EMBD, TINY_FF},
	        {"ffn_up", TINY_EMBD, TINY_FF},
	        {"ffn_down", TINY_FF, TINY_EMBD},
	};
	int n = 0;
	tiny_add(list, &n, "token_embd.weight", TINY_EMBD, TINY_VOCAB);
	tiny_add(list, &n, "output_norm.weight", TINY_EMBD, 0);
	for (int layer = 0; layer < TINY_LAYERS; layer++) {
		for (size_t i = 0; i < sizeof per_layer / sizeof *per_layer; i++) {
			char name[48];
			snprintf(name, sizeof name, "blk.%d.%s.weight", layer, per_layer[i].name);
			tiny_add(list, &n, name, per_layer[i].in, per_layer[i].out);
		}
	}
	return n;
}

/* Appends the whole file to b. window: of all layers, or 0. */
static inline void tiny_model_build(struct buf *b, uint32_t n_ctx, uint32_t window, const char *chat_template,
                                    uint64_t seed)
{
	struct tiny_tensor list[64];
	int n = tiny_tensors(list);
	float eps = 1e-5f;
	uint64_t offset = 0, rng = seed * 2654435761u + 88172645463325252ull;
	put_header(b, 3, (uint64_t)n, 15u + (chat_template != NULL) + (window > 0));
	put_value_str(b, "general.architecture", "llama");
	put_value_str(b, "general.name", "tiny");
	put_value_u32(b, "llama.block_count", TINY_LAYERS);
	put_value_u32(b, "llama.context_length", n_ctx);
	put_value_u32(b, "llama.embedding_length", TINY_EMBD);
	put_value_u32(b, "llama.feed_forward_length", TINY_FF);
	put_value_u32(b, "llama.attention.head_count", TINY_HEADS);
	put_value_u32(b, "llama.attention.head_count_kv", TINY_KV_HEADS);
	put_value(b, "llama.attention.layer_norm_rms_epsilon", GGUF_F32, &eps, sizeof eps);
	if (window)
		put_value_u32(b, "llama.attention.sliding_window", window);
	tiny_vocab(b); /* 6 values */
	if (chat_template)
		put_value_str(b, "tokenizer.chat_template", chat_template);
	for (int i = 0; i < n; i++) {
		put_tensor(b, list[i].name, list[i].n_dims, list[i].dim, QUANT_F32, offset);
		offset += (list[i].dim[0] * list[i].dim[1] * 4 + 31) / 32 * 32;
	}
	put_padding(b, 32);
	for (int i = 0; i < n; i++) {
		uint64_t elems = list[i].dim[0] * list[i].dim[1];
		/* Large enough that every position and every earlier token moves the logits. */
		float scale = list[i].n_dims == 1 ? 0 : 1.7f / sqrtf((float)list[i].dim[0]);
		for (uint64_t k = 0; k < elems; k++) {
			rng ^= rng << 13;
			rng ^= rng >> 7;
			rng ^= rng << 17;
			float x = list[i].n_dims == 1 ? 1.0f
			                              : scale * ((float)(rng >> 40) / (float)(1 << 23) - 1.0f) * 1.7f;
			buf_append(b, &x, sizeof x);
		}
		put_padding(b, 32);
	}
}

/* Writes the model to a fresh temporary file and stores its name; the test unlinks it. */
static inline bool tiny_model_write_windowed(char path[64], uint32_t n_ctx, uint32_t window, const char *chat_template,
                                             uint64_t seed)
{
	struct buf b = BUF_INIT;
	strcpy(path, "/tmp/kvasir-tiny-XXXXXX");
	int fd = mkstemp(path);
	if (fd < 0)
		return false;
	tiny_model_build(&b, n_ctx, window, chat_template, seed);
	bool ok = !b.failed && write(fd, b.data, b.len) == (ssize_t)b.len;
	close(fd);
	buf_free(&b);
	return ok;
}

static inline bool tiny_model_write(char path[64], uint32_t n_ctx, const char *chat_template, uint64_t seed)
{
	return tiny_model_write_windowed(path, n_ctx, 0, chat_template, seed);
}
