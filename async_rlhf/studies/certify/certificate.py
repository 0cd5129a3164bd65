"""What pairs of runs, synchronous and stale, say together: a decision, its evidence, and what pairing has saved."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from async_rlhf.commands.evaluation.statistics import crossed_mean_interval, variance_saved
from async_rlhf.studies.certify.bets import Known, Question, known_of
from async_rlhf.studies.certify.sequential import Look
from async_rlhf.studies.sweep.results import Results, markdown_row
from async_rlhf.studies.templates import filled


class Pair(NamedTuple):
    """Two runs with one seed, judged on the same prompts."""

    seed: int
    synchronous: float
    """Mean gold reward at staleness 0."""
    stale: float
    differences: tuple[float, ...]
    """Stale minus synchronous, for each prompt."""
    kl_synchronous: float | None
    """To the model that both started from, in nats a completion; None for episodes, which have none."""
    kl_stale: float | None

    @property
    def difference(self) -> float:
        """What staleness adds to the gold reward; below 0 it costs."""
        return fmean(self.differences)


def pair_of(seed: int, synchronous: Results, stale: Results) -> Pair:
    """The pair that two runs make.

    Raises:
        ValueError: they were not judged on equally many prompts.
    """
    both = synchronous["scores"], stale["scores"]
    kls = [results["kl"]["estimate"] if "kl" in results else None for results in (synchronous, stale)]
    return Pair(seed, fmean(both[0]), fmean(both[1]), tuple(b - a for a, b in zip(*both, strict=True)), *kls)


def in_order(arrivals: Iterable[tuple[int, int, Results]], seeds: Sequence[int], staleness: int) -> Iterator[Pair]:
    """Pairs in the order of ``seeds``, whichever run ends first: runs that end early may differ from the others.

    Args:
        arrivals: staleness, seed and results of each run, as it ends.
        seeds: of the pairs.
        staleness: of the stale runs; the others have 0.
    """
    pending: dict[tuple[int, int], Results] = {}
    waiting = list(reversed(seeds))
    for which, seed, results in arrivals:
        pending[which, seed] = results
        while waiting and (0, waiting[-1]) in pending and (staleness, waiting[-1]) in pending:
            next_seed = waiting.pop()
            yield pair_of(next_seed, pending.pop((0, next_seed)), pending.pop((staleness, next_seed)))


def looks(pairs: Iterable[Pair], question: Question) -> Iterator[tuple[Pair, Known]]:
    """Each pair with what is known after it, until the question is decided."""
    differences: list[float] = []
    for pair in pairs:
        differences.append(pair.difference)
        known = known_of(differences, question)
        yield pair, known
        if known.decision != "undecided":
            return


def line_of(pair: Pair, known: Known) -> dict[str, Any]:
    """A line of pairs.jsonl. Evidence is in logs to base 10, and the ends of an unbounded interval are null."""
    return {
        "seed": pair.seed,
        "gold_synchronous": pair.synchronous,
        "gold_stale": pair.stale,
        "difference": pair.difference,
        "standard_error_over_prompts": _standard_error(pair),
        "prompts": len(pair.differences),
        "kl_synchronous": pair.kl_synchronous,
        "kl_stale": pair.kl_stale,
        "mean_difference": known.normal.mean,
        "breakdowns": known.breakdowns,
        **_ends(known.normal),
        **_evidence(known),
        "decision": known.decision,
        "decision_if_normal": known.normal.decision,
    }


def summary_of(history: Sequence[tuple[Pair, Known]], question: Question) -> dict[str, Any]:
    """The certificate: what was decided, on what, and what pairing has saved."""
    pairs, last = [pair for pair, _ in history], history[-1][1]
    saved = variance_saved([pair.synchronous for pair in pairs], [pair.stale for pair in pairs])
    worst = min(pairs, key=lambda pair: pair.difference)
    return {
        "decision": last.decision,
        "decision_if_normal": last.normal.decision,
        "pairs": last.normal.pairs,
        "seeds": [pair.seed for pair in pairs],
        "prompts": len(pairs[0].differences),
        **question._asdict(),
        "breakdowns": last.breakdowns,
        "gold_synchronous": fmean(pair.synchronous for pair in pairs),
        "gold_stale": fmean(pair.stale for pair in pairs),
        "mean_difference": last.normal.mean,
        "interval": {**_ends(last.normal), "coverage": 1 - 2 * question.error},
        "deviation": None if math.isnan(last.normal.deviation) else last.normal.deviation,
        "other_prompts": crossed_mean_interval([pair.differences for pair in pairs])._asdict(),
        **_evidence(last),
        "worst_pair": {"seed": worst.seed, "difference": worst.difference},
        "variance_saved": None if saved is None else saved._asdict(),
        "kl_synchronous": _mean(pair.kl_synchronous for pair in pairs),
        "kl_stale": _mean(pair.kl_stale for pair in pairs),
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def table(history: Sequence[tuple[Pair, Known]], question: Question) -> str:
    """A Markdown table, a row for each pair."""
    titles = ("seed", "S = 0", f"S = {question.staleness}", "difference", "standard error over prompts")
    lines = [markdown_row([*titles, "evidence: non-inferior", "inferior"]), f"|{'---|' * 7}"]
    for pair, known in history:
        golds = (
            f"{pair.synchronous:.4f}",
            f"{pair.stale:.4f}",
            f"{pair.difference:+.4f}",
            f"{_standard_error(pair):.4f}",
        )
        odds = (_odds(log, question.error) for log in (known.log_non_inferior, known.log_inferior))
        lines.append(markdown_row([str(pair.seed), *golds, *odds]))
    return "\n".join(lines)


def progress(pair: Pair, known: Known, question: Question) -> str:
    """One line after a pair."""
    mean, low, high = known.normal.mean, known.normal.low, known.normal.high
    odds = [_odds(log, question.error) for log in (known.log_non_inferior, known.log_inferior)]
    return (
        f"pair {known.normal.pairs} (seed {pair.seed}): gold reward {pair.synchronous:.4f} at S = 0, {pair.stale:.4f} "
        f"at S = {question.staleness}; mean difference {_interval(mean, low, high)}; evidence {odds[0]} non-inferior, "
        f"{odds[1]} inferior, of {1 / question.error:.3g}: "
        f"{known.decision if known.decision != 'undecided' else 'goes on'}"
    )


def verdict_text(summary: Mapping[str, Any]) -> str:
    """The certificate in words."""
    odds = {
        name: _odds(summary[f"log10_evidence_{name}"] * math.log(10), summary["error"])
        for name in ("mean", "rate", "inferior")
    }
    return filled("certify", {**summary, "odds": odds}, **{"with": _interval})


def _standard_error(pair: Pair) -> float:
    """Of the pair's difference, over prompts."""
    return stdev(pair.differences) / math.sqrt(len(pair.differences))


def _odds(log_evidence: float, error: float) -> str:
    """Evidence as a number of sensible length, with as many digits as show on which side of 1 / error it is."""
    power, threshold = log_evidence / math.log(10), -math.log10(error)
    text = ""
    for more in range(12):
        if abs(power) >= 4:
            text, shown = f"10^{power:.{more}f}", round(power, more)
        else:
            value = 10**power
            text = f"{value:.{more}f}" if value >= 10 else f"{value:.{2 + more}g}"
            shown = math.log10(float(text))
        if (shown >= threshold) == (power >= threshold):
            break
    return text


def _interval(estimate: float, low: float | None, high: float | None) -> str:
    bounded = low is not None and high is not None and math.isfinite(low) and math.isfinite(high)
    return f"{estimate:+.4f} " + (f"[{low:+.4f}, {high:+.4f}]" if bounded else "[no bounds yet]")


def _evidence(known: Known) -> dict[str, float]:
    names = ("mean", "rate", "non_inferior", "inferior")
    return {f"log10_evidence_{name}": getattr(known, f"log_{name}") / math.log(10) for name in names}


def _ends(known: Look) -> dict[str, float | None]:
    return {name: end if math.isfinite(end := getattr(known, name)) else None for name in ("low", "high")}
