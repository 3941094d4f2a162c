"""Chat templates that resemble those of well-known model families, and their tokenizers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Family:
    """The chat template and special tokens of a model family."""

    name: str
    template: str
    special_tokens: tuple[str, ...]
    eos: str
    bos: str | None = None
    has_tools: bool = False
    """True if the template lists the tools."""

    def __str__(self) -> str:
        return self.name


_CHATML_BODY = (
    "{%- for m in messages %}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

# Adds a default system message if none is given, and a line break after each end token.
QWEN25 = Family(
    "qwen2.5",
    "{%- if messages[0].role != 'system' and not tools %}"
    "{{- '<|im_start|>system\\nYou are a careful player.<|im_end|>\\n' }}"
    "{%- elif tools %}"
    "{{- '<|im_start|>system\\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}"
    "{{- '# Tools\\n<tools>' }}{%- for t in tools %}{{- '\\n' }}{{- t | tojson }}{%- endfor %}"
    "{{- '\\n</tools><|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{{- '<|im_end|>\\n' }}"
    "{%- elif not (tools and loop.first and m.role == 'system') %}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}",
    ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    eos="<|im_end|>",
    has_tools=True,
)

# Removes the reasoning of earlier turns. With reasoning disabled, the prompt contains an empty
# reasoning block.
QWEN3 = Family(
    "qwen3",
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}"
    "{%- endfor %}"
    "{%- for m in messages %}"
    "{%- set content = m.content %}"
    "{%- if m.role == 'assistant' and '</think>' in content and loop.index0 < ns.last %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}"
    "{%- endif %}"
    "{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.role == 'assistant' and loop.index0 > ns.last and '</think>' not in content %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}"
    "{%- endif %}"
    "{{- content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}"
    "{%- endif %}{%- endif %}",
    ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    eos="<|im_end|>",
)

# Starts the text with a BOS token, trims contents, and adds no line break after the end token.
LLAMA3 = Family(
    "llama3",
    "{{- bos_token }}"
    "{%- for m in messages %}"
    "{%- set role = 'ipython' if m.role == 'tool' else m.role %}"
    "{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}"
    "{{- m.content | trim + '<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    "{%- endif %}",
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    eos="<|eot_id|>",
    bos="<|begin_of_text|>",
)

# Accepts only alternating user and assistant roles, and starts each completion with a space.
MISTRAL = Family(
    "mistral",
    "{{- bos_token }}"
    "{%- for m in messages %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('roles must alternate user/assistant/user/...') }}"
    "{%- endif %}"
    "{%- if m.role == 'user' %}{{- '[INST] ' + m.content + ' [/INST]' }}"
    "{%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + eos_token }}"
    "{%- else %}{{- raise_exception('only user and assistant roles') }}{%- endif %}"
    "{%- endfor %}",
    ("<s>", "</s>"),
    eos="</s>",
    bos="<s>",
)

# Ends turns with a token that is not EOS, has no system role, and calls the assistant "model".
GEMMA = Family(
    "gemma",
    "{{- bos_token }}"
    "{%- if messages[0].role == 'system' %}"
    "{{- raise_exception('System role not supported') }}{%- endif %}"
    "{%- for m in messages %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('Conversation roles must alternate') }}{%- endif %}"
    "{%- set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{- '<start_of_turn>' + role + '\\n' + m.content | trim + '<end_of_turn>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}",
    ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    eos="<eos>",
    bos="<bos>",
)

# Marks roles with plain words and has no end token: the next role marks the end of a turn.
PLAIN = Family(
    "plain",
    "{%- for m in messages %}{{- m.role | capitalize + ': ' + m.content + '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- 'Assistant: ' }}{%- endif %}",
    ("<|end|>",),
    eos="<|end|>",
)

CHATML = Family("chatml", _CHATML_BODY, ("<|im_start|>", "<|im_end|>"), eos="<|im_end|>")

# Shows all system messages at the start of the conversation.
SYSTEM_FIRST = Family(
    "system-first",
    "{{- bos_token }}"
    "{%- for m in messages %}{%- if m.role == 'system' %}{{- m.content }}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' %}{{- '<|User|>' + m.content }}{%- endif %}"
    "{%- if m.role == 'assistant' %}{{- '<|Assistant|>' + m.content + eos_token }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|Assistant|>' }}{%- endif %}",
    ("<|begin|>", "<|end|>", "<|User|>", "<|Assistant|>"),
    eos="<|end|>",
    bos="<|begin|>",
)

# Opens a thought in the prompt, and removes earlier thoughts.
OPEN_THOUGHT = Family(
    "open-thought",
    "{%- for m in messages %}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content.split('</think>')[-1] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}",
    ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<answer>", "</answer>"),
    eos="<|im_end|>",
)

# Ends a turn with the token of the next role, as GLM does.
NEXT_ROLE = Family(
    "next_role",
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}{{- '<|observation|>' + m.content }}"
    "{%- else %}{{- '<|' + m.role + '|>' + m.content }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}",
    ("<|user|>", "<|assistant|>", "<|observation|>", "<|system|>", "<|endoftext|>"),
    eos="<|endoftext|>",
)

# Ends the last turn with another token than earlier turns, and shows thoughts of the last turn from
# a field, in a separate message, as gpt-oss does.
CHANNELS = Family(
    "channels",
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}"
    "{%- if loop.last and m.thinking is defined %}"
    "{{- '<|start|>assistant<|thoughts|>' + m.thinking + '<|end|>' }}{%- endif %}"
    "{{- '<|start|>assistant<|final|>' + m.content }}"
    "{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}",
    ("<|start|>", "<|message|>", "<|thoughts|>", "<|final|>", "<|end|>", "<|return|>"),
    eos="<|return|>",
)

_TOOL_TEMPLATE = (
    "{%- if tools %}{{- 'Tools: ' + (tools | tojson) + '<|end|>' }}{%- endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}"
    "{%- if not m.name %}{{- raise_exception('a result without a call') }}{%- endif %}"
    "{{- 'result of ' + m.name + ': ' + m.content + '<|end|>' }}"
    "{%- else %}{{- m.role + ': ' + m.content }}"
    "{%- for c in m.tool_calls or [] %}CALL{%- endfor %}"
    "{{- '<|end|>' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"
)
_XML_CALL = (
    "{{- '<tool_call><function=' + c.function.name + '>' }}"
    "{%- for k, v in c.function.arguments.items() %}"
    "{{- '<parameter=' + k + '>' + v | string + '</parameter>' }}{%- endfor %}"
    "{{- '</function></tool_call>' }}"
)
_UNKNOWN_CALL = "{{- '(' + c.function.name + ' | ' + c.function.arguments | tojson + ')' }}"

# Renders calls as XML, and results only after calls.
XML_CALLS = Family(
    "xml_calls", _TOOL_TEMPLATE.replace("CALL", _XML_CALL), ("<|end|>",), eos="<|end|>"
)
UNKNOWN_CALLS = Family(
    "unknown_calls", _TOOL_TEMPLATE.replace("CALL", _UNKNOWN_CALL), ("<|end|>",), eos="<|end|>"
)
# Shows the id of a call in the call and in its result, as Mistral does.
CALL_IDS = Family(
    "call_ids",
    _TOOL_TEMPLATE.replace(
        "CALL",
        "{{- '[TOOL_CALLS]' + c.function.name + '[CALL_ID]' + c.id + '[ARGS]' }}"
        "{{- c.function.arguments | tojson }}",
    ).replace("'result of ' + m.name", "'result of ' + m.tool_call_id"),
    ("<|end|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    eos="<|end|>",
)
NO_CALLS = Family("no_calls", _TOOL_TEMPLATE.replace("CALL", ""), ("<|end|>",), eos="<|end|>")

FAMILIES = (QWEN25, QWEN3, LLAMA3, MISTRAL, GEMMA, PLAIN, CHATML, SYSTEM_FIRST)


@cache
def make_family_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with the family's special tokens and chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: token_id for token_id, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in family.special_tokens])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=family.eos,
        pad_token=family.eos,
        bos_token=family.bos,
        chat_template=family.template,
        clean_up_tokenization_spaces=False,
    )
