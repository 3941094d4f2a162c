"""The chat template that a run's configuration gives, and its copy in the run folder."""

from __future__ import annotations

from pathlib import Path

from ludus.proto.config import LanguageModelRun, PretrainedModel
from ludus.proto.runs import CHAT_TEMPLATE_FILE
from ludus.trainer.models.load import read_chat_template


def check_chat_template(run: LanguageModelRun) -> None:
    """Check that the chat template can be read.

    Raises:
        NotFoundError: the file cannot be read, and the run folder contains no copy.
    """
    model = run.model
    has_copy = (run.folder / CHAT_TEMPLATE_FILE).is_file()
    if isinstance(model, PretrainedModel) and model.chat_template is not None and not has_copy:
        read_chat_template(model.chat_template)


def keep_chat_template(run: LanguageModelRun) -> LanguageModelRun:
    """Copy the chat template to the run folder, and return a configuration that uses the copy.

    A resumed run continues with its copy, even if the file has changed.
    """
    model = run.model
    if not isinstance(model, PretrainedModel) or model.chat_template is None:
        return run
    copy: Path = (run.folder / CHAT_TEMPLATE_FILE).absolute()
    if not copy.is_file():
        copy.write_text(read_chat_template(model.chat_template), encoding="utf-8")
    return run.model_copy(update={"model": model.model_copy(update={"chat_template": str(copy)})})
