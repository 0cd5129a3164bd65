"""Checks that an engine computes and draws as the learner would, for the same weights.

Two implementations of one model round differently; in low precision that alone makes samples off-policy. The
difference is measured on completions of some batches with the snapshot that sampled them, so the policy's staleness
does not count. The learner's probabilities of these tokens serve two more checks: whether the tokens are those that
the random numbers give, and whether they are distributed as the probabilities say. The latter is
:mod:`async_rlhf.generation.sampling_test`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from async_rlhf.config import GenerationConfig
from async_rlhf.config.engines import find
from async_rlhf.distributed.parallel import ALONE, Parallel
from async_rlhf.generation.protocol import GeneratorError, SamplingParams
from async_rlhf.generation.sampling import auditing_uniforms, places, sample_uniforms, truncated
from async_rlhf.generation.sampling_test import FALSE_ALARMS, LIMIT, SamplingTest, Where
from async_rlhf.models.adapters import adapters_off, has_adapters, is_adapter, names_below_adapters
from async_rlhf.models.forward import evaluating, over_response_logits, response_logprobs
from async_rlhf.models.quantised import as_plain_layers, like_numbers
from async_rlhf.models.rows import sampled_rows
from async_rlhf.types import Group, Prompt, Sample, drawn_versions

ROWS, LENGTH = 4, 16
"""Of the probe: fixed sequences whose log-probabilities in generator and learner must agree. Checksums prove that the
right numbers arrived; the probe proves that the engine computes with them."""
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.3}
"""Limit of the mean absolute difference, in nats per token, whatever noise was measured. Rounding alone stays an order
of magnitude below."""
_LEAST_NOISE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-3}
"""Lower bound of the noise, however well the first batches agree."""
_FAR = 20
"""A token is far off beyond this multiple of the noise: rounding moves few tokens that far."""
_FAR_TOKENS, _FAR_SHARE = 4, 0.05
"""At least this many tokens, and this share of those compared, must be far off to count as more than outliers."""
_ALONE = 1000
"""A single token beyond this multiple of the noise is no rounding either, where rounding cannot make a log-probability
jump. Of 1,280 tokens of random models, flat and peaked, the farthest was off by 23 times the mean difference in float32
and by 36 times in bfloat16."""
_MEMORY = 20
"""The noise is roughly a mean over this many batches."""
_MISDRAWN_SHARE = 1e-4
"""Share of other tokens that is allowed: in a model that routes tokens, rounding may now and then change the route."""


Snapshot = Mapping[str, Tensor | None]
"""The tensors of a version of the weights; empty for the policy's current ones. Ranks but 0 have None for each."""


class Row(NamedTuple):
    """A sample to compare."""

    prompt: Prompt
    number: int
    """Its number among the prompt's K samples."""
    sample: Sample
    prompt_index: int
    """Of the prompt in the batch."""


class Noise:
    """How far two correct computations of the same log-probabilities differ: measured, not assumed.

    The first measurement uses the weights that the run starts with, when nothing can be stale; it may be at most
    ``most``. Later ones must be similar and are averaged with it.

    Args:
        least: lower bound of the noise, in nats per token.
        most: limit of the mean difference, whatever noise was measured.
    """

    def __init__(self, least: float, most: float) -> None:
        self.least, self.most = least, most
        self.level = 0.0
        self._measured = 0

    @property
    def far(self) -> float:
        """A larger difference is not rounding, unless it is an outlier."""
        return _FAR * max(self.level, self.least) if self._measured else math.inf

    def require(self, who: str, differences_N: Tensor, where: str, outliers: bool = True) -> None:
        """Add differences to the measured noise, or raise GeneratorError if they are more than rounding.

        Args:
            who: for the error.
            differences_N: absolute, in nats.
            where: for the error.
            outliers: whether rounding can move a few tokens by any amount.
        """
        mean, far, largest = differences_N.mean().item(), self.far, differences_N.max().item()
        far_off = int((differences_N > far).sum())
        if not mean <= self.most:
            evidence = f"they differ by {mean:.3g} nats per token on {where}, and {self.most:g} is rounding"
        elif far_off >= max(_FAR_TOKENS, _FAR_SHARE * len(differences_N)):
            evidence = (
                f"they differ by {mean:.3g} nats per token on {where}, {far_off} of {len(differences_N)} tokens by "
                f"more than {far:.3g}, and the noise of this run is {self.level:.3g}"
            )
        elif not outliers and largest > _ALONE / _FAR * far:
            evidence = (
                f"one token of {len(differences_N)} on {where} differs by {largest:.3g}, and the noise of this run is "
                f"{self.level:.3g}"
            )
        else:
            self._measured += 1
            level = differences_N.clamp(max=far).mean().item()
            self.level += (level - self.level) / min(self._measured, _MEMORY)
            return
        raise GeneratorError(
            f"{who}, but computes other log-probabilities with them: {evidence} (looked at by "
            "generation.mismatch_samples and generation.probe_steps)"
        )

    def state(self) -> list[float]:
        """The state, for JSON."""
        return [self.level, self._measured]

    def restore(self, state: list[float]) -> None:
        """Restore what :meth:`state` returned."""
        self.level, self._measured = state[0], int(state[1])


FIRST = 4
"""So many batches are always compared, besides those that are sampled before any weights were loaded anew: what is
wrong from the beginning is found at the beginning."""


@dataclass(frozen=True)
class Comparisons:
    """The batches that are compared: the first ones, then every n-th.

    Args:
        steps: n.
        staleness: S.
    """

    steps: int
    staleness: int = 0

    @property
    def first(self) -> int:
        """So many batches are compared in any case."""
        return FIRST + self.staleness

    def has(self, batch: int) -> bool:
        """Whether a batch is compared."""
        return batch <= self.first or batch % self.steps == 0

    def number(self, batch: int) -> int:
        """Which comparison that of a batch is, from 1: consecutive ones look at different completions."""
        later = batch // self.steps - self.first // self.steps
        return batch if batch <= self.first else self.first + later


class Agreement:
    """Compares an engine with the learner, and stops the run if they differ by more than rounding and chance.

    Args:
        config: of generation; ``mismatch_samples`` completions of a batch are compared, every ``mismatch_steps``
            batches.
        params: how the engine samples.
        dtype: of the engine's weights.
        autocast: type that the learner computes in; None for that of its weights.
        parallel: how the learner's weights are sharded over ranks. All ranks measure; rank 0 judges.
        staleness: S.
    """

    def __init__(
        self,
        config: GenerationConfig,
        params: SamplingParams,
        dtype: torch.dtype,
        autocast: torch.dtype | None,
        parallel: Parallel = ALONE,
        staleness: int = 0,
    ) -> None:
        self.config, self.params, self.autocast = config, params, autocast
        self.comparisons = Comparisons(config.mismatch_steps, staleness)
        self.parallel = parallel
        kinds = [dtype, autocast or torch.float32]
        if torch.cuda.is_available() and torch.get_float32_matmul_precision() != "highest":
            kinds.append(torch.float16)  # TF32 has as many digits
        least, most = max(_LEAST_NOISE[kind] for kind in kinds), max(TOLERANCE[kind] for kind in kinds)
        self.noise, self.probe_noise = Noise(least, most), Noise(least, most)
        self.evidence = SamplingTest()
        self._redrawn, self._misdrawn = 0, 0
        self._known: _SnapshotPolicy | None = None
        self._kind = [config.engine, *map(str, kinds)]

    def measure(
        self, batch: int, policy: PreTrainedModel, snapshots: Callable[[int], Snapshot], groups: Sequence[Group]
    ) -> dict[str, float]:
        """Compare some completions of a batch, and judge what was found: :meth:`compare_batch` and :meth:`judge`."""
        return self.judge(batch, self.compare_batch(batch, policy, snapshots, groups), policy, groups)

    def compare_batch(
        self, batch: int, policy: PreTrainedModel, snapshots: Callable[[int], Snapshot], groups: Sequence[Group]
    ) -> Comparison | None:
        """Compare some completions of a batch with what the learner computes for them; None if this one is left out.

        Args:
            batch: its number, which selects the completions to compare; over time every position is selected.
            policy: computes, with the weights of the snapshots.
            snapshots: gives the tensors of a version; empty for the policy's current weights.
            groups: of the batch, from all workers; on rank 0.
        """
        samples = self.config.mismatch_samples
        if samples == 0 or not self.parallel.takes_part or not self.comparisons.has(batch):
            return None
        chosen = _chosen(self.comparisons.number(batch), groups, samples) if self.parallel.ranks.is_main else []
        if self.parallel.is_sharded:  # then all ranks compute
            chosen = self.parallel.ranks.broadcast("completions to compare", lambda: chosen)
        versions = sorted(drawn_versions(row.sample for row in chosen))
        per_version = [self.compare(policy, snapshots(v), v, chosen) for v in versions]
        return Comparison(*(torch.cat(parts) for parts in zip(*per_version, strict=True)))

    def judge(
        self, batch: int, tokens: Comparison | None, policy: PreTrainedModel, groups: Sequence[Group]
    ) -> dict[str, float]:
        """Add a batch to what is known of the engine; batches must come in order.

        Args:
            batch: its number.
            tokens: what :meth:`compare_batch` has returned for it.
            policy: the learner's.
            groups: of the batch, from all workers; on rank 0.

        Returns:
            Mean and maximum of the absolute difference of log-probabilities, in nats per token, KL(engine, learner) per
            token by the k3 estimator, and the evidence of :mod:`~async_rlhf.generation.sampling_test`, which alone is
            there for a batch that is not compared. Empty on ranks other than 0.

        Raises:
            GeneratorError: the difference is more than rounding, or the draws more than chance, can explain.
        """
        if self.config.mismatch_samples == 0 or not self.parallel.takes_part or not self.parallel.ranks.is_main:
            return {}
        if tokens is None:
            return self._require_likely([], groups)
        differences_N = tokens.log_ratios_N.abs()
        far, oldest = self.noise.far, min(drawn_versions(sample for group in groups for sample in group.samples))
        who, outliers = f"the engine has the weights of version {oldest}", _jumps(policy, self.params)
        self.noise.require(who, differences_N, "its completions", outliers)
        metrics = {
            "engine/logprob_difference": differences_N.mean().item(),
            "engine/logprob_difference_max": differences_N.max().item(),
            "engine/kl": (torch.expm1(tokens.log_ratios_N) - tokens.log_ratios_N).mean().item(),
        }
        if "redraw" in find(self.config.engine).supports:
            metrics["engine/redraw_ties"] = self._require_redrawn(tokens, min(far, self.noise.far))
        ranks = [tokens.by_rank_N.tolist(), tokens.by_id_N.tolist()]
        return metrics | self._require_likely(ranks, groups, [Where(*where) for where in tokens.where_N3.tolist()])

    @torch.no_grad()
    def compare(self, policy: PreTrainedModel, snapshot: Snapshot, version: int, rows: Sequence[Row]) -> Comparison:
        """Compare every token that one version drew. If the weights are sharded, all ranks must compute.

        Args:
            policy: computes the learner's probabilities.
            snapshot: of that version.
            version: whose tokens to compare.
            rows: completions, perhaps of several versions.
        """
        params, parallel = self.params, self.parallel
        rows = [row for row in rows if version in row.sample.versions]
        batch = sampled_rows([row.sample for row in rows])
        mask_BT, device = batch["sampled_BT"].bool(), parallel.device_of(policy)
        drawn_N = torch.from_numpy(np.concatenate([s.versions[s.sampled] == version for _, _, s, _ in rows]))
        parallel.barrier("comparing", policy)
        with ExitStack() as stack:
            model: Any = policy
            if snapshot:
                known = self._snapshot_policy(policy)
                if parallel.is_sharded:
                    stack.enter_context(known.holding(snapshot, parallel))
                else:
                    model = known
                    stack.enter_context(known.computing(snapshot))
                if known.is_merged(snapshot):  # adapters that are merged into the snapshot must not count twice
                    stack.enter_context(adapters_off(policy))
                    if not parallel.is_sharded:
                        stack.enter_context(as_plain_layers(policy))
            stack.enter_context(torch.autocast(device.type, self.autocast, enabled=self.autocast is not None))
            tokens_BT = batch["tokens_BT"].to(device)
            tokens_N = tokens_BT[mask_BT.to(device)]

            def reduce(logits_CV: Tensor, part: slice) -> Tensor:
                logits_CV = truncated(logits_CV, params.distribution, tokens_N[part])
                return torch.stack(places(logits_CV, tokens_N[part], params.temperature))

            found_4N = over_response_logits(
                model,
                tokens_BT,
                mask_BT.to(device),
                reduce,
                positions_BT=batch.get("positions_BT"),
                routes_BTLE=batch.get("routes_BTLE"),
            )
        logprobs_N, below_N, likelier_N, as_likely_N = found_4N.cpu().double()
        drawn_by_N, point_N = (
            torch.from_numpy(np.concatenate([f(params.seed, p.draw, number, s.positions) for p, number, s, _ in rows]))
            for f in (sample_uniforms, auditing_uniforms)
        )
        own_N = logprobs_N.exp()
        misses_N = torch.maximum(below_N - drawn_by_N, drawn_by_N - below_N - own_N).clamp(min=0)
        log_ratios_N = logprobs_N - batch["behaviour_logprobs_BT"][mask_BT].double()
        by_rank_N, by_id_N = likelier_N + point_N * as_likely_N, below_N + point_N * own_N
        where_N3 = torch.tensor([Where(index, number, p) for _, number, s, index in rows for p in s.positions.tolist()])
        return Comparison(*(x[drawn_N] for x in (log_ratios_N, misses_N, by_rank_N, by_id_N, where_N3)))

    def _snapshot_policy(self, policy: PreTrainedModel) -> _SnapshotPolicy:
        """Made once: names and types of a policy's tensors stay."""
        if self._known is None or self._known.policy is not policy:
            self._known = _SnapshotPolicy(policy)
        return self._known

    def _require_redrawn(self, tokens: Comparison, far: float) -> float:
        """Require the tokens that the random numbers give. Returns how many differ only by rounding."""
        other_N = tokens.misses_N > 0
        # If rounding moves the log-probability unusually far, it may also move the token's place in the distribution.
        misdrawn_N = tokens.misses_N > (2 * tokens.log_ratios_N.abs()).clamp(min=far)
        self._redrawn += len(other_N)
        self._misdrawn += int(misdrawn_N.sum())
        if self._misdrawn >= 2 and self._misdrawn > _MISDRAWN_SHARE * self._redrawn:
            raise GeneratorError(
                f"the engine draws other tokens than the random numbers of its completions give: {self._misdrawn} of "
                f"{self._redrawn}, the last ones by {tokens.misses_N.max():.3g} of probability, where {far:.3g} is "
                "rounding; its distribution, its random numbers or the order of its completions are not those of the "
                "run (looked at by generation.mismatch_samples)"
            )
        return float((other_N & ~misdrawn_N).sum())

    def _require_likely(
        self, ranks: Sequence[Sequence[float]], groups: Sequence[Group], tokens: Sequence[Where] = ()
    ) -> dict[str, float]:
        """Require tokens that are distributed as their probabilities say. Returns the evidence that they are not."""
        evidence = self.evidence.add(ranks, groups, tokens)
        if evidence >= LIMIT:
            raise GeneratorError(
                "the engine's completions are not distributed as the learner's probabilities say, with the weights "
                f"that sampled them: the evidence is {evidence:.1f}, and chance reaches {LIMIT:.1f} in fewer than "
                f"{FALSE_ALARMS:g} of all runs; look for top-k, top-p, penalties, another temperature, repeated random "
                "numbers (looked at by generation.mismatch_samples)"
            )
        return {"engine/sampling_evidence": evidence}

    def state(self) -> dict[str, Any]:
        """What a successor needs to continue from here, for JSON."""
        return {
            "kind": self._kind,
            "noise": self.noise.state(),
            "probe_noise": self.probe_noise.state(),
            "drawn": [self._redrawn, self._misdrawn],
            "evidence": self.evidence.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned, unless it was measured on another engine or in another precision."""
        if state["kind"] != self._kind:
            return
        self.noise.restore(state["noise"])
        self.probe_noise.restore(state["probe_noise"])
        self._redrawn, self._misdrawn = state["drawn"]
        self.evidence.restore(state["evidence"])


def _jumps(policy: PreTrainedModel, params: SamplingParams) -> bool:
    """Whether rounding can change a log-probability by a jump: if it sends a token to another expert, or across the
    border of a truncated distribution."""
    config = policy.config.get_text_config().to_dict()
    routes = any(value for name, value in config.items() if "expert" in name or "moe" in name)
    return (routes and params.routes is None) or not params.distribution.whole


def _chosen(number: int, groups: Sequence[Group], samples: int) -> list[Row]:
    """The completions of a batch to compare, as this comparison; without the columns of their prompts."""
    flat = [
        Row(group.prompt, k, sample, index)
        for index, group in enumerate(groups)
        for k, sample in enumerate(group.samples)
    ]
    rows = [flat[i] for i in rows_of_batch(number, len(flat), samples)]
    return [row._replace(prompt=replace(row.prompt, columns={})) for row in rows]


def rows_of_batch(number: int, rows: int, samples: int) -> list[int]:
    """The completions of a batch to compare: evenly spread, and different each time until all have been selected.

    Args:
        number: of the comparison.
        rows: completions of the batch.
        samples: to compare.
    """
    if samples >= rows:
        return list(range(rows))
    # Steps of the golden ratio leave no large gap; without a common divisor they reach every row.
    step = next(step for step in range(round(0.618 * rows), rows + 1) if math.gcd(step, rows) == 1)
    return sorted((number * samples + i) * step % rows for i in range(samples))


class Comparison(NamedTuple):
    """Results of the comparison of tokens, (N,) or (N, 3) on the CPU."""

    log_ratios_N: Tensor
    """log learner - log engine."""
    misses_N: Tensor
    """How far the token's random number is outside its interval of the cumulative distribution; 0 within it."""
    by_rank_N: Tensor
    """A random point of the token's interval of the distribution, likelier tokens first: uniform on [0, 1)."""
    by_id_N: Tensor
    """The same with the tokens in the order of their ids."""
    where_N3: Tensor
    """See :class:`~async_rlhf.generation.sampling_test.Where`."""


class _SnapshotPolicy:
    """The policy's computation with a snapshot in place of its own weights, which stay untouched."""

    def __init__(self, policy: PreTrainedModel) -> None:
        self.policy = policy
        self._has_adapters, self._below_adapters = has_adapters(policy), names_below_adapters(policy)
        tensors = chain(policy.named_parameters(), policy.named_buffers())
        self._dtypes = {name: like_numbers(tensor).dtype for name, tensor in tensors}
        self._weights: dict[str, Tensor] = {}

    def is_merged(self, snapshot: Snapshot) -> bool:
        """Whether the policy's adapters are merged into the snapshot."""
        return self._has_adapters and any(not is_adapter(name) for name in snapshot)

    def named(self, snapshot: Snapshot) -> dict[str, Tensor | None]:
        """The snapshot's tensors by their names in the policy."""
        names = self._below_adapters if self.is_merged(snapshot) else {}
        return {names.get(name, name): tensor for name, tensor in snapshot.items()}

    @contextmanager
    def computing(self, snapshot: Snapshot) -> Iterator[None]:
        """Within, a call computes with the snapshot."""
        device, named = self.policy.device, self.named(snapshot)
        self._weights = {n: tensor.to(device, self._dtypes[n]) for n, tensor in named.items() if tensor is not None}
        try:
            yield
        finally:
            self._weights = {}

    @contextmanager
    def holding(self, snapshot: Snapshot, parallel: Parallel) -> Iterator[None]:
        """Within, a policy that is sharded over ranks holds the snapshot; parameters are exchanged one by one."""
        parameters, named = dict(self.policy.named_parameters()), self.named(snapshot)
        undo = [parallel.swap_parameter(parameters[name], named[name]) for name in parameters if name in named]
        try:
            yield
        finally:
            for restore in undo:
                restore()
            parallel.reshard(self.policy)  # the forward pass may have left the snapshot unsharded

    @property
    def config(self) -> Any:
        return self.policy.config

    def get_output_embeddings(self) -> nn.Module:
        return self.policy.get_output_embeddings()

    def __call__(self, **inputs: Any) -> Any:
        return functional_call(self.policy, self._weights, kwargs=inputs)


def probe_tokens(vocabulary: int) -> Tensor:
    """The sequences, (ROWS, LENGTH), drawn once for all from the vocabulary."""
    return torch.randint(vocabulary, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def probe_logprobs(
    model: PreTrainedModel, autocast: torch.dtype | None = None, parallel: Parallel = ALONE
) -> list[float]:
    """Log-probability of each token of :func:`probe_tokens` except the first of each sequence.

    Args:
        model: the policy, wherever it runs.
        autocast: compute in this type.
        parallel: how its weights are sharded over ranks; every rank must compute.
    """
    parallel.barrier("probing", model)
    device = parallel.device_of(model)
    tokens_BT = probe_tokens(model.get_input_embeddings().num_embeddings).to(device)
    mask_BT = torch.ones(ROWS, LENGTH, device=device)
    mask_BT[:, 0] = 0
    with evaluating(model), torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        output = response_logprobs(model, tokens_BT, mask_BT, 1.0, with_entropies=False)
    return output.logprobs_BT[mask_BT.bool()].tolist()


def differences(left: list[float], right: list[float]) -> Tensor:
    """Absolute difference of each token, (N,) float64.

    Raises:
        ValueError: one has more tokens than the other.
    """
    if len(left) != len(right):
        raise ValueError(f"need log-probabilities of as many tokens; got {len(left)} and {len(right)}")
    return (torch.tensor(left, dtype=torch.float64) - torch.tensor(right, dtype=torch.float64)).abs()
