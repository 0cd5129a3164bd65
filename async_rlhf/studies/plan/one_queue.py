"""One queue over batches: every place for a completion takes the next one when its own has ended."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from async_rlhf.studies.plan.config import WorkloadConfig
from async_rlhf.studies.plan.simulate import Work

_HALVINGS = 60
_COMPLETIONS = 512


def one_queue(work: Work, workload: WorkloadConfig, sigma: float, seed: int, load: float = 0.0) -> Work:
    """The same work, where each completion is a request and each place samples like a generator.

    A step of decoding takes as long as where completions are decoded in groups, of one place each, until the longest
    of the group has ended: so the seconds that a batch takes there say what a step takes.

    Args:
        work: decoded in groups.
        workload: prompts, completions, their lengths, and places of each generator.
        sigma: of the lengths; see :func:`lengths`.
        seed: of the lengths.
        load: of a batch's seconds of each generator, those in which it loads weights: all its places wait.
    """
    assert workload.prompts is not None
    assert workload.samples_per_prompt is not None
    assert workload.response_length is not None
    rows, batches, generators = workload.prompts * workload.samples_per_prompt, len(work.learn), len(work.speeds)
    places = min(workload.places or rows, -(-rows // generators))
    part = max(1, min(rows // _COMPLETIONS, places))  # of many that are alike, one in so many is enough
    rows, places = rows // part, places // part
    mean = workload.response_tokens or workload.response_length
    lengths_BR = lengths(np.random.default_rng(seed), (batches, rows), mean, sigma, workload.response_length)
    groups = np.array_split(lengths_BR, -(-rows // places), axis=1)
    steps = sum(group_BR.max(axis=1).mean() for group_BR in groups) / generators
    token = (np.sum(work.generate, axis=1).mean() / generators - load) / steps
    seconds_BR = lengths_BR * (token + load * generators * places / lengths_BR.sum(axis=1).mean())
    speeds = [speed for speed in work.speeds for _ in range(places)]
    return replace(work, generate=seconds_BR.tolist(), speeds=speeds, unstaged=0.0)


def lengths(
    rng: np.random.Generator, shape: tuple[int, int], mean: float, sigma: float, longest: int
) -> NDArray[np.float64]:
    """Lengths of completions: lognormal, cut off at the longest, with this mean after that.

    Args:
        rng: draws them.
        shape: batches and completions of each.
        mean: at most the longest.
        sigma: standard deviation of the logarithm before the cut.
        longest: where they are cut off.
    """
    drawn = np.exp(sigma * rng.standard_normal(shape))
    low, high = 0.0, longest / drawn.min()
    for _ in range(_HALVINGS):  # the median that has this mean
        median = (low + high) / 2
        low, high = (low, median) if np.minimum(drawn * median, longest).mean() > mean else (median, high)
    lengths_BR: NDArray[np.float64] = np.minimum(drawn * high, longest)
    return lengths_BR
