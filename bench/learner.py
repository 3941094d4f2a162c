"""Compare the tokens per second of a training step with a bare loop over the same model.

    ludus    Learner.train_step: shared prefixes, logits only at sampled tokens
    bare     torch and transformers: sorted and padded sequences, logits at all tokens, one loss,
             clipped gradient, fused AdamW

Both alternate in one process with one thread, and make one optimizer step on the same batch with
micro-batches of the same number of tokens. Tokens are those of all samples, including prompts.
Times are processor time, so that other processes do not count. One batch has games of blackjack,
four of each deal, as in training. The other batch has random sequences without common prefixes,
where only padding and logits can be saved. Prints one line of JSON.

    python bench/learner.py [tiny] [wide]
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from ludus.env.client import AsyncEnvClient
from ludus.env.serving.subprocess import LocalServer
from ludus.proto.config import (
    GrpoConfig,
    LanguageModelRun,
    LearnerConfig,
    LocalEnvironment,
    TinyModel,
)
from ludus.proto.config import load_run_config as load
from ludus.trainer.core.types import Batch, Coefficients, TrainingSample
from ludus.trainer.data.batch import collate
from ludus.trainer.learner.learner import Learner
from ludus.trainer.learner.warm_start import (
    Conversation,
    Exchange,
    list_conversation_texts,
    tokenize_conversation,
)
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.tiny import make_model, make_tokenizer, save
from ludus.trainer.rollout.adapters.environment_adapter import make_renderer

ROOT = Path(__file__).parents[1]
NUM_DEALS, GAMES_PER_DEAL = 256, 4
NUM_RANDOM = 512
NUM_ROUNDS = 5
STEPS_PER_ROUND = 3
NUM_SESSIONS = 128
LEARNING_RATE = 1e-4
MODELS = {"tiny": {}, "wide": {"width": 256, "num_heads": 4, "num_layers": 4}}
"""Changes to the model of examples/blackjack/tiny.toml, by name."""
NUM_SAMPLES_WIDE = 128


@dataclass(frozen=True)
class Case:
    """A comparison on one batch: seconds per step, one sample per round."""

    model: str
    batch: str
    num_tokens: int
    num_tokens_forwarded: int
    ludus_s: list[float]
    bare_s: list[float]

    def row(self) -> dict[str, object]:
        """Return the case as JSON."""
        return {
            "model": self.model,
            "batch": self.batch,
            "tokens": self.num_tokens,
            "tokens_forwarded": self.num_tokens_forwarded,
            "ludus_tokens_per_s": round(self.num_tokens / statistics.median(self.ludus_s)),
            "bare_tokens_per_s": round(self.num_tokens / statistics.median(self.bare_s)),
            "ratio": round(statistics.median(self.bare_s) / statistics.median(self.ludus_s), 3),
            "ludus_s": self.ludus_s,
            "bare_s": self.bare_s,
        }


class BareLoop:
    """A simple training loop: transformers, padded batches, a policy loss, AdamW."""

    def __init__(self, model_path: str, max_tokens: int, max_grad_norm: float) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        self._model.train()
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True
        )
        self._max_tokens, self._max_grad_norm = max_tokens, max_grad_norm

    def train_step(self, samples: Sequence[TrainingSample]) -> None:
        """Make one optimizer update."""
        num_sampled = sum(sum(sample.loss_mask) for sample in samples)
        for micro_batch in self._split(samples):
            token_ids, advantages = _pad(micro_batch)
            logits = self._model(input_ids=token_ids, use_cache=False).logits[:, :-1]
            logprobs = logits.float().log_softmax(-1)
            chosen = logprobs.gather(-1, token_ids[:, 1:, None]).squeeze(-1)
            (-(chosen * advantages[:, 1:]).sum() / num_sampled).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _split(self, samples: Sequence[TrainingSample]) -> list[list[TrainingSample]]:
        micro_batches: list[list[TrainingSample]] = [[]]
        for sample in sorted(samples, key=lambda s: len(s.token_ids)):
            if (
                micro_batches[-1]
                and (len(micro_batches[-1]) + 1) * len(sample.token_ids) > self._max_tokens
            ):
                micro_batches.append([])
            micro_batches[-1].append(sample)
        return micro_batches


def _pad(samples: Sequence[TrainingSample]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(sample.token_ids) for sample in samples)
    token_ids = np.zeros((len(samples), longest), dtype=np.int64)
    advantages = np.zeros((len(samples), longest), dtype=np.float32)
    for row, sample in enumerate(samples):
        token_ids[row, : len(sample.token_ids)] = sample.token_ids
        advantages[row, : len(sample.token_ids)] = sample.advantages
    return torch.from_numpy(token_ids), torch.from_numpy(advantages)


async def play_games(run: LanguageModelRun) -> list[tuple[Conversation, float]]:
    """Play blackjack with random legal moves, four games of each deal, and return the games."""
    environment = run.environment
    assert isinstance(environment, LocalEnvironment)
    renderer = make_renderer(environment, "game")
    free_sessions = asyncio.Semaphore(NUM_SESSIONS)

    async def play(client: AsyncEnvClient, deal: int, choose: random.Random) -> tuple:
        async with free_sessions:
            session, result = await client.open(seed=deal)
            conversation: Conversation = []
            total = 0.0
            while not result.done:
                assert result.text is not None
                response = choose.choice(result.text.legal_answers)
                messages = renderer.render_messages(result, is_first=not conversation)
                conversation.append(Exchange(messages, response))
                result = await session.step(**renderer.parse_action(response, result))
                total += result.reward or 0.0
            await session.close()
            return conversation, total

    log_file = Path(tempfile.mkdtemp()) / "environment.log"
    server = LocalServer(environment.package, environment.options, NUM_SESSIONS * 2, log_file)
    with server:
        address = (server.addresses or server.start()).grpc
        async with await AsyncEnvClient.connect(address) as client:
            return await asyncio.gather(
                *(
                    play(client, deal, random.Random(deal * GAMES_PER_DEAL + game))
                    for deal in range(NUM_DEALS)
                    for game in range(GAMES_PER_DEAL)
                )
            )


def with_advantage(sample: TrainingSample, advantage: float) -> TrainingSample:
    """Return the sample with this advantage at all sampled tokens."""
    return replace(
        sample,
        advantages=[advantage * sampled for sampled in sample.loss_mask],
        rollout_logprobs=[-0.7 * sampled for sampled in sample.loss_mask],
    )


def make_random_samples(vocab_size: int) -> list[TrainingSample]:
    """Return sequences of 25 to 60 random tokens, of which every fifth counts as sampled."""
    draw = random.Random(0)
    samples = []
    for _ in range(NUM_RANDOM):
        length = draw.randint(25, 60)
        token_ids = [draw.randrange(5, vocab_size) for _ in range(length)]
        mask = [index % 5 == 4 for index in range(length)]
        zeros = [0.0] * length
        sample = TrainingSample(token_ids, mask, zeros, zeros, zeros, terminated=True)
        samples.append(with_advantage(sample, draw.choice((-1.0, 1.0))))
    return samples


def measure(
    model: str, name: str, samples: Sequence[TrainingSample], run: LanguageModelRun, model_path: str
) -> Case:
    """Time both loops in turns after one warm-up step and return the result."""
    config = LearnerConfig(
        learning_rate=LEARNING_RATE,
        max_tokens_per_micro_batch=run.learner.known_max_tokens_per_micro_batch,
    )
    changes = {
        "learner": config,
        "algorithm": GrpoConfig(),
        "rollout": run.rollout.model_copy(update={"temperature": 1.0}),
        "model": run.model.model_copy(update={"lora": None}),
        "seed": 0,
    }
    learner = Learner(run.model_copy(update=changes), model_path)
    bare = BareLoop(
        model_path, run.learner.known_max_tokens_per_micro_batch, run.learner.max_grad_norm
    )
    batch: Batch = collate(samples)
    coefficients = Coefficients(LEARNING_RATE, entropy=0.0, kl=0.0)
    metrics = learner.train_step(batch, coefficients)
    bare.train_step(samples)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(NUM_ROUNDS):
        times[0].append(time_step(lambda: learner.train_step(batch, coefficients)))
        times[1].append(time_step(lambda: bare.train_step(samples)))
    return Case(model, name, metrics.num_tokens_in_batch, metrics.num_tokens_forwarded, *times)


def time_step(step: Callable[[], object]) -> float:
    """Return the processor time of one step, in seconds."""
    started = time.process_time()
    for _ in range(STEPS_PER_ROUND):
        step()
    return round((time.process_time() - started) / STEPS_PER_ROUND, 5)


def main() -> None:
    """Measure and print the results as one line of JSON."""
    torch.set_num_threads(1)
    run = load(ROOT / "examples" / "blackjack" / "tiny.toml", [])
    games = asyncio.run(play_games(run))
    folder = Path(tempfile.mkdtemp())
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=0, world_size=1)
    assert isinstance(run.model, TinyModel)
    tokenizer = make_tokenizer(
        list_conversation_texts([game for game, _ in games]), run.model.vocab_size
    )
    chat = ChatTokenizer(tokenizer)
    played = [with_advantage(tokenize_conversation(chat, game), reward) for game, reward in games]
    batches = {"blackjack": played, "random": make_random_samples(len(tokenizer))}
    rows = []
    for model in sys.argv[1:] or MODELS:
        config = run.model.model_copy(update=MODELS[model])
        path = folder / model
        save(make_model(config, tokenizer, seed=0), tokenizer, path)
        for name, samples in batches.items():
            chosen = samples[:NUM_SAMPLES_WIDE] if model == "wide" else samples
            rows.append(measure(model, name, chosen, run, str(path)).row())
    dist.destroy_process_group()
    sys.stdout.write(json.dumps({"learner_vs_bare_loop": rows}) + "\n")


if __name__ == "__main__":
    main()
