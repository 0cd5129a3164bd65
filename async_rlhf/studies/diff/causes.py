"""What differs between two runs before they begin, and which of it explains where they part."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, NamedTuple, cast

from async_rlhf.config import ConfigError
from async_rlhf.config.base import Checked, hints_of
from async_rlhf.run.config import RunConfig
from async_rlhf.studies.diff.reading import UPDATE, ReadRun

_ROUNDING = frozenset(("tokens", "logprobs", "episodes", "reward", "scores", "learner", "credit", UPDATE, "weights"))
_LEARNING = frozenset(("learner", "credit", UPDATE, "weights"))
_KEYS: dict[str, frozenset[str]] = {
    r"train\.seed": frozenset(("prompts", "tokens")),
    r"train\.staleness": frozenset(("versions",)),
    r"train\.reward_weights|train\.reward_model_weight|train\..*penalty.*|train\.missing.*": frozenset(("scores",)),
    r"reward_(funcs|model)": frozenset(("reward", "scores")),
    r"callbacks": frozenset(("random", "weights", UPDATE)),
    r"environment|agent": frozenset(("episodes",)),
    r"tools": frozenset(("prompts", "episodes")),
    r"tokenizer|train\.chat\..*|train\.max_prompt_length": frozenset(("prompts",)),
    r"data\..*": frozenset(("prompts", "reward", "episodes")),
    r"model": frozenset(("weights", "tokens", "learner", "logprobs", "prompts")),
    r"ref_model|train\.kl\..*": frozenset(("learner", "credit", UPDATE)),
    r"train\.generation\.(temperature|top_.|min_p|response_length|episode_length|stop.*|max_turns|min_.*)": frozenset(
        ("tokens", "logprobs", "episodes")
    ),
    r"train\.(batches|total_episodes|num_train_epochs)": frozenset((UPDATE, "prompts")),
    r"train\.(completions_per_batch|samples_per_prompt|per_device_.*|gradient_.*|num_mini_batches)": frozenset(
        ("prompts", "tokens", "versions", "credit", UPDATE)
    ),
    r"train\.(generation|parallel)\..*|train\.(num_threads|device|bf16|.*_device|max_tokens_per_pass)": _ROUNDING,
    r"train\..*": _LEARNING,
}
"""By a key's name, of which parts of a batch it decides something itself."""
_INPUTS: dict[str, frozenset[str]] = {
    "train_dataset": frozenset(("prompts", "reward", "episodes", "scores")),
    "tokenizer": frozenset(("prompts", "tokens")),
    "ref_model": frozenset(("learner", "weights", "tokens", "logprobs")),
    "reward_model": frozenset(("reward",)),
    "environment": frozenset(("episodes",)),
    "code": frozenset(("reward", "episodes", "credit", UPDATE, "random", "tokens")),
}
_MACHINE = ("packages", "python", "system", "processor", "arithmetic", "threads", "device", "ranks")

_NO_ORDER = "kernels add in no fixed order (on a GPU, set train.deterministic)"
_ANOTHER_WAY = (
    f"although all that it was computed from is equal: a callback or an optimiser changed something, or {_NO_ORDER}"
)
_NOT_DELIVERED = "which were not delivered, or were changed on the way; or its arithmetic differs from run to run"
_ASKS = "it draws without its seed, or asks a clock, a network or a model"
UNEXPLAINED = {
    "weights": f"the update before it went another way, {_ANOTHER_WAY}",
    "prompts": "the data are others than they were, or the prompts were written by another template",
    "versions": "other versions of the weights sampled the batch: with weights in flight, timing decides that",
    "tokens": f"an engine sampled with other weights than those that were published, {_NOT_DELIVERED}",
    "logprobs": f"an engine computed with other weights than those that were published, {_NOT_DELIVERED}",
    "episodes": f"the environment, a tool or an agent answered the same words in another way: {_ASKS}",
    "reward": f"the reward function returned another number for the same completion: {_ASKS}",
    "scores": "what rewards are added up to differs, although each is equal",
    "learner": "the learner computed other log-probabilities for the same tokens with the same weights: a model that "
    f"is not trained is another one, or {_NO_ORDER}",
    "credit": "credit was assigned in another way: an algorithm of one's own draws, or keeps something from before",
    "random": "something drew random numbers that belong to the whole process: a callback, most often",
    UPDATE: f"the update went another way, {_ANOTHER_WAY}",
}
"""By the part that differs first: what is left where nothing that the runs were given explains it."""
_COPY = (
    "the weights that were published for it are not the policy's, which computes the same for the same tokens: their "
    "copy was damaged, or not written"
)
_RATE = "the learning rate is another from here on: a callback changed it, or the run went on with another one"


class Difference(NamedTuple):
    """Of what two runs were given."""

    kind: str
    """Role of a key, "input" or "machine"."""
    name: str
    values: tuple[Any, Any]
    touches: frozenset[str]
    """Parts of a batch that it can change first."""

    @property
    def text(self) -> str:
        """In words."""
        if self.kind == "input":
            return self.name
        return f"{self.name} is {self.values[0]!r:.80} in the first and {self.values[1]!r:.80} in the second"


def differences(a: ReadRun, b: ReadRun) -> list[Difference]:
    """All that differs between what two runs were given: keys, inputs, machine."""
    return [*_of_keys(a, b), *_of_inputs(a, b), *_of_machines(a, b)]


def _of_keys(a: ReadRun, b: ReadRun) -> Iterator[Difference]:
    for name in sorted(a.config.keys() | b.config.keys()):
        values = a.config.get(name), b.config.get(name)
        if values[0] != values[1]:
            touches = next((parts for key, parts in _KEYS.items() if re.fullmatch(key, name)), frozenset[str]())
            known = _known(str(a.config.get("algorithm")), name)
            role = known.get("role", "result")
            counts = role in ("result", "speed") or "must_stay" in known
            yield Difference(role, name, values, touches if counts else frozenset())


def _known(algorithm: str, name: str) -> Mapping[str, Any]:
    """What is said of a key; nothing of one of a class that is not here."""
    try:
        kind: Any = RunConfig.of(algorithm)
    except ConfigError:  # an algorithm of the user's own
        return {}
    known: Mapping[str, Any] = {}
    for part in name.split("."):
        if not (isinstance(kind, type) and issubclass(kind, Checked) and part in hints_of(kind)):
            break
        known = {item.name: item.metadata for item in fields(cast(Any, kind))}[part]
        kind = hints_of(kind)[part]
    return known


def _of_inputs(a: ReadRun, b: ReadRun) -> Iterator[Difference]:
    for name in sorted(a.inputs.keys() & b.inputs.keys()):
        if a.inputs[name] != b.inputs[name]:
            touches = _INPUTS.get("code" if name.startswith("code") else name, _ROUNDING)
            yield Difference("input", name, (a.inputs[name], b.inputs[name]), touches)
    tensors: list[Mapping[str, str]] = [
        next((row["tensors"] for row in run.digests.values() if "tensors" in row), {}) for run in (a, b)
    ]
    shared = [name for name in tensors[0] if name in tensors[1]]
    if names := [name for name in shared if tensors[0][name] != tensors[1][name]]:
        more = f" and {len(names) - 1} of its {len(shared)} other tensors" if len(names) > 1 else ""
        text = f"the starting model: {names[0]}{more}"
        yield Difference("input", text, (tensors[0][names[0]], tensors[1][names[0]]), frozenset(("weights",)))


def _of_machines(a: ReadRun, b: ReadRun) -> Iterator[Difference]:
    ours, theirs = ({name: run.first.get(name) for name in _MACHINE} for run in (a, b))
    ours["commit of async_rlhf"], theirs["commit of async_rlhf"] = a.code.get("commit"), b.code.get("commit")
    for name, value in ours.items():
        if isinstance(value, Mapping) and isinstance(other := theirs[name], Mapping):
            for each in sorted(value.keys() | other.keys()):
                if value.get(each) != other.get(each):
                    yield Difference("machine", f"{name}.{each}", (value.get(each), other.get(each)), _ROUNDING)
        elif value != theirs[name] and value is not None and theirs[name] is not None:
            touches = frozenset[str]() if name == "system" else _ROUNDING
            yield Difference("machine", name, (value, theirs[name]), touches)


def most_likely(found: list[Difference], part: str, changed: list[str], equal: set[str]) -> str:
    """The most likely cause, in one sentence.

    Args:
        found: all that differs.
        part: of the batch, what differs first.
        changed: names of the metrics that differ, if that is them.
        equal: the parts of the batch that do not differ.
    """
    if part == "weights" and {"tokens", "learner"} <= equal:
        return _COPY
    family = part.partition("/")[0]
    fitting = [each for each in found if family in each.touches]
    fitting.sort(key=lambda each: (each.kind == "machine", len(each.touches)))
    if not fitting:
        return _RATE if part == UPDATE and "lr" in changed else UNEXPLAINED[family]
    best = [each for each in fitting if each.touches == fitting[0].touches and each.kind == fitting[0].kind]
    return "; ".join(each.text for each in best[:3]) + (f"; and {len(best) - 3} more" if len(best) > 3 else "")
