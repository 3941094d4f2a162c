"""A tiny language model with a new byte-level tokenizer and random weights."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ludus.proto.config import TinyModel
from ludus.proto.errors import ConfigError
from ludus.trainer.core.output import describe_write_error, replace_folder
from ludus.trainer.core.streams import Stream, seed_torch

_END_TOKEN, _PAD_TOKEN = "<|end|>", "<|pad|>"
_ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>")
_TAG_PATTERN = re.compile(r"</?[a-z_]+>")
_MAX_TAGS = 32
# A role is one token, so that a tiny model spends its capacity on the text.
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level tokenizer with a chat template; frequent words become one token.

    Tags in the texts, such as <final_answer>, also become one token, like <think> in large models.
    """
    texts = list(texts)
    tags = sorted({tag for text in texts for tag in _TAG_PATTERN.findall(text)})[:_MAX_TAGS]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(tags),
        special_tokens=[_PAD_TOKEN, _END_TOKEN, *_ROLE_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((_TAG_PATTERN.sub("", text) for text in texts), trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_END_TOKEN,
        pad_token=_PAD_TOKEN,
        chat_template=_CHAT_TEMPLATE,
    )


def make_model(
    config: TinyModel, tokenizer: PreTrainedTokenizerFast, seed: int
) -> LlamaForCausalLM:
    """Return a Llama model with random weights, which the run's `seed` determines.

    The model is a Llama, because AutoTokenizer would not load the saved tokenizer of a Qwen2.
    """
    seed_torch(seed, Stream.INITIAL_WEIGHTS)
    model_config = make_model_config(
        config,
        len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(model_config)
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(std=config.embedding_range)
    return model


def make_model_config(config: TinyModel, vocab_size: int, **special_token_ids: int) -> LlamaConfig:
    """Return the configuration of a tiny model for transformers."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=config.width,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        attention_bias=True,
        max_position_embeddings=config.max_tokens,
        initializer_range=config.initializer_range,
        tie_word_embeddings=config.tie_embeddings,
        bos_token_id=None,
        **special_token_ids,
    )


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save model and tokenizer as a Hugging Face folder, which appears only when complete.

    Raises:
        ConfigError: the folder cannot be written.
    """
    try:
        with replace_folder(folder) as partial_folder:
            model.save_pretrained(partial_folder)
            tokenizer.save_pretrained(partial_folder)
    except Exception as error:  # writers in Rust raise their own exception classes
        raise ConfigError(
            f"the model {describe_write_error(folder, error)}; free some space, or set "
            "output_dir to a folder on another disk"
        ) from error
