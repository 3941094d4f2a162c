"""The same held-back episodes before and after training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ludus.proto.runs import Transcript


@dataclass(frozen=True, slots=True)
class SamplePair:
    """An evaluation episode that was played before and after training."""

    question: str
    """Text of the last message before the first completion."""
    first: Transcript
    latest: Transcript


def pair_samples(samples: Iterable[Transcript]) -> dict[str, list[SamplePair]]:
    """Return the pairs of each environment, with the first and the latest episode of a seed."""
    episodes: dict[tuple[str, int], list[Transcript]] = defaultdict(list)
    for sample in samples:
        if sample.turns:
            episodes[sample.environment, sample.seed].append(sample)
    pairs: dict[str, list[SamplePair]] = defaultdict(list)
    for (environment, _), transcripts in episodes.items():
        first, latest = transcripts[0], transcripts[-1]
        if first.step < latest.step:
            shown = first.turns[0].shown
            pairs[environment].append(SamplePair(shown[-1].text if shown else "", first, latest))
    return dict(pairs)
