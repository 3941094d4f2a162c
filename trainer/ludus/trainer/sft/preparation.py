"""A fine-tuning run before it starts: its model is checked, and its conversations are read."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ludus.proto.config import SftRun
from ludus.proto.errors import ConfigError
from ludus.trainer.core.output import warn_user
from ludus.trainer.driver.checks import (
    check_model_path,
    check_num_tokens,
    resolve_model,
    resolve_path,
    warn_of_emulation,
)
from ludus.trainer.learner import lora
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.load import load_config
from ludus.trainer.sft.conversations import ConversationSet, encode_examples, split_conversations
from ludus.trainer.sft.examples import read_examples
from ludus.trainer.sft.training import SftConversations, SftState


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run whose model and data were checked."""

    run: SftRun
    """The run with the number of its steps, and with absolute paths."""
    data: SftConversations

    def check_fingerprint(self, state: SftState) -> None:
        """Check that a resumed run trains on the same conversations."""
        if state.fingerprint not in ("", self.data.compute_fingerprint()):
            raise ConfigError(
                f"data.path = '{self.run.data.path}' has changed since the training started; "
                "restore the old data and data settings, or start again without --resume"
            )


def prepare_run(run: SftRun) -> PreparedRun:
    """Check the model and read the conversations."""
    run = _resolve_paths(run)
    warn_of_emulation(run.learner)
    check_model_path(run.model.path)
    check_num_tokens(run.model.path)
    _check_positions(run)
    if run.model.lora is not None:
        lora.check_targets(run.model.path, run.model.lora)
    tokenizer = ChatTokenizer.load(run.model.path, run.model)
    data = _read_data(run, tokenizer)
    training = run.training
    if training.num_epochs is not None:
        num_conversations = training.num_epochs * len(data.train_indices)
        num_steps = max(1, math.ceil(round(num_conversations / training.batch_size, 9)))
        training = training.model_copy(update={"num_steps": num_steps})
        run = run.model_copy(update={"training": training})
    return PreparedRun(run, data)


def _resolve_paths(run: SftRun) -> SftRun:
    """Return the run with absolute paths, so that it can resume in another working folder."""
    sections = {
        name: section.model_copy(update={"path": resolve_path(section.path)})
        for name, section in (("data", run.data), ("validation", run.validation))
    }
    return run.model_copy(update={"model": resolve_model(run.model), **sections})


def _check_positions(run: SftRun) -> None:
    """Check that the model has a position for every token of a conversation."""
    config = load_config(run.model.path).get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and run.data.max_tokens > limit:
        raise ConfigError(
            f"data.max_tokens = {run.data.max_tokens} is more than the {limit} positions of "
            f"model.path = '{run.model.path}'; set data.max_tokens = {limit}"
        )


def _read_data(run: SftRun, tokenizer: ChatTokenizer) -> SftConversations:
    config, validation = run.data, run.validation
    train_set = _read_conversations(run, tokenizer, config.path, config.split, "data.path")
    if validation.path is not None:
        field, indices = "validation.path", range(len(train_set))
        held_out_set = _read_conversations(run, tokenizer, validation.path, validation.split, field)
        return SftConversations(train_set, indices, held_out_set, range(len(held_out_set)))
    train_indices, held_out_indices = split_conversations(len(train_set), validation.size, run.seed)
    if validation.size > 0 and not held_out_indices:
        raise ConfigError(
            f"validation.size = {validation.size:g} holds out a share of the conversations, but "
            f"data.path = '{config.path}' has only one; give more, or set validation.size = 0"
        )
    return SftConversations(train_set, train_indices, train_set, held_out_indices)


def _read_conversations(
    run: SftRun, tokenizer: ChatTokenizer, path: str, split: str, field: str
) -> ConversationSet:
    examples = read_examples(path, split=split, field=field)
    conversations = encode_examples(examples, tokenizer, run.data, f"{field} = '{path}'")
    for count, outcome in (
        (conversations.num_dropped, "left out"),
        (conversations.num_truncated, "cut off"),
    ):
        if count:
            warn_user(
                f"{field} = '{path}': {count} conversations are longer than data.max_tokens = "
                f"{run.data.max_tokens} and are {outcome}"
            )
    return conversations
