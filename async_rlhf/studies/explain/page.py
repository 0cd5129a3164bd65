"""The account of an update as a page of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

WIDTH = 110
SHOWN, TOKENS = 20, 10
"""How many completions, or pairs, and tokens are listed."""
_PARTS = {"model": "reward model", "environment": "rewards from the environment"}
_SHARE = 0.1
"""A token is marked if it adds at least this share of what its completion's tokens add in size."""


def page(account: Mapping[str, Any]) -> str:
    """The page, for :func:`~async_rlhf.studies.explain.explanation.explained` and what the command knows of the run."""
    parts = [_head(account), _meaning(account), _completions(account), _tokens(account), _rewards(account)]
    parts += [_lags(account), _later(account)]
    parts += [_before(account)] if account["before"] else []
    parts += [_what_if(account)] if account["what_if"] else []
    return "\n".join(line for part in parts for line in [*part, ""])


def _head(account: Mapping[str, Any]) -> Iterator[str]:
    step, repeated = account["step"], account["repeated"]
    yield f"Batch {account['batch']} of {account['run']} ({account['algorithm']}, staleness {account['staleness']})"
    start = repeated["from"] or "the beginning"
    compared = len(repeated["compared"])
    same = f"the metrics of {compared} equal the run's" if compared else "none of them was logged, to compare with"
    more = f", and {_count(repeated['after'], 'batch', 'batches')} after it" if repeated["after"] else ""
    yield f"repeated: {_count(repeated['batches'], 'batch', 'batches')} from {start}{more}; {same}"
    batches = _count(step["mini_batches"], "mini-batch", "mini-batches")
    cut = f"{_count(step['epochs'], 'epoch')} x {batches}"
    yield f"update:   {_count(step['optimizer_steps'], 'optimiser step')} ({cut}), explained as one"
    size = f"norm {step['norm']:.3g}, {step['relative_norm']:.2g} of the weights' own"
    yield f"          of the {step['of']}: {step['parameters']:,} parameters"
    yield f"step:     {size}; KL {step['kl_per_token']:.3g} nats a token from the policy before"
    kept = step["gradient_kept"]
    clipped = sum(each < 1 for each in kept)
    if clipped:
        most = f"in the hardest case to {min(kept):.0%}"
        yield f"clipping: the gradient's norm was clipped in {_count(clipped, 'step')}, {most}"
    past = step["without_gradient"]
    if past is not None:
        yield f"history:  {past['share']:.0%} of the step is what earlier batches have left in the optimiser: with"
        yield f"          gradients of zero it would have had cosine {_cosine(past['cosine'])} with the step taken"
        if past["implied"] is not None:
            low, high = past["implied"]
            yield f"          (momentum alone makes that {low:.0%} where batches agree in nothing, {high:.0%} where"
            yield "          they are all alike)"
    for number, (name, nats) in enumerate(step["more_likely_by"].items()):
        yield f"{'moves:' if number == 0 else '':9} completions {name}: log-probability {nats:+.3g} nats on average"


def _meaning(account: Mapping[str, Any]) -> Iterator[str]:
    total = account["step"]["contributions"]
    ratio = 100 * total["sum_of_units"] / total["sum_of_sizes"] if total["sum_of_sizes"] else 0.0
    yield "How to read it"
    yield "  contribution   first order: how far the gradient of a completion points along the step. It explains the"
    yield "                 direction. In percent of the sizes of all contributions; negative ones pull against it."
    yield f"                 All together: {ratio:+.1f}%. Tokens add up to completions within"
    yield f"                 {100 * total['tokens_differ_by']:.2g}% (finite differences)."
    yield "  without        what it did: the update was taken again without it, which gives another policy. Change: the"
    yield "                 size of the difference of both steps, in percent of the step. Cosine: of both steps."
    yield "                 KL: from the policy with it to the one without it, in nats a token."
    yield "                 Clipping and the optimiser make the step no sum of completions: Adam divides by the size of"
    yield "                 past gradients, so half the gradient may give nearly the same step."
    yield "                 The other completions keep their credit, and the mean is over what is left."
    yield "  #              the rank: by change of those that were left out, = where it is equal, in the order of the"
    yield "                 batch; then the others, by contribution."
    yield "  moves          how far the step moves a token's log-probability, in nats, to first order."


def _completions(account: Mapping[str, Any]) -> Iterator[str]:
    units = account["completions"]
    what = "pairs" if account["step"]["rows_per_unit"] == 2 else "completions"
    rest = account["not_trained_on"]
    yield f"{what.capitalize()} ({len(units)}; {_count(rest, 'completion')} of the batch not trained on)"
    yield f"  {'#':>3} {'contribution':>12} {'without: change':>15} {'cosine':>7} {'KL':>8} {'weight':>7}  prompt"
    for unit in units[:SHOWN]:
        rank = f"{'=' if unit['tied'] else ''}{unit['rank']}"
        numbers = f"{rank:>3} {unit['percent']:>11.1f}% {_effect(unit['without'])} {unit['weight']:>7.4g}"
        yield f"  {numbers}  {_short(unit['prompt'], 44)}"
        if unit["without"] is not None:
            yield from _rows(unit)
    if len(units) > SHOWN:
        yield f"  ... and {len(units) - SHOWN} more, in the JSON file"


def _rows(unit: Mapping[str, Any]) -> Iterator[str]:
    for row in unit["rows"]:
        parts = ", ".join(f"{name} {value:.3f}" for name, value in row["rewards"].items() if value is not None)
        facts = [f"score {row['score']:.3f}" + (f" ({parts})" if len(row["rewards"]) > 1 else "")]
        facts += [] if row["advantage"] is None else [f"advantage {row['advantage']:+.3f}"]
        facts += [f"lag {row['lag']:g}"] if row["lag"] is not None else []
        facts += ["cut off"] if row["finish_reason"] == "length" else []
        change = row["more_likely_by"]
        facts.append(f"{'more' if change >= 0 else 'less'} likely by {abs(change):.2g} nats than without")
        yield f"      {_named(row)}: {', '.join(facts)}"
        yield from (f"        {line}" for line in _wrapped(_marked(row["tokens"])))


def _named(row: Mapping[str, Any]) -> str:
    """By its number, by which ``what_if`` knows it."""
    return f"completion {row['number']}" + ("" if row["role"] == "completion" else f", {row['role']}")


def _marked(tokens: Sequence[Mapping[str, Any]]) -> str:
    """The completion, with its most influential tokens in marks."""
    whole = sum(abs(token["contribution"]) for token in tokens)
    return "".join(
        f"«{token['text']}»" if whole and abs(token["contribution"]) >= _SHARE * whole else token["text"]
        for token in tokens
    )


def _tokens(account: Mapping[str, Any]) -> Iterator[str]:
    yield "Tokens (those with the largest contributions; « » marks them above from a tenth of their completion on)"
    yield f"  {'contribution':>12} {'log-prob':>9} {'moves':>9} {'lag':>4}  {'of #':>4} {'at':>4}  text"
    for token in account["tokens"][:TOKENS]:
        place = f"{token['completion']:>4} {token['position']:>4}"
        text = f"{_short(token['before'], 40, last=True)} «{_visible(token['text'])}»"
        logprob = f"{token['logprob']:>9.2f} {token['moves']:>+9.2g}"
        yield f"  {token['percent']:>11.1f}% {logprob} {token['lag']:>4}  {place}  {text}"
    yield ""
    yield "Tokens of the vocabulary (all their places in the batch together; how far the step moves them on average)"
    yield f"  {'contribution':>12} {'moves':>9} {'places':>6}  text"
    for token in account["vocabulary"][:TOKENS]:
        text = f"«{_visible(token['text'])}»"
        yield f"  {token['percent']:>11.1f}% {token['moves']:>+9.2g} {token['places']:>6}  {text}"


def _rewards(account: Mapping[str, Any]) -> Iterator[str]:
    yield "Parts of the reward (the batch scored without it, credit and update anew)"
    yield f"  {'without: change':>15} {'cosine':>7} {'KL':>8}  part"
    for part in account["reward_parts"]:
        yield f"  {_effect(part['without'])}  {_PARTS.get(part['part'], part['part'])}"


def _lags(account: Mapping[str, Any]) -> Iterator[str]:
    yield "Lags (batches between the weights that drew a token and those that are updated)"
    effect = f"{'without: change':>15} {'cosine':>7} {'KL':>8}"
    yield f"  {'lag':>3} {'tokens':>7} {'contribution':>12} {'|log ratio|':>11} {effect}"
    for lag in account["lags"]:
        ratio = "-" if lag["mean_abs_log_ratio"] is None else f"{lag['mean_abs_log_ratio']:.2g}"
        start = f"{lag['lag']:>3} {lag['tokens']:>7} {lag['percent']:>11.1f}% {ratio:>11}"
        done = ", ".join(f"{name} {value:.3g}" for name, value in lag["objective"].items())
        yield f"  {start} {_effect(lag['without'])}  {done}".rstrip()
    if len(account["lags"]) == 1:
        yield "  All tokens have this lag: without them there is no update."


def _later(account: Mapping[str, Any]) -> Iterator[str]:
    yield "Later (what this batch's gradient does as momentum: the optimiser's steps without it, others as they were)"
    yield "  Size: of the weights' difference, in percent of this batch's step. Share: the part that would be missing"
    yield "  of how far the weights have moved since before this batch, along that direction."
    yield f"  {'after batch':>11} {'size':>7} {'share':>7}"
    for row in account["later"]:
        yield f"  {row['batch']:>11} {_percent(row['size']):>7} {_percent(row['share']):>7}"
    last = account["later"][-1]
    yield f"  KL after batch {last['batch']}, to the policy without it: {last['kl_per_token']:.2g} nats a token"


def _before(account: Mapping[str, Any]) -> Iterator[str]:
    found = account["before"]
    yield f"Batches (ranked: the {len(found['batches'])} up to this one, each without its gradient, as above)"
    yield "  Share: the part that would be missing of how far all of them have moved the weights, along that direction."
    yield "  A negative one held them back."
    yield f"  KL: from the policy after batch {account['batch']} to the one without, in nats a token."
    yield f"  {'batch':>5} {'share':>7} {'KL':>8}"
    for row in found["batches"]:
        yield f"  {row['batch']:>5} {_percent(row['share']):>7} {row['kl_per_token']:>8.2g}"
    rest = f"{_percent(found['earlier'])} is what earlier batches have left in the optimiser"
    yield f"  They have moved the weights by {found['norm']:.3g} (norm); {rest}."


def _what_if(account: Mapping[str, Any]) -> Iterator[str]:
    found = account["what_if"]
    changes = "; ".join(
        f"completion {each['completion']} scores {_decimal(each['is'])}, not {_decimal(each['was'])}"
        for each in found["changes"]
    )
    yield f"What if {changes}"
    yield "  The run was repeated with it. Each pair of columns: the run as it was, and with it. Change and cosine: of"
    yield "  that batch's update. KL: from the policy as it was to the one with it, in nats a token of this batch."
    both = f"{'was':>8} {'is':>8}"
    yield f"  {'':>5}  {'score':<17}  KL to reference"
    yield f"  {'batch':>5}  {both}  {both} {'others':>9} {'change':>7} {'cosine':>7} {'KL':>8}"
    for row in found["batches"]:
        pairs = "  ".join(f"{_decimal(row[k]['was']):>8} {_decimal(row[k]['is']):>8}" for k in ("score", "kl"))
        others = f"{row['others']}/{row['completions']}"
        change, cosine = _percent(row["update"]["change"]), _cosine(row["update"]["cosine"])
        yield f"  {row['batch']:>5}  {pairs} {others:>9} {change:>7} {cosine:>7} {row['kl_per_token']:>8.2g}"
    first = found["completions_differ_from"]
    yield "  All completions are the same." if first is None else f"  Completions are others from batch {first} on."


def _effect(effect: Mapping[str, Any] | None) -> str:
    if effect is None:
        return f"{'':>15} {'':>7} {'':>8}"
    return f"{_percent(effect['change']):>15} {_cosine(effect['cosine']):>7} {effect['kl_per_token']:>8.2g}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _cosine(cosine: float | None) -> str:
    return "-" if cosine is None else f"{cosine:.3f}"


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _visible(text: str) -> str:
    return text.replace("\n", "\\n").replace("\t", "\\t")


def _short(text: str, width: int, last: bool = False) -> str:
    text = _visible(text)
    if len(text) <= width:
        return text
    return f"...{text[len(text) - width + 3 :]}" if last else f"{text[: width - 3]}..."


def _wrapped(text: str) -> Iterator[str]:
    for line in text.split("\n"):
        for start in range(0, max(len(line), 1), WIDTH - 8):
            yield line[start : start + WIDTH - 8]
