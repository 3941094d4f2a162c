"""The runner of TRL's rollout functions, which plays several groups in one call.

    seeds --environment, first result--> prompts, columns
    prompts --one call in a thread--> rows --read_rows--> checked against the engine --> episodes

The environment provides the prompt of each group; the rollout function does everything else. The
prompt is the `prompt` in the info of the first result, in text or messages like the row of a data
set. Without one, it is the messages that the environment shows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from ludus.env import Message, StepResult
from ludus.proto.errors import RolloutFunctionError, UserError
from ludus.proto.runs import TranscriptTurn
from ludus.trainer.compat.trl.rollout.arguments import (
    RolloutTrainer,
    RolloutTrainerState,
    make_arguments,
)
from ludus.trainer.compat.trl.rollout.completion_service import (
    CompletionService,
    GeneratePort,
    RolloutCall,
)
from ludus.trainer.compat.trl.rollout.contract import (
    MAX_LOGPROB_ERROR,
    RolloutRow,
    RolloutSignature,
    RowCheck,
    RowRules,
    find_signature,
    read_rows,
)
from ludus.trainer.compat.trl.tools import ToolRollout
from ludus.trainer.core.functions import import_callable
from ludus.trainer.core.types import Rollout, RolloutStatus, Sampling, TokenSequence, TurnSpan
from ludus.trainer.data.failures import describe_error
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.adapters.environment_adapter import make_renderer
from ludus.trainer.rollout.episode import (
    close_session,
    collect_result_fields,
    make_void_rollout,
    retry_while_full,
)
from ludus.trainer.rollout.overlong import judge_length
from ludus.trainer.rollout.rewards.scoring import PlayedEpisode
from ludus.trainer.rollout.runner import EpisodeStart, RunnerComponents
from ludus.trainer.rollout.transcript import make_transcript_turn

_NUM_THREADS = 8
_PROMPT = "prompt"
"""Key of the prompt in the info of the first result."""


@dataclass(frozen=True, slots=True)
class ScriptRollout:
    """A rollout function of a script, with the `args` that it must receive."""

    function: Callable[..., Any]
    args: Any

    @property
    def __name__(self) -> str:
        """Name of the function in logs and configurations."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    def __call__(self, *arguments: Any, **keyword_arguments: Any) -> Any:
        """Call the function."""
        return self.function(*arguments, **keyword_arguments)


@dataclass(frozen=True, slots=True)
class RolloutPrompt:
    """The prompt of a group."""

    prompt: str | list[Message]
    columns: Mapping[str, Any]
    """Other columns of the prompt's row."""


class BatchFunctionRunner:
    """Plays all groups of a worker's call with one call of a rollout function."""

    plays_groups_together = True

    def __init__(
        self, components: RunnerComponents, completions: CompletionService, port: int | None
    ) -> None:
        """Import the rollout function; `port` None means that POST /generate/ is not served."""
        assert components.config.rollout_function is not None
        path = components.config.rollout_function
        imported_function = import_callable(path, "environment.rollout")
        script = imported_function if isinstance(imported_function, ScriptRollout) else None
        self._path = path
        self._function = script.function if script else imported_function
        self._script_args = script.args if script else None
        self._signature = find_signature(self._function, path)
        self._run = components.run
        self._environment = components.environment
        self._limits = components.limits
        self._client = components.client
        self._renderer = make_renderer(components.config, components.environment)
        self._chat = components.chat
        self._engine = components.engine
        self._completions = completions
        self._port = port
        # Functions that never return must not block the threads of other components.
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="rollout")
        # Rollout functions expect one caller at a time: many share one client among their calls.
        self._lock = asyncio.Lock()

    @classmethod
    async def start(cls, components: RunnerComponents) -> BatchFunctionRunner:
        """Return the runner of an environment, and open its port if the run has one."""
        rollout = components.run.rollout
        completions = CompletionService(
            components.engine,
            components.chat,
            rollout.max_tokens,
            components.run.seed,
            components.worker_index,
        )
        if rollout.generate_port is None:
            return cls(components, completions, None)
        server = GeneratePort(completions, rollout.generate_port)
        await server.start()
        components.stack.push_async_callback(server.stop)
        return cls(components, completions, server.port)

    async def play_episodes(
        self, starts: Sequence[EpisodeStart], sampling: Sampling, *, is_evaluation: bool
    ) -> list[PlayedEpisode]:
        """Play the episodes of all groups. If the function fails, all of its episodes fail."""
        groups = [list(group) for _, group in groupby(starts, key=lambda start: start.group_index)]
        prompts = await asyncio.gather(*(self._open_prompt(group[0].seed) for group in groups))
        opened_prompts = [
            (prompt, group)
            for prompt, group in zip(prompts, groups, strict=True)
            if isinstance(prompt, RolloutPrompt)
        ]
        rows: Iterator[RolloutRow] = iter(())
        try:
            if opened_prompts:
                rows = iter(
                    await self._play_prompts(opened_prompts, sampling, is_evaluation=is_evaluation)
                )
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - the run's custom code
            prompts = [error if isinstance(prompt, RolloutPrompt) else prompt for prompt in prompts]
        return [
            self._make_episode(start.seed, prompt, next(rows))
            if isinstance(prompt, RolloutPrompt)
            else PlayedEpisode(make_void_rollout(self._environment, start.seed, prompt))
            for prompt, group in zip(prompts, groups, strict=True)
            for start in group
        ]

    async def _open_prompt(self, seed: int) -> RolloutPrompt | Exception:
        """Return the prompt of a seed, or the error that the environment raised."""
        try:
            session, result = await retry_while_full(lambda: self._client.open(seed=seed))
            try:
                return self._read_prompt(result)
            finally:
                await close_session(session)
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - third-party code runs here
            return error

    def _read_prompt(self, first_result: StepResult) -> RolloutPrompt:
        columns = collect_result_fields(first_result)
        prompt = columns.pop(_PROMPT, None)
        if not isinstance(prompt, str):
            prompt = self._renderer.render_messages(first_result, is_first=True)
        return RolloutPrompt(prompt, columns)

    async def _play_prompts(
        self,
        opened_prompts: Sequence[tuple[RolloutPrompt, Sequence[EpisodeStart]]],
        sampling: Sampling,
        *,
        is_evaluation: bool,
    ) -> list[RolloutRow]:
        """Call the function and return its checked rows, prompt by prompt."""
        prompts = [prompt for prompt, _ in opened_prompts]
        num_generations = len(opened_prompts[0][1])
        vocab_size, max_tokens = len(self._chat.tokenizer), self._limits.max_tokens
        rules = RowRules(self._path, len(prompts), num_generations, vocab_size, max_tokens)
        sampling = replace(sampling, max_tokens=self._limits.max_completion_tokens)
        keys = [start.key for _, group in opened_prompts for start in group]
        async with self._lock:
            with self._completions.open_call(keys) as call:
                function = self._bind_arguments(
                    call, prompts, num_generations, sampling, is_evaluation
                )
                output = await self._call_in_time(function)
                rows = await asyncio.to_thread(read_rows, output, rules)
                check = RowCheck(
                    self._engine,
                    call,
                    None if is_evaluation else sampling,
                    MAX_LOGPROB_ERROR[self._run.learner.dtype],
                    rules,
                )
                return [await check.run(index, row) for index, row in enumerate(rows)]

    async def _call_in_time(self, function: Callable[[], Any]) -> Any:
        timeout_s = self._limits.group_timeout_s
        try:
            async with asyncio.timeout(timeout_s) as timeout:
                return await asyncio.get_running_loop().run_in_executor(self._threads, function)
        except (UserError, RolloutFunctionError):
            raise
        except (Exception, SystemExit) as error:  # the run's custom code
            if isinstance(error, TimeoutError) and timeout.expired():
                raise RolloutFunctionError(
                    f"rollout function '{self._path}' did not return within "
                    f"rollout.group_timeout_s = {timeout_s:g} s; make it faster or raise the limit"
                ) from None
            raise RolloutFunctionError(
                f"rollout function '{self._path}' raised {describe_error(error)}"
            ) from error

    def _bind_arguments(
        self,
        call: RolloutCall,
        prompts: Sequence[RolloutPrompt],
        num_generations: int,
        sampling: Sampling,
        is_evaluation: bool,
    ) -> Callable[[], Any]:
        """Bind the function to the arguments of its signature."""
        args = make_arguments(self._script_args, self._run, sampling, num_generations, self._port)
        tokenizer = self._chat.tokenizer
        if self._signature.repeats_prompts:
            repeated_prompts = [prompt for prompt in prompts for _ in range(num_generations)]
            trainer = RolloutTrainer(
                args,
                tokenizer,
                RolloutTrainerState(self._engine.version, is_evaluation),
                [prompt.columns for prompt in repeated_prompts],
                *(sampling, self._completions, call, asyncio.get_running_loop()),
            )
            texts = [prompt.prompt for prompt in repeated_prompts]
            return partial(self._function, texts, trainer=trainer)
        has_images = self._signature is RolloutSignature.ONCE_WITH_IMAGES
        images = {"images": None} if has_images else {}
        texts = [
            prompt.prompt
            if isinstance(prompt.prompt, str)
            else self._chat.render_prompt(prompt.prompt)
            for prompt in prompts
        ]
        return partial(self._function, texts, args=args, processing_class=tokenizer, **images)

    def _make_episode(self, seed: int, prompt: RolloutPrompt, row: RolloutRow) -> PlayedEpisode:
        text = self._chat.decode(row.completion_ids)
        is_finished = row.completion_ids[-1] in self._chat.end_token_ids
        rollout = Rollout(
            environment=self._environment,
            seed=seed,
            sequences=(_make_sequence(row),),
            reward=None,
            episode_return=None,
            terms=(),
            status=RolloutStatus.TERMINATED if is_finished else RolloutStatus.TRUNCATED,
            policy_version=row.policy_version,
            num_tool_calls=_read_count(row.fields, "num_tool_calls"),
            num_tool_calls_failed=_read_count(row.fields, "num_tool_calls_failed"),
        )
        rollout = judge_length(
            rollout,
            self._limits,
            num_tokens=max(end - start for start, end in row.sampled_spans),
            is_overlong=not is_finished,
        )
        has_text = isinstance(prompt.prompt, str)
        fields = {**prompt.columns, **row.fields}
        release = None
        if isinstance(self._function, ToolRollout):
            release = partial(self._function.release_row, fields)
        return PlayedEpisode(
            rollout,
            prompt=prompt.prompt,
            completion=text if has_text else [{"role": "assistant", "content": text}],
            completion_ids=row.completion_ids,
            fields=fields,
            history=_make_transcript_turns(self._chat, prompt.prompt, row),
            release=release,
        )


def _make_transcript_turns(
    chat: ChatTokenizer, prompt: str | list[Message], row: RolloutRow
) -> Iterator[TranscriptTurn]:
    """Yield the turns of a row; the reward of a single turn is unknown, so it is 0."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    messages, last_end = list(prompt), 0
    for start, end in row.sampled_spans:
        if start > last_end:
            added_ids = row.completion_ids[last_end:start]
            text = chat.tokenizer.decode(added_ids, skip_special_tokens=True)
            messages = [*messages, {"role": "environment", "content": text}]
        completion = chat.decode(row.completion_ids[start:end])
        yield make_transcript_turn(messages, completion, None, 0.0)
        messages, last_end = [], end


def _read_count(fields: Mapping[str, Any], name: str) -> int:
    """Return a count that the rollout function reports, or 0 if it reports no count."""
    value = fields.get(name, 0)
    return value if isinstance(value, int) else 0


def _make_sequence(row: RolloutRow) -> TokenSequence:
    """Return the row as a token sequence, in which each run of sampled tokens is a turn."""
    num_prompt_tokens = len(row.prompt_ids)
    logprobs = np.zeros(num_prompt_tokens + len(row.completion_ids), dtype=np.float32)
    logprobs[num_prompt_tokens:] = np.where(row.is_sampled, row.logprobs, 0.0)
    turns = tuple(
        TurnSpan(num_prompt_tokens + start, num_prompt_tokens + end, 0.0)
        for start, end in row.sampled_spans
    )
    token_ids = np.array([*row.prompt_ids, *row.completion_ids], dtype=np.int32)
    return TokenSequence(token_ids, logprobs, turns)
