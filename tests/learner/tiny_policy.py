"""Tiny models, batches and learners for the learner tests."""

from __future__ import annotations

import random
from pathlib import Path

from ludus.proto.config import (
    AlgorithmConfig,
    GrpoConfig,
    LanguageModelRun,
    LearnerConfig,
    LoraConfig,
    TinyModel,
)
from ludus.trainer.core.types import Batch, TrainingSample
from ludus.trainer.data.batch import collate
from ludus.trainer.learner.learner import Learner
from ludus.trainer.models.tiny import make_model, make_tokenizer, save

TEXTS = ["hard 16 vs 10", "HIT", "STAND", "soft 18 vs A"]


def make_policy_folder(folder: Path, *, tie_embeddings: bool = False, num_layers: int = 2) -> str:
    """Create a folder with a random tiny model and its tokenizer."""
    config = TinyModel(
        num_layers=num_layers,
        width=64,
        num_heads=2,
        intermediate=64,
        initializer_range=0.02,
        embedding_range=0.02,
        warm_start_layers="all",
        tie_embeddings=tie_embeddings,
    )
    tokenizer = make_tokenizer(TEXTS * 10, config.vocab_size)
    save(make_model(config, tokenizer, seed=0), tokenizer, folder)
    return str(folder)


def make_samples(
    num_samples: int, seed: int = 0, num_prefix_tokens: int = 0
) -> list[TrainingSample]:
    """Return samples of different lengths and rewards, some of them with the same tokens.

    Each group of six samples starts with the same `num_prefix_tokens` tokens.
    """
    generator = random.Random(seed)
    prefix: list[int] = []
    samples: list[TrainingSample] = []
    for index in range(num_samples):
        if index % 6 == 0:
            prefix = [generator.randrange(3, 250) for _ in range(num_prefix_tokens)]
        if index % 3 == 2:  # the same tokens with a different advantage
            previous_sample = samples[-1]
            token_ids, mask = previous_sample.token_ids, previous_sample.loss_mask
        else:
            num_turns = generator.randint(1, 3)
            token_ids = prefix + [generator.randrange(3, 250) for _ in range(7 * num_turns)]
            mask = [False] * num_prefix_tokens
            mask += [position % 7 in (4, 5) for position in range(7 * num_turns)]
        logprobs = [-generator.uniform(4.5, 6.5) if is_sampled else 0.0 for is_sampled in mask]
        reward = generator.uniform(-1, 1)
        samples.append(
            TrainingSample(
                token_ids,
                mask,
                logprobs,
                advantages=[reward * is_sampled for is_sampled in mask],
                rewards=_place_reward_at_end(reward, mask),
                terminated=index % 5 != 0,
            )
        )
    return samples


def _place_reward_at_end(reward: float, mask: list[bool]) -> list[float]:
    last_position = max(position for position, is_sampled in enumerate(mask) if is_sampled)
    return [reward * (position == last_position) for position in range(len(mask))]


def make_batch(num_samples: int = 24, seed: int = 0, num_prefix_tokens: int = 0) -> Batch:
    """Collate the samples of `make_samples` into a batch."""
    return collate(make_samples(num_samples, seed, num_prefix_tokens))


def make_learner(
    model_path: str,
    algorithm: AlgorithmConfig | None = None,
    lora: LoraConfig | None = None,
    **config: object,
) -> Learner:
    """Build the learner of this rank; `config` sets fields of LearnerConfig."""
    fields = {"learning_rate": 1e-2, "max_tokens_per_micro_batch": 4096, **config}
    run = LanguageModelRun()
    settings = {
        "learner": LearnerConfig.model_validate(fields),
        "algorithm": algorithm or GrpoConfig(geometric_mask=None),
        "rollout": run.rollout.model_copy(update={"temperature": 1.0, "max_tokens": 64}),
        "seed": 0,
        "model": run.model.model_copy(update={"lora": lora}),
    }
    return Learner(run.model_copy(update=settings), model_path)
