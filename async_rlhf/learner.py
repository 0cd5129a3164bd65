"""The learner: policy, reference, value model and optimiser. Annotates what was sampled, and updates on it."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_scheduler

from async_rlhf.algorithms import Algorithm, kl_penalties
from async_rlhf.config import KLPenaltyConfig, OnlineConfig, PPOConfig, RatioConfig
from async_rlhf.config.base import require
from async_rlhf.forward import PolicyAndValueWrapper, end_values, head_in_float32, response_logprobs, response_values
from async_rlhf.lora import adapters_off, has_adapters, is_adapter
from async_rlhf.models import (
    disable_dropout,
    load_policy,
    load_reward_model,
    load_value_head,
    write_model,
    write_value_head,
)
from async_rlhf.objectives.kl import adapted_coefficient, k1
from async_rlhf.objectives.ratios import ratio_statistics
from async_rlhf.parallel import Parallel, decayed_groups, device_of, trainable
from async_rlhf.rows import by_length, dealt, sampled_rows
from async_rlhf.types import Experience, PolicyOutput, ScoredBatch
from async_rlhf.weights import checksum, named_weights


class Learner:
    """Trains one policy with one algorithm.

    Args:
        policy: trained in place, with float32 weights; of a policy with adapters only those are trained.
        reference: stays as it is; None takes the policy as it is now: a copy, or its weights without adapters.
        algorithm: an entry of :data:`~async_rlhf.algorithms.ALGORITHMS`.
        config: of that algorithm.
        value: PPO's value model, or a value head on the policy's states.
        parallel: how work and weights are divided among ranks; None for a single one.
        checkpoint: folder and tensors of one to go on from; :meth:`restore` does the rest.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        reference: PreTrainedModel | None,
        algorithm: Algorithm,
        config: OnlineConfig,
        value: PreTrainedModel | nn.Linear | None = None,
        parallel: Parallel | None = None,
        checkpoint: tuple[Path, Mapping[str, Tensor]] | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.config = config
        self.parallel = parallel or Parallel()
        self.ranks = self.parallel.ranks
        self.policy = disable_dropout(policy)
        own_reference = self._frozen_reference(reference)
        for model in filter(None, (policy, own_reference) if config.head_float32 else ()):
            head_in_float32(model)
        self.value = None if value is None else disable_dropout(value)
        self.model = PolicyAndValueWrapper(policy, self.value)
        self.fingerprint = self._fingerprint(own_reference)
        """A checksum of what stays as it is: the reference policy, and the weights below adapters."""
        if checkpoint is not None:
            self._load_weights(*checkpoint)
        for model in (policy, value):
            if config.gradient_checkpointing and isinstance(model, PreTrainedModel):
                model.gradient_checkpointing_enable()
                model.enable_input_require_grads()  # else nothing before the first adapter would be recomputed
        # Where weights are spread, nothing from here on may count on having them.
        self.reference = None if own_reference is None else self.parallel.frozen(own_reference)
        parts = [self.policy] if self.value is None else [self.policy, self.value]
        self.optimizer = self.parallel.prepare(self.model, parts, self._optimizer)
        self.scheduler = get_scheduler(
            config.lr_scheduler_type,
            self.optimizer,
            num_warmup_steps=config.warmup_steps,
            num_training_steps=config.num_optimizer_steps,
        )
        self.kl_coef = config.kl.coef if isinstance(config, KLPenaltyConfig) else 0.0
        self._batch_config = config
        """With the KL coefficient of the batch at hand."""
        self.model.train()

    def _frozen_reference(self, reference: PreTrainedModel | None) -> PreTrainedModel | None:
        """A model of its own, or None where there is no need of one: no KL, or adapters that can be switched off."""
        if not self.config.uses_reference or (reference is None and has_adapters(self.policy)):
            return None
        own = copy.deepcopy(self.policy) if reference is None else disable_dropout(reference)
        return own.requires_grad_(False).eval()

    def _optimizer(self) -> torch.optim.AdamW:
        config = self.config
        trained = trainable(self.policy)
        right = "has no weight that is to be trained; load adapters with is_trainable=True"
        require(bool(trained), "model", type(self.policy).__name__, right)
        groups = decayed_groups(trained, config.learning_rate, config.weight_decay)
        if self.value is not None:
            assert isinstance(config, PPOConfig)
            rate = config.learning_rate if config.value_learning_rate is None else config.value_learning_rate
            groups += decayed_groups(trainable(self.value), rate, config.weight_decay)
        return torch.optim.AdamW(
            groups,
            lr=config.learning_rate,  # some schedules ask for the default
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def annotate(self, scored: ScoredBatch) -> tuple[Experience, dict[str, float]]:
        """Add what reference, policy and value model say before the update, then let the algorithm assign credit.

        A prompt with a completion that has no reward is left out.

        Returns:
            What to train on, and metrics over all samples of the batch, trained on or not.
        """
        rewarded_P = ~scored.scores_PK.isnan().any(dim=1)
        groups = [group for group, kept in zip(scored.batch.groups, rewarded_P.tolist(), strict=True) if kept]
        rows = sampled_rows([sample for group in groups for sample in group.samples])
        weights_U = torch.ones(len(rows["tokens_BT"]))
        experience = Experience(**rows, scores_B=scored.scores_PK[rewarded_P].flatten(), weights_U=weights_U)
        return self._annotate(experience) if len(experience) else (experience, {})

    def _annotate(self, experience: Experience) -> tuple[Experience, dict[str, float]]:
        """The same from rows that say nothing but what was sampled; every rank ends up with all of it."""
        with self.ranks.calling("annotate", experience):
            if self.config.uses_reference:
                experience = self._add(experience, self._by_reference)
            if self.value is not None or (isinstance(self.config, RatioConfig) and self.config.needs_proximal_pass):
                experience = self._add(experience, self._before_update)
            if isinstance(self.config, PPOConfig) and self.config.bootstrap_truncated:
                experience = self._add(experience, self._at_the_end)
        config = self._batch_config = self._adapted_config()
        metrics = _objective_metrics(experience, config)
        if config.samples_per_prompt > 1:
            scores_PK = experience.scores_B.view(-1, config.samples_per_prompt)
            metrics["objective/ties"] = float((scores_PK.amax(dim=1) == scores_PK.amin(dim=1)).sum())
        credited = self._credited = self.algorithm.credit(experience, config)
        if isinstance(config, KLPenaltyConfig) and config.kl.target is not None and "objective/kl" in metrics:
            self.kl_coef = adapted_coefficient(
                self.kl_coef, metrics["objective/kl"], config.kl.target, len(experience), config.kl.horizon
            )
        return credited, metrics

    @property
    def calls(self) -> dict[str, Callable[..., Any]]:
        """What rank 0 may ask of the others."""
        return {
            "annotate": self._annotate,
            "update": lambda batch, empty: self.update(self._credited if empty is None else empty, batch),
            "state": self.state,
        }

    def _adapted_config(self) -> OnlineConfig:
        """The configuration with the KL coefficient as it is now."""
        config = self.config
        if not isinstance(config, KLPenaltyConfig) or config.kl.target is None:
            return config
        return replace(config, kl=replace(config.kl, coef=self.kl_coef))

    def _add(self, rows: Experience, compute: Callable[[Tensor, Tensor], dict[str, Tensor]]) -> Experience:
        """The rows with more fields, computed without gradient in batches of like length, by all ranks."""
        device, found = device_of(self.policy), []
        batches = list(by_length(rows.lengths_B, self.config.annotate_batch_size))
        with torch.no_grad():
            for index, counts in dealt(batches, self.ranks.rank, self.ranks.count):
                part = rows.select(index)
                values = compute(part.tokens_BT.to(device), part.sampled_BT.to(device))
                if counts:
                    found.append((index, {name: tensor.cpu() for name, tensor in values.items()}))
        fields: dict[str, Any] = {}
        for index, values in (item for items in self.ranks.gather(found) for item in items):
            for name, tensor in values.items():
                if name.endswith("_BT"):
                    whole_BT = fields.setdefault(name, torch.zeros_like(rows.sampled_BT))
                    whole_BT[index, : tensor.shape[1]] = tensor
                else:
                    fields.setdefault(name, torch.zeros(len(rows)))[index] = tensor
        return replace(rows, **fields)

    def _by_reference(self, tokens_BT: Tensor, mask_BT: Tensor) -> dict[str, Tensor]:
        temperature = self.config.generation.temperature
        model = self.policy if self.reference is None else self.reference
        with adapters_off(model) if self.reference is None else nullcontext(), self._autocast():
            output = response_logprobs(model, tokens_BT, mask_BT, temperature, with_entropies=False)
        return {"reference_logprobs_BT": output.logprobs_BT}

    def _before_update(self, tokens_BT: Tensor, mask_BT: Tensor) -> dict[str, Tensor]:
        """Log-probabilities where the objective needs them from before the update, and values."""
        found = {}
        assert isinstance(self.config, RatioConfig)
        with self._autocast():
            if self.config.needs_proximal_pass or self.model.head is not None:
                temperature = self.config.generation.temperature
                output = response_logprobs(self.policy, tokens_BT, mask_BT, temperature, False, self.model.head)
                if self.config.needs_proximal_pass:
                    found["old_logprobs_BT"] = output.logprobs_BT
                if output.values_BT is not None:
                    found["values_BT"] = output.values_BT
            if isinstance(self.value, PreTrainedModel):
                found["values_BT"] = response_values(self.value, tokens_BT, mask_BT)
        return found

    def _at_the_end(self, tokens_BT: Tensor, mask_BT: Tensor) -> dict[str, Tensor]:
        """Values of whole texts, the end of which is the last response token."""
        assert self.value is not None
        positions_T = torch.arange(1, mask_BT.shape[1] + 1, device=mask_BT.device)
        lengths_B = (mask_BT * positions_T).amax(dim=1).long().clamp(min=1)
        with self._autocast():
            return {"end_values_B": end_values(self.policy, self.value, tokens_BT, lengths_B)}

    def update(self, experience: Experience, batch: int) -> dict[str, float]:
        """``num_epochs`` epochs of ``num_mini_batches`` optimiser steps. Returns means over all of them."""
        with self.ranks.calling("update", batch, None if len(experience) else experience):
            return self._update(experience, batch)

    def _update(self, experience: Experience, batch: int) -> dict[str, float]:
        loss_sums: defaultdict[str, float] = defaultdict(float)
        watch = _Watch()
        total_weight, steps, norms = 0.0, 0, [0.0] * (1 if self.value is None else 2)
        for units_U in self._mini_batches(experience.units, batch):
            mini_batch = experience.select(units_U[experience.weights_U[units_U] > 0])
            weight = mini_batch.weight
            if weight > 0:  # a mini-batch of ties only would move the weights by the optimiser's momentum alone
                self._backward(mini_batch, weight, loss_sums, watch)
                limit = self.config.max_grad_norm or float("inf")
                norms = [total + norm for total, norm in zip(norms, self.parallel.step(limit), strict=False)]
                total_weight += weight
                steps += 1
            self.scheduler.step()
        everyone = self.ranks.gather((dict(loss_sums), watch))
        sums = {name: sum(found[name] for found, _ in everyone if name in found) for name in everyone[0][0]}
        metrics = {name: value / total_weight for name, value in sums.items()}
        metrics |= _Watch.of([watch for _, watch in everyone]).metrics()
        metrics["optimizer_steps"] = float(steps)
        names = ("grad_norm", "value_grad_norm")
        metrics |= {name: norm / max(steps, 1) for name, norm in zip(names, norms, strict=False)}
        metrics["lr"] = self.scheduler.get_last_lr()[0]
        return metrics

    def _mini_batches(self, units: int, batch: int) -> Iterator[Tensor]:
        """Units of each mini-batch, in an order that depends on seed, batch and epoch alone."""
        for epoch in range(self.config.num_epochs):
            key = [self.config.seed, batch << 16 | epoch]
            order_U = np.random.Generator(np.random.Philox(key=key)).permutation(units)
            yield from torch.from_numpy(order_U).tensor_split(self.config.num_mini_batches)

    def _backward(self, mini_batch: Experience, weight: float, loss_sums: dict[str, float], watch: _Watch) -> None:
        """Accumulate the gradient of (sum of losses) / weight over micro-batches of like length, and the metrics.

        The weight is that of the whole mini-batch, of which each rank has some micro-batches.
        """
        config, device = self._batch_config, device_of(self.policy)
        longest_U = mini_batch.lengths_B.view(mini_batch.units, -1).amax(dim=1)
        parts = list(by_length(longest_U, self.config.per_device_train_batch_size))
        mine = list(dealt(parts, self.ranks.rank, self.ranks.count))
        for number, (units_U, counts) in enumerate(mine, start=1):
            micro_batch = mini_batch.select(units_U).map(lambda _, x: x.to(device, non_blocking=True))
            with self.parallel.accumulating(last=number == len(mine)):
                with self._autocast():
                    tokens_BT, mask_BT = micro_batch.tokens_BT, micro_batch.sampled_BT
                    output = self.parallel.forward(tokens_BT, mask_BT, config.generation.temperature)
                loss = self.algorithm.loss(output, micro_batch, config)
                self.parallel.backward(loss.loss_sum / weight if counts else loss.loss_sum * 0)
            if counts:
                for name, value in loss.metrics.items():
                    loss_sums[name] += float(value)
                watch.add(output, micro_batch)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(device_of(self.policy).type, torch.bfloat16, enabled=self.config.bf16)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What a new learner and its :meth:`restore` need beside the files of :meth:`save`: tensors, and values for
        JSON. They do not depend on the number of ranks, and are on rank 0 alone.
        """
        with self.ranks.calling("state"):
            tensors = {f"optimizer.{name}": tensor for name, tensor in self.parallel.moments().items()}
            for name, p in self.model.named_parameters():
                if is_adapter(name):
                    with self.parallel.gathered([p]):
                        tensors[f"adapter.{name}"] = self.parallel.whole(p.data)
        return tensors, {"kl_coef": self.kl_coef, "scheduler_steps": self.scheduler.last_epoch}

    def _load_weights(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Of the models that are trained, as :meth:`save` and :meth:`state` gave them."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if is_adapter(name):
                    parameter.copy_(tensors[f"adapter.{name}"])
        trust = self.config.trust_remote_code
        if not has_adapters(self.policy):
            self.policy.load_state_dict(load_policy(str(folder), trust=trust).state_dict())
        place = folder / "value_model"
        if isinstance(self.value, nn.Linear):
            load_value_head(place, self.value)
        elif self.value is not None:
            saved = load_reward_model(str(place), key="value_model", trust=trust)
            if has_adapters(self.value):
                self.value.score.load_state_dict(saved.score.state_dict())
            else:
                self.value.load_state_dict(saved.state_dict())

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Go back to where :meth:`state` was called, of a learner made with that checkpoint. Every rank must."""
        self.scheduler.last_epoch = values["scheduler_steps"]
        # Computed anew: the length of the run may have changed, and with it the rate.
        for group, factor in zip(self.optimizer.param_groups, self.scheduler.lr_lambdas, strict=True):
            group["lr"] = group["initial_lr"] * factor(self.scheduler.last_epoch)
        prefix = "optimizer."
        self.parallel.load_moments({n[len(prefix) :]: x for n, x in tensors.items() if n.startswith(prefix)})
        self.kl_coef = values["kl_coef"]

    def _fingerprint(self, reference: PreTrainedModel | None) -> str:
        fixed = {name: p.data for name, p in self.model.named_parameters() if not p.requires_grad}
        if reference is not None:
            fixed |= {f"reference.{name}": tensor for name, tensor in named_weights(reference).items()}
        return checksum(fixed)

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write the policy in the standard format, and the value model or head into ``value_model``."""
        write_model(self.policy, tokenizer, folder)
        if isinstance(self.value, PreTrainedModel):
            write_model(self.value, tokenizer, folder / "value_model")
        elif self.value is not None:
            write_value_head(self.value, folder / "value_model")


def _objective_metrics(experience: Experience, config: OnlineConfig) -> dict[str, float]:
    """Over all samples, by the log-probabilities of the weights that sampled them: unbiased for those weights."""
    mask_BT = experience.sampled_BT
    behaviour_BT = experience.behaviour_logprobs_BT
    metrics = {"objective/entropy": -(behaviour_BT * mask_BT).sum(dim=1).mean().item()}
    if experience.reference_logprobs_BT is None:
        return metrics
    kl_B = (k1(behaviour_BT, experience.reference_logprobs_BT) * mask_BT).sum(dim=1)
    metrics["objective/kl"] = kl_B.mean().item()
    if isinstance(config, KLPenaltyConfig):
        metrics["objective/kl_coef"] = config.kl.coef
    if isinstance(config, KLPenaltyConfig) and config.kl.where == "reward":
        penalty = kl_penalties(experience, config).sum(dim=1).mean().item()
        metrics["objective/non_score_reward"] = -penalty
        metrics["objective/rlhf_reward"] = experience.scores_B.mean().item() - penalty
    return metrics


class _Watch:
    """How far the policy being trained is from the one that sampled: policy lag plus engine noise."""

    def __init__(self) -> None:
        self._token_entropies: list[Tensor] = []
        self._token_log_ratios: list[Tensor] = []
        self._row_log_ratios: list[Tensor] = []

    @classmethod
    def of(cls, parts: Sequence[_Watch]) -> _Watch:
        """All that several have seen."""
        whole = cls()
        for part in parts:
            whole._token_entropies += part._token_entropies
            whole._token_log_ratios += part._token_log_ratios
            whole._row_log_ratios += part._row_log_ratios
        return whole

    def add(self, output: PolicyOutput, rows: Experience) -> None:
        """Note the rows of one micro-batch."""
        mask_BT = rows.sampled_BT
        log_ratios_BT = (output.logprobs_BT.detach() - rows.behaviour_logprobs_BT) * mask_BT
        self._token_entropies.append(output.entropies_BT[mask_BT.bool()].cpu())
        self._token_log_ratios.append(log_ratios_BT[mask_BT.bool()].cpu())
        self._row_log_ratios.append(log_ratios_BT.sum(dim=1).cpu())

    def metrics(self) -> dict[str, float]:
        """Means over all tokens alike, for the mean over rows of means over tokens weighs those of short rows more: its
        ratio is not 1 where that is expected. And statistics of the ratios of tokens and of whole completions.
        """
        if not any(map(len, self._token_log_ratios)):
            return {}
        entropy = torch.cat(self._token_entropies).double().mean().item()
        statistics = ratio_statistics(torch.cat(self._token_log_ratios), torch.cat(self._row_log_ratios))
        return {"policy/entropy_avg": entropy, **statistics}
