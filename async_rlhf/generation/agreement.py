"""Whether an engine computes what the learner does: the difference of their log-probabilities for the same weights.

Two implementations of one model round differently; in low precision that alone makes samples off-policy. It is
measured on completions of every batch, with the snapshot that sampled them, and so apart from the policy's lag.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from async_rlhf.config import GenerationConfig
from async_rlhf.forward import response_logprobs
from async_rlhf.generation.protocol import GeneratorError
from async_rlhf.lora import adapters_off, has_adapters, is_adapter, names_below_adapters
from async_rlhf.parallel import Parallel, device_of, with_every_rank
from async_rlhf.rows import response_tensors
from async_rlhf.types import RolloutGroup

TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.3}
"""Of the mean absolute difference, in nats per token. Rounding alone stays an order of magnitude below."""


class Agreement:
    """Measures how far engine and learner are apart, and stops the run where it is more than rounding.

    Args:
        config: of generation; ``mismatch_samples`` completions of each batch are looked at.
        dtype: of the engine's weights.
        autocast: type that the learner computes in; None for that of its weights.
    """

    def __init__(self, config: GenerationConfig, dtype: torch.dtype, autocast: torch.dtype | None) -> None:
        self.config = config
        self.autocast = autocast
        self.limit = max(TOLERANCE[dtype], TOLERANCE[autocast or torch.float32])
        if torch.cuda.is_available() and torch.get_float32_matmul_precision() != "highest":
            self.limit = max(self.limit, TOLERANCE[torch.float16])  # TF32 has as many digits

    def measure(
        self,
        policy: PreTrainedModel,
        snapshots: Callable[[int], Mapping[str, Tensor]],
        groups: Sequence[RolloutGroup],
    ) -> dict[str, float]:
        """Compare log-probabilities of some completions, evenly chosen, with the learner's own.

        Args:
            policy: computes them, with the weights of the snapshots.
            snapshots: the tensors of a version; none for the policy as it is.
            groups: of a batch, whoever sampled them.

        Returns:
            Mean and maximum of the absolute difference, in nats per token, and KL(engine, learner) per token by the k3
            estimator.

        Raises:
            GeneratorError: the mean is more than rounding can explain.
        """
        samples = self.config.mismatch_samples
        if samples == 0:
            return {}
        flat = [RolloutGroup(group.prompt, (rollout,)) for group in groups for rollout in group.rollouts]
        chosen = [flat[i * len(flat) // samples] for i in range(samples)] if samples < len(flat) else flat
        versions = sorted({version for group in chosen for version in group.rollouts[0].versions})
        options = (self.config.temperature, self.autocast)
        found = [log_ratios(policy, snapshots(version), version, chosen, *options) for version in versions]
        log_ratios_N = torch.cat(found)
        mean = log_ratios_N.abs().mean().item()
        self.require(f"the engine has the weights of version {versions[0]}", mean, "its completions")
        return {
            "engine/logprob_difference": mean,
            "engine/logprob_difference_max": log_ratios_N.abs().max().item(),
            "engine/kl": (torch.expm1(log_ratios_N) - log_ratios_N).mean().item(),
        }

    def require(self, who: str, difference: float, where: str) -> None:
        """Raise GeneratorError where a mean difference, in nats per token, is more than rounding."""
        if not difference <= self.limit:
            raise GeneratorError(
                f"{who}, but computes other log-probabilities with them: they differ by {difference:.3g} nats per "
                f"token on {where}, and {self.limit:g} is rounding (looked at by generation.mismatch_samples and "
                "generation.probe_steps)"
            )


@torch.no_grad()
def log_ratios(
    policy: PreTrainedModel,
    snapshot: Mapping[str, Tensor | None],
    version: int,
    groups: Sequence[RolloutGroup],
    temperature: float,
    autocast: torch.dtype | None,
) -> Tensor:
    """log learner - log engine of every token that a version has drawn, (N,).

    Args:
        policy: computes the learner's; with weights spread over ranks, all of them compute.
        snapshot: that version's tensors; none for the policy as it is. Ranks but the first give None for each.
        version: of the tokens.
        groups: one completion each.
        temperature: of sampling.
        autocast: type that the learner computes in; None for that of its weights.
    """
    groups = [group for group in groups if version in group.rollouts[0].versions]
    rows, device = response_tensors(groups), device_of(policy)
    mask_BT = rows["response_mask_BT"]
    drawn_BT = torch.zeros_like(mask_BT)
    drawn_BT[mask_BT.bool()] = torch.tensor(
        [float(v == version) for group in groups for v in group.rollouts[0].versions]
    )
    # The columns of prompts stay on rank 0: they may be large, and only rewards need them.
    stripped = [replace(group, prompt=replace(group.prompt, columns={})) for group in groups]
    told = (dict.fromkeys(snapshot), version, stripped, temperature, autocast)
    with with_every_rank(policy, "log_ratios", *told) as parallel, ExitStack() as stack:
        model: Any = policy
        if snapshot and parallel.spreads_weights:
            stack.enter_context(_holding(policy, snapshot, parallel))
        elif snapshot:
            model = _WithWeights(policy, snapshot)
        if _is_merged(policy, snapshot):  # adapters that are merged into the snapshot must not count twice
            stack.enter_context(adapters_off(policy))
        stack.enter_context(torch.autocast(device.type, autocast, enabled=autocast is not None))
        tokens_BT = rows["tokens_BT"].to(device)
        output = response_logprobs(model, tokens_BT, mask_BT.to(device), temperature, with_entropies=False)
    return (output.logprobs_BT.cpu() - rows["behaviour_logprobs_BT"])[drawn_BT.bool()]


def _is_merged(policy: PreTrainedModel, snapshot: Mapping[str, Any]) -> bool:
    return has_adapters(policy) and any(not is_adapter(name) for name in snapshot)


@contextmanager
def _holding(policy: PreTrainedModel, snapshot: Mapping[str, Tensor | None], parallel: Parallel) -> Iterator[None]:
    """Within, a policy that is spread over ranks holds a snapshot, one parameter after the other exchanged."""
    names = names_below_adapters(policy) if _is_merged(policy, snapshot) else {}
    own = dict(policy.named_parameters())
    given = {names.get(name, name): tensor for name, tensor in snapshot.items()}
    undo = [parallel.exchange(own[name], given[name]) for name in own if name in given]
    try:
        yield
    finally:
        for restore in undo:
            restore()
        parallel.settle(policy)  # the pass may have left the snapshot whole


class _WithWeights:
    """The policy's computation with a snapshot in the place of its own weights, which stay where they are."""

    def __init__(self, policy: PreTrainedModel, snapshot: Mapping[str, Tensor | None]) -> None:
        self.policy = policy
        own = {**dict(policy.named_parameters()), **dict(policy.named_buffers())}
        names = names_below_adapters(policy) if _is_merged(policy, snapshot) else {}
        self._weights = {
            names.get(name, name): tensor.to(policy.device, own[names.get(name, name)].dtype)
            for name, tensor in snapshot.items()
            if tensor is not None
        }

    def get_output_embeddings(self) -> nn.Module:
        return self.policy.get_output_embeddings()

    def __call__(self, **inputs: Any) -> Any:
        return functional_call(self.policy, self._weights, kwargs=inputs)
