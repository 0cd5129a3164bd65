"""The learner: policy, reference, value model and optimiser. Annotates the samples and trains on them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, get_scheduler

from async_rlhf.algorithms.estimators import ImportanceRatioStats, adapted_coefficient, k1
from async_rlhf.algorithms.policy import kl_penalties
from async_rlhf.algorithms.preference import differ
from async_rlhf.algorithms.record import Algorithm
from async_rlhf.config import OnlineConfig
from async_rlhf.config.base import require
from async_rlhf.distributed.loss_scale import LossScale
from async_rlhf.distributed.parallel import ALONE, Parallel, decayed_groups, trainable
from async_rlhf.learner.optimizers import Optimizers, checked_optimizer, make_optimizer
from async_rlhf.learner.reference import Reference
from async_rlhf.models.adapters import has_adapters
from async_rlhf.models.budget import passes_through
from async_rlhf.models.forward import (
    PolicyAndValueWrapper,
    RewardWrapper,
    autocast_dtype,
    end_values,
    head_in_float32,
    in_sixteen_bits,
    last_sampled,
    response_logprobs,
    response_values,
)
from async_rlhf.models.kernels import blocks, compile_blocks, recompute
from async_rlhf.models.loading import disable_dropout
from async_rlhf.models.packing import choose, keep_soft_cap, require_shared, texts_of_rows
from async_rlhf.models.passes import Passes
from async_rlhf.models.quantised import stored
from async_rlhf.models.routing import replay_routes
from async_rlhf.models.rows import in_one_copy, in_shares, sampled_rows, share_of
from async_rlhf.models.sharded_loading import only_on_rank_0
from async_rlhf.models.weights import checksum, named_weights
from async_rlhf.rewards.prefetch import EarlyResults
from async_rlhf.system.trace import Trace
from async_rlhf.types import Experience, Group, ScoredBatch

_Compute: TypeAlias = Callable[[Experience, torch.device], dict[str, Tensor]]
"""From rows on the CPU, and the device to compute on, to further fields of theirs."""

logger = logging.getLogger(__name__)


class Learner:
    """Trains one policy with one algorithm.

    Args:
        policy: trained in place, with float32 weights; if it has adapters, only those are trained.
        reference: stays fixed; None takes the current policy: a copy, or its weights without adapters.
        algorithm: the objective.
        config: the algorithm's configuration.
        value: a value model, or a value head on the policy's states, where the algorithm needs values.
        parallel: how work and weights are divided among ranks; None for a single one.
        load: loads a checkpoint's weights into the trained models, before they are sharded.
        optimizers: the user's own optimiser, and its schedule; None for AdamW, and the configuration's schedule.
        reference_apart: the reference policy computes beside training, on rank 0 and on the device that it is on.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        reference: PreTrainedModel | None,
        algorithm: Algorithm,
        config: OnlineConfig,
        value: PreTrainedModel | nn.Linear | None = None,
        parallel: Parallel | None = None,
        load: Callable[[PolicyAndValueWrapper], None] | None = None,
        optimizers: Optimizers = (None, None),
        reference_apart: bool = False,
    ) -> None:
        self.algorithm = algorithm
        self.config = config
        self.needs = algorithm.needs(config)
        self._truncated = config.generation.truncates
        if self.needs.reference and self._truncated:  # a KL is the whole policy's, not that of what sampled
            self.needs = replace(self.needs, old_logprobs=True)
        self.parallel = parallel or Parallel()
        self.ranks = self.parallel.ranks
        self.policy = disable_dropout(policy)
        if config.router_replay:
            replay_routes(policy)
        # Without a model of its own, adapters can be switched off.
        separate = self.needs.reference and (reference is not None or not has_adapters(policy))
        self.reference = Reference(policy, reference, separate, reference_apart, config, self.parallel)
        for model in filter(None, (policy, self.reference.model) if config.head_float32 else ()):
            head_in_float32(model)
        self.value = None if value is None else disable_dropout(value)
        wrapper = PolicyAndValueWrapper if policy.can_generate() else RewardWrapper
        self.model = wrapper(policy, self.value, self.parallel.context)
        self.fingerprint = self.ranks.broadcast("fingerprint", partial(self._fingerprint, self.reference.model))
        """A checksum of the fixed weights: the reference policy, and the weights below adapters."""
        if load is not None:
            load(self.model)
        self._early: EarlyResults[Tensor | None] | None = None
        """What a reference policy that computes apart says of batches, on rank 0."""
        if self.reference.is_apart and self.ranks.is_main:
            self._early = EarlyResults(self._reference_logprobs, name="reference", functions=False)
        self._prepare(optimizers[0])
        self.scheduler: Any = optimizers[1] or get_scheduler(
            config.lr_scheduler_type,
            self.optimizer,
            num_warmup_steps=config.warmup_steps,
            num_training_steps=config.num_optimizer_steps,
        )
        self.own_optimizer, self.own_schedule = (each is not None for each in optimizers)
        """Whether the user has made them: then checkpoints hold what else they are."""
        self.kl_coef = 0.0 if config.kl_penalty is None else config.kl_penalty.coef
        """Of the next batch."""
        self._batch_coef = self.kl_coef
        """That of the batch that was annotated last."""
        self.annotated: Experience | None = None
        """With ``rollouts: all``, the rows of the batch that was annotated last, before credit chose among them."""
        self._warned_of_units = False
        self.model.train()

    def _prepare(self, own: torch.optim.Optimizer | None) -> None:
        """Choose how the models compute, hand their weights to the strategy, and make the optimiser."""
        config, value, reference = self.config, self.value, self.reference
        models = {"policy": self.policy, "reference policy": reference.model, "value model": value}
        whole = {name: model for name, model in models.items() if isinstance(model, PreTrainedModel)}
        for model in whole.values():  # those of stages come here first
            keep_soft_cap(model, config.attn_implementation)
        spread = {name: whole.pop(name) for name, model in list(whole.items()) if only_on_rank_0(model)}
        pack = partial(choose, config.packing, config.by_tokens, sixteen_bits=in_sixteen_bits(config, self.policy))
        pack(whole)
        share = partial(require_shared, size=self.parallel.context.size)
        share({name: model for name, model in whole.items() if not (reference.is_apart and model is reference.model)})
        for model in (self.policy, value):
            if isinstance(model, PreTrainedModel):
                compile_blocks(model, config)
                recompute(model, config)
        # From here on the weights may be sharded, so no code may rely on having all of them.
        reference.prepare()
        parts = [self.policy] if value is None else [self.policy, value]
        if config.fp16:
            self.parallel.loss_scale = LossScale()
        self.optimizer = self.parallel.prepare(self.model, parts, partial(self._optimizer, own))
        with self.autocast():
            # They compute with the models' weights.
            pack(spread, device=self.parallel.device)
            share(spread, device=self.parallel.device)
        for model in spread.values():
            self.parallel.reshard(model)

    def _optimizer(self, own: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
        if own is not None:
            return checked_optimizer(own, self.model, self.parallel)
        config = self.config
        trained = trainable(self.policy)
        right = "has no weight that is to be trained; load adapters with is_trainable=True, or merge them first"
        require(bool(trained), "model", self.policy.config.name_or_path or type(self.policy).__name__, right)
        groups = decayed_groups(trained, config.learning_rate, config.weight_decay)
        if self.value is not None:
            rate = config.learning_rate if self.needs.value_learning_rate is None else self.needs.value_learning_rate
            groups += decayed_groups(trainable(self.value), rate, config.weight_decay)
        models = filter(None, (self.policy, self.value))
        return make_optimizer(config, groups, [block for model in models for block in blocks(model)])

    def annotate(self, scored: ScoredBatch) -> tuple[Experience, dict[str, float]]:
        """Add log-probabilities and values from before the update, then let the algorithm assign credit.

        Every rank must call it. Rank 0 alone has the batch, and computes credit, as that may run code of the user's; it
        broadcasts the rows before and after. A prompt is left out if any of its completions has no reward, and if there
        are more than ``trained_prompts``.

        Returns:
            The rows to train on, and metrics over all samples of these prompts.
        """
        rows, signal = self.ranks.broadcast("rows", lambda: self._rows_of(scored))
        if annotations := self._annotations():
            passes = _split(self._annotating, rows, torch.arange(len(rows)), self.parallel.groups)
            for model_at_hand, compute in annotations:
                with model_at_hand:
                    rows = self._add(rows, passes, compute, self._device, self.parallel)
        if self.config.rollouts == "all":
            self.annotated = rows
        self._batch_coef = self.kl_coef
        experience, metrics = self.ranks.broadcast("credit", lambda: self._credited(rows))
        penalty = self.config.kl_penalty
        if penalty is not None and penalty.target is not None and "objective/kl" in metrics:
            self.kl_coef = adapted_coefficient(
                self.kl_coef, metrics["objective/kl"], penalty.target, len(rows), penalty.horizon
            )
        return experience, metrics | signal

    def begin(self, index: int, first: int, groups: Sequence[Group]) -> None:
        """Say that a part of a batch has been sampled, from its prompt number ``first`` on: a reference policy that
        computes apart takes the batch up once it is whole, if all of it is trained on. From any thread of rank 0.
        """
        if self._early is not None and index > 0 and self.config.trained_prompts is None:  # below 1: held-out answers
            self._early.begin(index, first, groups, self.config.batch_size)

    def started(self, trace: Trace | None = None) -> AbstractContextManager[None]:
        """Within, a reference policy that computes apart does so; ``trace`` gets spans of it."""
        return nullcontext() if self._early is None else self._early.running(trace)

    def _reference_logprobs(self, groups: Sequence[Group]) -> Tensor | None:
        """(B, T): by a reference policy that computes apart, as :meth:`annotate` would have it of these prompts alone;
        None without any."""
        rows, (limits, device) = _rows(groups), self._reference_passes
        passes = _split(limits, rows, torch.arange(len(rows)))
        # Kernels of libraries run on the current device, and each thread has its own.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return self._add(rows, passes, self.reference.logprobs, device, ALONE).reference_logprobs_BT

    @cached_property
    def _reference_passes(self) -> tuple[Passes, torch.device]:
        """The limits of a pass through a reference policy that computes apart, and its device."""
        model = self.reference.model
        assert model is not None
        device = model.device
        shared = self.ranks.count == 1 and device == self.policy.device
        return self._annotating if shared else passes_through([model], self.config.annotation_limits, device), device

    def _annotations(self) -> list[tuple[AbstractContextManager[object], _Compute]]:
        """What the algorithm needs that passes without gradient give, each with what puts its model at hand."""
        kinds: list[tuple[AbstractContextManager[object], _Compute]] = []
        if self.needs.reference and not self.reference.is_apart:
            kinds.append((self.reference.at_hand, self.reference.logprobs))
        if self.needs.old_logprobs or self.needs.values:
            kinds.append((nullcontext(), self._before_update))
        if self.needs.end_values:
            kinds.append((nullcontext(), self._at_the_end))
        return kinds

    def _rows_of(self, scored: ScoredBatch) -> tuple[Experience, dict[str, float]]:
        """The rows to annotate, with what a reference policy that computes apart says of them, and metrics."""
        groups, scores_B, signal = _chosen(scored, self.config.trained_prompts)
        rows = _rows(groups, scores_B)
        if self._early is not None:
            rows = replace(rows, reference_logprobs_BT=self._early.of(replace(scored.batch, groups=groups)))
        return rows, signal

    def _credited(self, rows: Experience) -> tuple[Experience, dict[str, float]]:
        """The rows to train on, from annotated ones, and metrics; nothing is computed if there are none."""
        if not len(rows):
            return rows, {}
        config = self.batch_config
        metrics = _objective_metrics(rows, config, self._truncated)
        if config.samples_per_prompt > 1:
            scores_PK = rows.scores_B.view(-1, config.samples_per_prompt)
            metrics["objective/ties"] = float((scores_PK.amax(dim=1) == scores_PK.amin(dim=1)).sum())
        credited = self.algorithm.credit(rows, config)
        self._compare_units(credited)
        return credited, metrics

    def _compare_units(self, credited: Experience) -> None:
        """Warn once if the record does not say how many rows a unit has."""
        found, said = credited.rows_per_unit, self.algorithm.rows_per_unit
        if found != said and not self._warned_of_units:
            self._warned_of_units = True
            right = "must be %d, as its credit returns: memory and speed are planned by it"
            logger.warning(f"Algorithm.rows_per_unit of %s: got %d; {right}", self.algorithm.name, said, found)

    def _add(
        self, rows: Experience, passes: Sequence[Tensor], compute: _Compute, device: torch.device, parallel: Parallel
    ) -> Experience:
        """The rows with more fields, computed without gradient, on every rank.

        Args:
            rows: the same on every rank.
            passes: which rows share a pass.
            compute: takes the rows of a pass.
            device: to compute on.
            parallel: who share the passes.
        """

        def computed(part_B: Tensor) -> dict[str, Tensor]:
            return {name: tensor.cpu() for name, tensor in compute(rows.select(part_B), device).items()}

        fields = dict[str, Any]()
        with torch.no_grad():
            found = in_shares("annotations", passes, computed, parallel, parallel.context.size)
        for name in found[0] if found else ():
            by_token = name.endswith("_BT")
            whole = fields[name] = torch.zeros(rows.sampled_BT.shape if by_token else len(rows))
            for part_B, values in zip(passes, found, strict=True):
                columns = whole[:, : values[name].shape[1]] if by_token else whole
                columns.index_copy_(0, part_B, values[name])
        return replace(rows, **fields)

    def _before_update(self, rows: Experience, device: torch.device) -> dict[str, Tensor]:
        """Log-probabilities and values before the update, each only if the objective needs them."""
        found, head, context = {}, self.model.head, self.parallel.context
        with self.autocast():
            if self.needs.old_logprobs or head is not None:
                output = response_logprobs(
                    self.policy,
                    rows.tokens_BT,
                    rows.sampled_BT,
                    self.config.generation.temperature,
                    with_entropies=False,
                    value_head=head,
                    positions_BT=rows.positions_BT,
                    context=context,
                    routes_BTLE=rows.routes_BTLE,
                    device=device,
                )
                if self.needs.old_logprobs:
                    found["old_logprobs_BT"] = output.logprobs_BT
                if output.values_BT is not None:
                    found["values_BT"] = output.values_BT
            if isinstance(self.value, PreTrainedModel):  # whose routers choose for themselves
                found["values_BT"] = response_values(
                    self.value, rows.tokens_BT, rows.sampled_BT, rows.positions_BT, context, device
                )
        return found

    def _at_the_end(self, rows: Experience, device: torch.device) -> dict[str, Tensor]:
        """Values of whole texts, up to and including the last response token."""
        assert self.value is not None
        models, context = (self.policy, self.value), self.parallel.context
        ends_B = last_sampled(rows.sampled_BT) + 1
        with self.autocast():
            found = end_values(*models, rows.tokens_BT, ends_B, rows.positions_BT, context, rows.routes_BTLE, device)
        return {"end_values_B": found}

    def update(self, experience: Experience, batch: int, stepped: Sequence[bool] = ()) -> dict[str, float]:
        """``num_epochs`` epochs of ``num_mini_batches`` optimiser steps.

        Every rank must call it, with the same rows.

        Args:
            experience: of the batch.
            batch: its number.
            stepped: for each mini-batch, whether a step is taken although it may teach nothing, by momentum alone.

        Returns:
            On rank 0, means over all steps.

        Raises:
            FloatingPointError: a gradient is no finite number.
        """
        self.ranks.barrier(f"training on batch {batch}")
        loss_sums: dict[str, Tensor] = {}
        seen = ImportanceRatioStats()
        total_weight, steps, skipped, norms = 0.0, 0, 0, [0.0] * (1 if self.value is None else 2)
        for number, (units_U, weight) in enumerate(self.mini_batches(experience, batch)):
            passes = _split(self._training, experience, units_U, self.parallel.groups) if weight > 0 else []
            idle = not passes and any(stepped[number : number + 1])
            for parameter in self.parallel.trained if idle else ():
                parameter.grad = torch.zeros_like(parameter)
            if passes or idle:  # else momentum would move the weights for a mini-batch of ties
                self._backward(experience, passes, weight, batch, loss_sums, seen)
                limit = self.config.max_grad_norm or float("inf")
                try:
                    found = self.parallel.step(limit)
                except FloatingPointError as error:
                    lower = f"lower learning_rate ({self.config.learning_rate})"
                    what = "step" if self.algorithm.supervised else "update"
                    raise FloatingPointError(f"{what} {batch}: {error}; {lower}") from error
                total_weight += weight
                if found is None:
                    skipped += 1
                else:
                    norms = [total + norm for total, norm in zip(norms, found, strict=False)]
                    steps += 1
            with warnings.catch_warnings():  # torch's, if ties or an overflow left the optimiser without its first step
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
                self.scheduler.step()
        everyone = list(self.ranks.collect("losses", (_read(loss_sums), seen.on_cpu())))
        if not self.ranks.is_main:
            return {}
        sums = {name: sum(found[name] for found, _ in everyone if name in found) for name in everyone[0][0]}
        metrics = {name: value / total_weight for name, value in sums.items()}
        if not self.algorithm.supervised:
            metrics |= ImportanceRatioStats.of([part for _, part in everyone]).metrics()
        metrics["optimizer_steps"] = float(steps)
        if self.parallel.loss_scale is not None:
            metrics |= {"skipped_steps": float(skipped), "loss_scale": self.parallel.loss_scale.value}
        names = ("grad_norm", "value_grad_norm")
        metrics |= {name: norm / max(steps, 1) for name, norm in zip(names, norms, strict=False)}
        metrics["lr"] = float(self.scheduler.get_last_lr()[0])
        return metrics

    def mini_batches(self, experience: Experience, batch: int) -> Iterator[tuple[Tensor, float]]:
        """Units of each mini-batch that count, in an order that depends only on seed, batch and epoch, with their
        weight: 0 if there is nothing to learn from them.
        """
        for epoch in range(self.config.num_epochs):
            key = [self.config.seed, batch << 16 | epoch]
            order_U = np.random.Generator(np.random.Philox(key=key)).permutation(experience.units)
            for units_U in torch.from_numpy(order_U).tensor_split(self.config.num_mini_batches):
                counted_U = units_U[experience.loss_weights_U[units_U] > 0]
                yield counted_U, experience.weight_of(counted_U)

    def _backward(
        self,
        experience: Experience,
        passes: Sequence[Tensor],
        weight: float,
        batch: int,
        loss_sums: dict[str, Tensor],
        seen: ImportanceRatioStats,
    ) -> None:
        """Accumulate the gradient of (sum of losses) / weight over this rank's share of the passes, and the metrics.

        Nothing here reads a number from the device, so that it need not be waited for.
        """
        device, context = self._device, self.parallel.context
        config, supervised = self.batch_config, self.algorithm.supervised
        share = list(share_of(range(len(passes)), self.ranks.rank // context.size, self.parallel.groups))
        for turn, (number, counts) in enumerate(share, start=1):
            if supervised:  # what a model draws, such as noise on routers, is to depend on nothing else
                torch.manual_seed(_seed_of(config.seed, batch, number))
            rows = experience.select(passes[number])
            of_loss = replace(rows, routes_BTLE=None)
            here: dict[str, Any] = in_one_copy(of_loss.tensors(), device)
            micro_batch = replace(of_loss, **here)
            with self.parallel.accumulating(last=turn == len(share)):
                with self.autocast():
                    output = self.parallel.forward(
                        rows.tokens_BT,
                        rows.sampled_BT,
                        config.generation.temperature,
                        not supervised,
                        rows.positions_BT,
                        rows.routes_BTLE,
                        device,
                    )
                loss = self.algorithm.loss(output, micro_batch, config)
                self.parallel.backward(loss.loss_sum / weight if counts else loss.loss_sum * 0)
            if counts and context.leads:
                for name, value in loss.metrics.items():
                    found = torch.as_tensor(value, dtype=torch.float64, device=device).detach()
                    loss_sums[name] = found + loss_sums.get(name, 0.0)
                if not supervised:
                    seen.add(output, micro_batch, rows.sampled_BT)

    @cached_property
    def _training(self) -> Passes:
        """The limits of a forward and backward pass."""
        return passes_through(self._models, self.config.training_limits, self._device)

    @cached_property
    def _annotating(self) -> Passes:
        """The limits of a pass without gradient."""
        return passes_through(self._models, self.config.annotation_limits, self._device)

    @property
    def _models(self) -> list[PreTrainedModel]:
        """What a pass goes through."""
        return [model for model in (self.policy, self.value) if isinstance(model, PreTrainedModel)]

    @property
    def batch_config(self) -> OnlineConfig:
        """The configuration, with the KL coefficient of the batch that was annotated last if that changes."""
        penalty = self.config.kl_penalty
        adapted = penalty is not None and penalty.target is not None
        return self.config.with_kl_coef(self._batch_coef) if adapted else self.config

    @property
    def _device(self) -> torch.device:
        """Where the policy computes."""
        return self.parallel.device_of(self.policy)

    def autocast(self, device: torch.device | None = None) -> torch.autocast:
        """The types that the learner computes in; on another device than the policy's, if one is given."""
        dtype = autocast_dtype(self.config)
        return torch.autocast((device or self._device).type, dtype, enabled=dtype is not None)

    def _fingerprint(self, reference: PreTrainedModel | None) -> str:
        fixed = dict[str, Tensor]()
        for name, parameter in self.model.named_parameters():
            fixed |= {} if parameter.requires_grad else stored(name, parameter)
        if reference is not None:
            fixed |= {f"reference.{name}": tensor for name, tensor in named_weights(reference).items()}
        return checksum(fixed)


def _chosen(scored: ScoredBatch, most: int | None) -> tuple[tuple[Group, ...], Tensor, dict[str, float]]:
    """The prompts to train on, the scores of their rows, and metrics of the choice.

    These are the prompts whose completions all have a reward: of more than ``most`` the first whose rewards differ, and
    if these are too few the first others, all in the order of the batch.
    """
    chosen_P = (~scored.scores_PK.isnan().any(dim=1)).nonzero().flatten()
    signal: dict[str, float] = {}
    if most is not None and len(chosen_P):
        differ_P = differ(scored.scores_PK[chosen_P])
        signal = {"signal/prompts": differ_P.mean().item(), "signal/trained": min(float(differ_P.sum()), most)}
        chosen_P = chosen_P[differ_P.argsort(descending=True, stable=True)[:most].sort().values]
    groups = tuple(scored.batch.groups[place] for place in chosen_P.tolist())
    return groups, scored.scores_PK[chosen_P].flatten(), signal


def _rows(groups: Sequence[Group], scores_B: Tensor | None = None) -> Experience:
    rows = sampled_rows([sample for group in groups for sample in group.samples])
    ones_U = torch.ones(len(rows["tokens_BT"]))
    return Experience(**rows, scores_B=ones_U if scores_B is None else scores_B, loss_weights_U=ones_U)


def _split(limits: Passes, rows: Experience, units_U: Tensor, ranks: int = 1) -> list[Tensor]:
    """Which of these units share a pass, by their numbers; so many ranks have a pass at a time."""
    lengths_B, texts = rows.lengths_B[rows.rows_of(units_U)], None
    if limits.shared:
        part = rows.select(units_U)
        texts = texts_of_rows(part.tokens_BT, lengths_B, part.positions_BT, part.routes_BTLE)
    return [units_U[part_U] for part_U in limits.split(lengths_B, rows.rows_per_unit, ranks, texts)]


def _seed_of(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _read(sums: dict[str, Tensor]) -> dict[str, float]:
    """The numbers, all read from the device at once."""
    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)) if sums else {}


def _objective_metrics(experience: Experience, config: OnlineConfig, truncated: bool) -> dict[str, float]:
    """Metrics over all samples, by log-probabilities of the weights that sampled them: unbiased for those weights. If a
    truncated policy has sampled, a KL is that of the whole one before the update.
    """
    mask_BT = experience.sampled_BT
    behaviour_BT = experience.behaviour_logprobs_BT
    policy_BT = experience.old_logprobs_BT if truncated else behaviour_BT
    metrics = {"objective/entropy": -(behaviour_BT * mask_BT).sum(dim=1).mean().item()}
    if experience.reference_logprobs_BT is None:
        return metrics
    assert policy_BT is not None
    kl_B = k1(policy_BT, experience.reference_logprobs_BT).mul_(mask_BT).sum(dim=1)
    metrics["objective/kl"] = kl_B.mean().item()
    if config.kl_penalty is None:
        return metrics
    metrics["objective/kl_coef"] = config.kl_penalty.coef
    if config.kl_penalty.where == "reward":
        penalty = kl_penalties(experience, config.kl_penalty).sum(dim=1).mean().item()
        metrics["objective/non_score_reward"] = -penalty
        metrics["objective/rlhf_reward"] = experience.scores_B.mean().item() - penalty
    return metrics
