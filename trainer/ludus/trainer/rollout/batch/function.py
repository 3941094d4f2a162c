"""A rollout function of TRL's, called in a thread, and what it returned held against the engine.

prompts --call--> rows --read_rows--> checked --ledger, or a score--> Played
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from ludus.env import Message
from ludus.proto.config import LanguageModelRun, RolloutConfig
from ludus.proto.errors import RolloutFunctionError, UserError
from ludus.trainer.core.functions import import_object
from ludus.trainer.core.types import Sampling, ScoringRequest
from ludus.trainer.data.failures import describe
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.batch.arguments import (
    RolloutTrainer,
    TrainerState,
    adapted,
    arguments_of,
)
from ludus.trainer.rollout.batch.completions import Call, Completions
from ludus.trainer.rollout.batch.contract import Expected, Form, Row, form_of, read_rows

MAX_LOGPROB_ERROR = {"float32": 1e-3, "bfloat16": 0.5}
"""By the type that the engine computes in: farther from what it says itself is a wrong log-prob."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What an episode begins with."""

    prompt: str | list[Message]
    """As a data set has it."""
    columns: Mapping[str, Any]
    """What it says beside the prompt."""


_NUM_THREADS = 8


class Policy(Protocol):
    """What a call asks of the worker's generator beside completions."""

    @property
    def version(self) -> int:
        """Of the weights that sample now."""

    async def score(self, canary: Sequence[ScoringRequest]) -> list[list[float]]:
        """Log-probs of each prompt's completion, at temperature 1, under these weights."""


@dataclass(frozen=True, slots=True)
class GivenRollout:
    """A rollout function of a program, with the `args` that it is to see."""

    function: Callable[..., Any]
    args: Any

    @property
    def __name__(self) -> str:
        """The function's, by which logs and configurations call it."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """What the function returns."""
        return self.function(*arguments, **named)


@dataclass(frozen=True, slots=True)
class PlayedRow:
    """A row, and the version of the weights that sampled the oldest of its tokens."""

    row: Row
    policy_version: int


class BatchFunction:
    """One rollout function of a run; its calls come one after the other."""

    def __init__(
        self,
        path: str,
        run: LanguageModelRun,
        limits: RolloutConfig,
        policy: Policy,
        completions: Completions,
        chat: ChatTokenizer,
        port: int | None,
    ) -> None:
        """Import the function.

        Args:
            limits: those of its environment.
            port: where the worker answers POST /generate/; None where it does not.
        """
        found = import_object(path, "environment.rollout")
        given = found if isinstance(found, GivenRollout) else None
        self._path = path
        self._function = given.function if given else found
        self._args = given.args if given else None
        self._form = form_of(self._function, path)
        self._run = run
        self._limits = limits
        self._policy = policy
        self._completions = completions
        self._chat = chat
        self._port = port
        # Functions that never end must keep no threads but their own.
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="rollout")
        # They are written for one caller: many keep one client for all of their episodes.
        self._turn = asyncio.Lock()

    async def play(
        self,
        asked: Sequence[Asked],
        num_generations: int,
        sampling: Sampling,
        keys: Sequence[int],
        *,
        is_trained_on: bool,
    ) -> list[PlayedRow]:
        """[asked * num_generations] the rows of one call, prompt by prompt.

        Args:
            keys: [asked * num_generations] what each row's random numbers come from.
            is_trained_on: whether log-probs have to be those that the learner compares with.

        Raises:
            RolloutFunctionError: it raised, took too long, or returned what cannot be used.
            UserError: it raised one.
        """
        expected = Expected(
            self._path,
            len(asked),
            num_generations,
            len(self._chat.tokenizer),
            self._limits.max_tokens,
        )
        sampling = replace(sampling, max_tokens=self._limits.max_completion_tokens)
        async with self._turn:
            with self._completions.call(keys) as call:
                called = self._called(call, asked, num_generations, sampling, is_trained_on)
                returned = await self._returned(called)
                rows = await asyncio.to_thread(read_rows, returned, expected)
                compared = sampling if is_trained_on else None
                return [
                    await self._checked(number, row, call, compared, expected)
                    for number, row in enumerate(rows)
                ]

    async def _returned(self, called: Callable[[], Any]) -> Any:
        timeout_s = self._limits.group_timeout_s
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return await asyncio.get_running_loop().run_in_executor(self._threads, called)
        except (UserError, RolloutFunctionError):
            raise
        except (Exception, SystemExit) as error:  # the boundary to the run's own code
            if isinstance(error, TimeoutError) and limit.expired():
                raise RolloutFunctionError(
                    f"rollout function '{self._path}' expected to end within "
                    f"rollout.group_timeout_s = {timeout_s:g} s, still running; make it faster or "
                    "raise the limit"
                ) from None
            raise RolloutFunctionError(
                f"rollout function '{self._path}' raised {describe(error)}"
            ) from error

    def _called(
        self,
        call: Call,
        asked: Sequence[Asked],
        num_generations: int,
        sampling: Sampling,
        is_trained_on: bool,
    ) -> Callable[[], Any]:
        """The call, with all that the function's form takes."""
        if self._args is None:
            args = arguments_of(self._limits, sampling, num_generations, self._port, self._run.seed)
        else:
            args = adapted(self._args, sampling, num_generations, self._port)
        if self._form.repeats_prompts:
            repeated = [one for one in asked for _ in range(num_generations)]
            trainer = RolloutTrainer(
                args,
                self._chat.tokenizer,
                TrainerState(self._policy.version, is_evaluation=not is_trained_on),
                [one.columns for one in repeated],
                sampling,
                self._completions,
                call,
                asyncio.get_running_loop(),
            )
            prompts = [one.prompt for one in repeated]
            return partial(self._function, prompts, trainer=trainer)
        images = {"images": None} if self._form is Form.ONCE_WITH_IMAGES else {}
        texts = [
            one.prompt if isinstance(one.prompt, str) else self._chat.prompt_text(one.prompt)
            for one in asked
        ]
        tokenizer = self._chat.tokenizer
        return partial(self._function, texts, args=args, processing_class=tokenizer, **images)

    async def _checked(
        self, number: int, row: Row, call: Call, compared: Sampling | None, expected: Expected
    ) -> PlayedRow:
        """The row, whose log-probs are the engine's.

        Raises:
            RolloutFunctionError: they are not.
        """
        version = self._policy.version
        for begin, end in row.sampled_spans:
            before = [*row.prompt_ids, *row.completion_ids[:begin]]
            token_ids, logprobs = row.completion_ids[begin:end], row.logprobs[begin:end]
            sampled = call.find(before, token_ids)
            if sampled is not None:
                version = min(version, sampled.completion.policy_version)
                own = sampled.completion.logprobs[: len(token_ids)]
                if compared is not None:
                    _check_sampling(sampled.sampling, compared, number, expected)
            elif compared is None:
                continue
            else:
                own = await self._scored(before, token_ids, compared, number, expected)
            self._compare(logprobs, own, begin, number, expected)
        return PlayedRow(row, version)

    async def _scored(
        self,
        before: list[int],
        token_ids: list[int],
        sampling: Sampling,
        number: int,
        expected: Expected,
    ) -> list[float]:
        """The engine's log-probs of tokens that it did not sample in this call, after these."""
        if sampling.temperature != 1 or not sampling.is_plain:
            raise expected.row_error(
                number,
                f"the {len(token_ids)} tokens after the first {len(before)} were not sampled so in "
                "this call, and their log-probs can be checked at temperature 1 without cuts or "
                "penalties alone; return what the engine answered, after the tokens that it was "
                "sent",
            )
        return (await self._policy.score([ScoringRequest(before, token_ids)]))[0]

    def _compare(
        self,
        logprobs: Sequence[float],
        own: Sequence[float],
        begin: int,
        number: int,
        expected: Expected,
    ) -> None:
        most = MAX_LOGPROB_ERROR[self._run.learner.dtype]
        for place, (returned, right) in enumerate(zip(logprobs, own, strict=True)):
            if abs(returned - right) > most:
                raise expected.row_error(
                    number,
                    f"expected log-prob {right:.4f} of completion token {begin + place}, as the "
                    f"engine says after the tokens before it, got {returned:.4f}; return the "
                    "engine's log-probs, and in prompt_ids and completion_ids the tokens that it "
                    "saw, env_mask 0 where it did not sample them",
                )


def _check_sampling(used: Sampling, wanted: Sampling, number: int, expected: Expected) -> None:
    """Refuse what was sampled from another distribution than the learner compares with."""
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        value, right = getattr(used, name), getattr(wanted, name)
        if value != right:
            raise expected.row_error(
                number,
                f"was sampled with {name} = {value:g}, and the run trains on {name} = {right:g}; "
                f"send args.{name}, or set it in the configuration",
            )
