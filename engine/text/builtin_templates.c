#include "engine/text/builtin_templates.h"

#include <string.h>

/*
 * The prompt formats are those that the models' makers publish; the templates are ours. Each begins with what all
 * share: the text of a message whose content may be a string, null or a list of parts, and a refusal of what the format
 * has no words for.
 */
#define TEXT_MACRO                                                                                                     \
	"{%- macro text(content) -%}\n"                                                                                \
	"    {%- if content is string -%}{{ content }}\n"                                                              \
	"    {%- elif content -%}\n"                                                                                   \
	"        {%- for part in content -%}\n"                                                                        \
	"            {%- if part.type != 'text' -%}{{ raise_exception('this chat template takes text only') }}{%- "    \
	"endif -%}\n"                                                                                                  \
	"            {{- part.text -}}\n"                                                                              \
	"        {%- endfor -%}\n"                                                                                     \
	"    {%- endif -%}\n"                                                                                          \
	"{%- endmacro -%}\n"

#define NO_TOOLS                                                                                                       \
	"{%- if tools -%}{{ raise_exception('this chat template has no format for tools') }}{%- endif -%}\n"           \
	"{%- for m in messages if m.tool_calls or m.role == 'tool' -%}\n"                                              \
	"    {{- raise_exception('this chat template has no format for tool calls and their results') -}}\n"           \
	"{%- endfor -%}\n"

/* For formats without a place for a system message of its own: takes it from the front into `system`. */
#define SPLIT_SYSTEM                                                                                                   \
	"{%- set system = '' -%}\n"                                                                                    \
	"{%- set turns = messages -%}\n"                                                                               \
	"{%- if messages and messages[0].role in ('system', 'developer') -%}\n"                                        \
	"    {%- set system = text(messages[0].content) -%}\n"                                                         \
	"    {%- set turns = messages[1:] -%}\n"                                                                       \
	"{%- endif -%}\n"

#define ONLY_TURNS                                                                                                     \
	"{%- if m.role not in ('user', 'assistant') -%}\n"                                                             \
	"    {{- raise_exception('this chat template has no format for the role \"' ~ m.role ~ '\" here') -}}\n"       \
	"{%- endif -%}\n"

#define ALTERNATING                                                                                                    \
	"{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}\n"                                                    \
	"    {{- raise_exception('this chat template needs user and assistant messages in turns, user first') -}}\n"   \
	"{%- endif -%}\n"

static const struct {
	const char *name, *source;
} templates[] = {
	/* Instruction tuning in the manner of Stanford Alpaca. */
	{"alpaca", TEXT_MACRO NO_TOOLS SPLIT_SYSTEM
         "{{- system or 'Below is an instruction that describes a task. Write a response that appropriately completes "
         "the request.' -}}\n"
         "{%- for m in turns -%}\n" ONLY_TURNS
         "    {{- '\\n\\n### Instruction:\\n' if m.role == 'user' else '\\n\\n### Response:\\n' -}}\n"
         "    {{- text(m.content) -}}\n"
         "    {{- eos_token if m.role == 'assistant' -}}\n"
         "{%- endfor -%}\n"
         "{{- '\\n\\n### Response:\\n' if add_generation_prompt -}}\n"},
	/* ChatML, with tools as Hermes and Qwen have them. */
	{"chatml", TEXT_MACRO
         "{%- set system = '' -%}\n"
         "{%- set turns = messages -%}\n"
         "{%- if tools and messages and messages[0].role == 'system' -%}\n"
         "    {%- set system = text(messages[0].content) ~ '\\n\\n' -%}\n"
         "    {%- set turns = messages[1:] -%}\n"
         "{%- endif -%}\n"
         "{%- if tools -%}\n"
         "    {{- '<|im_start|>system\\n' ~ system ~ '# Tools\\n\\nThese functions can be called:\\n<tools>' -}}\n"
         "    {%- for tool in tools %}{{ '\\n' ~ tool | tojson }}{% endfor -%}\n"
         "    {{- '\\n</tools>\\n\\nTo call one, answer with a JSON object inside of tool_call tags:\\n<tool_call>\\n"
         "{\"name\": <name>, \"arguments\": <arguments object>}\\n</tool_call><|im_end|>\\n' -}}\n"
         "{%- endif -%}\n"
         "{%- for m in turns -%}\n"
         "    {%- if m.role == 'tool' -%}\n"
         "        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' -}}\n"
         "        {{- '\\n<tool_response>\\n' ~ text(m.content) ~ '\\n</tool_response>' -}}\n"
         "        {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' -}}\n"
         "        {%- continue -%}\n"
         "    {%- endif -%}\n"
         "    {{- '<|im_start|>' ~ m.role ~ '\\n' ~ text(m.content) -}}\n"
         "    {%- for call in m.tool_calls or [] -%}\n"
         "        {%- set f = call.function or call -%}\n"
         "        {{- '\\n' if m.content or not loop.first -}}\n"
         "        {{- '<tool_call>\\n{\"name\": ' ~ f.name | tojson ~ ', \"arguments\": ' -}}\n"
         "        {{- f.arguments if f.arguments is string else f.arguments | tojson -}}\n"
         "        {{- '}\\n</tool_call>' -}}\n"
         "    {%- endfor -%}\n"
         "    {{- '<|im_end|>\\n' -}}\n"
         "{%- endfor -%}\n"
         "{{- '<|im_start|>assistant\\n' if add_generation_prompt -}}\n"},
	/* DeepSeek-Coder Instruct. */
	{"deepseek-coder", TEXT_MACRO NO_TOOLS SPLIT_SYSTEM
         "{{- bos_token ~ system -}}\n"
         "{%- for m in turns -%}\n" ONLY_TURNS
         "    {%- if m.role == 'user' -%}{{ '### Instruction:\\n' ~ text(m.content) ~ '\\n' }}\n"
         "    {%- else -%}{{ '### Response:\\n' ~ text(m.content) ~ '\\n<|EOT|>\\n' }}{%- endif -%}\n"
         "{%- endfor -%}\n"
         "{{- '### Response:\\n' if add_generation_prompt -}}\n"},
	/* Gemma has no system role: its text goes before the first user message. */
	{"gemma", TEXT_MACRO NO_TOOLS SPLIT_SYSTEM
         "{{- bos_token -}}\n"
         "{%- for m in turns -%}\n" ONLY_TURNS ALTERNATING
         "    {{- '<start_of_turn>' ~ ('model' if m.role == 'assistant' else 'user') ~ '\\n' -}}\n"
         "    {{- system ~ '\\n\\n' if loop.first and system -}}\n"
         "    {{- text(m.content) | trim ~ '<end_of_turn>\\n' -}}\n"
         "{%- endfor -%}\n"
         "{{- '<start_of_turn>model\\n' if add_generation_prompt -}}\n"},
	{"llama2", TEXT_MACRO NO_TOOLS SPLIT_SYSTEM
         "{%- for m in turns -%}\n" ONLY_TURNS ALTERNATING "    {%- set body = text(m.content) -%}\n"
         "    {%- if loop.first and system -%}\n"
         "        {%- set body = '<<SYS>>\\n' ~ system ~ '\\n<</SYS>>\\n\\n' ~ body -%}\n"
         "    {%- endif -%}\n"
         "    {%- if m.role == 'user' -%}{{ bos_token ~ '[INST] ' ~ body | trim ~ ' [/INST]' }}\n"
         "    {%- else -%}{{ ' ' ~ body | trim ~ ' ' ~ eos_token }}{%- endif -%}\n"
         "{%- endfor -%}\n"},
	{"llama3", TEXT_MACRO NO_TOOLS
         "{{- bos_token -}}\n"
         "{%- for m in messages -%}\n"
         "    {{- '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\\n\\n' ~ text(m.content) | trim ~ '<|eot_id|>' "
         "-}}\n"
         "{%- endfor -%}\n"
         "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' if add_generation_prompt -}}\n"},
	/* Mistral Instruct v0.1 to v0.3. */
	{"mistral", TEXT_MACRO NO_TOOLS SPLIT_SYSTEM
         "{{- bos_token -}}\n"
         "{%- for m in turns -%}\n" ONLY_TURNS ALTERNATING "    {%- if m.role == 'user' -%}\n"
         "        {{- '[INST] ' ~ (system ~ '\\n\\n' if loop.first and system) ~ text(m.content) ~ ' [/INST]' -}}\n"
         "    {%- else -%}{{ ' ' ~ text(m.content) | trim ~ eos_token }}{%- endif -%}\n"
         "{%- endfor -%}\n"},
	{"phi3", TEXT_MACRO NO_TOOLS "{%- for m in messages -%}\n"
                                     "    {{- '<|' ~ m.role ~ '|>\\n' ~ text(m.content) ~ '<|end|>\\n' -}}\n"
                                     "{%- endfor -%}\n"
                                     "{{- '<|assistant|>\\n' if add_generation_prompt -}}\n"},
	/* Vicuna 1.1. */
	{"vicuna", TEXT_MACRO NO_TOOLS SPLIT_SYSTEM
         "{{- bos_token ~ (system ~ ' ' if system) -}}\n"
         "{%- for m in turns -%}\n" ONLY_TURNS "    {%- if m.role == 'user' -%}{{ 'USER: ' ~ text(m.content) ~ ' ' }}\n"
         "    {%- else -%}{{ 'ASSISTANT: ' ~ text(m.content) ~ eos_token }}{%- endif -%}\n"
         "{%- endfor -%}\n"
         "{{- 'ASSISTANT:' if add_generation_prompt -}}\n"},
	{"zephyr", TEXT_MACRO NO_TOOLS "{%- for m in messages -%}\n"
                                       "    {{- '<|' ~ m.role ~ '|>\\n' ~ text(m.content) ~ eos_token ~ '\\n' -}}\n"
                                       "{%- endfor -%}\n"
                                       "{{- '<|assistant|>\\n' if add_generation_prompt -}}\n"},
};

const char *template_builtin(const char *name)
{
	for (size_t i = 0; i < sizeof templates / sizeof *templates; i++)
		if (strcmp(templates[i].name, name) == 0)
			return templates[i].source;
	return NULL;
}

const char *template_builtin_name(size_t i)
{
	return i < sizeof templates / sizeof *templates ? templates[i].name : NULL;
}
