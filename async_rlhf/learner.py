"""The learner: policy, reference policy and optimiser. Annotates what was sampled, and updates on it."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, get_scheduler

from async_rlhf.algorithms import Algorithm
from async_rlhf.config import OnlineConfig
from async_rlhf.forward import response_logprobs
from async_rlhf.models import disable_dropout
from async_rlhf.objectives.kl import k1
from async_rlhf.rows import by_length, response_tensors
from async_rlhf.types import Experience, ScoredBatch


class Learner:
    """Trains one policy with one algorithm.

    Args:
        policy: trained in place, with float32 weights.
        reference: stays as it is; None takes a copy of the policy as it is now.
        algorithm: an entry of :data:`~async_rlhf.algorithms.ALGORITHMS`.
        config: of that algorithm.
    """

    def __init__(
        self, policy: PreTrainedModel, reference: PreTrainedModel | None, algorithm: Algorithm, config: OnlineConfig
    ) -> None:
        self.algorithm = algorithm
        self.config = config
        self.policy = disable_dropout(policy)
        self.reference = copy.deepcopy(policy) if reference is None else disable_dropout(reference)
        self.reference.requires_grad_(False).eval()
        if config.gradient_checkpointing:
            policy.gradient_checkpointing_enable()
        self.optimizer = torch.optim.AdamW(
            policy.parameters(),
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.scheduler = get_scheduler(
            config.lr_scheduler_type,
            self.optimizer,
            num_warmup_steps=config.warmup_steps,
            num_training_steps=config.num_optimizer_steps,
        )
        policy.train()

    def annotate(self, scored: ScoredBatch) -> tuple[Experience, dict[str, float]]:
        """Add the reference's log-probabilities, then let the algorithm assign credit.

        Returns:
            What to train on, and metrics over all samples of the batch, trained on or not.
        """
        rows = response_tensors(scored.batch.groups)
        mask_BT = rows["response_mask_BT"]
        reference_BT = torch.zeros_like(mask_BT)
        with torch.no_grad():
            for index in by_length(rows["lengths_B"], self.config.annotate_batch_size):
                longest = int(rows["lengths_B"][index].max())
                logprobs_BT, _ = self._logprobs(
                    self.reference, rows["tokens_BT"][index, :longest], mask_BT[index, :longest], with_entropies=False
                )
                reference_BT[index, :longest] = logprobs_BT.cpu()
        experience = Experience(
            **rows,
            reference_logprobs_BT=reference_BT,
            scores_B=scored.scores_PK.flatten(),
            weights_U=torch.ones(len(mask_BT)),
        )
        credited = self.algorithm.credit(experience, self.config)
        metrics = _objective_metrics(experience)
        metrics["objective/ties"] = float((credited.weights_U == 0).sum())
        return credited, metrics

    def update(self, experience: Experience, batch: int) -> dict[str, float]:
        """``num_epochs`` epochs of ``num_mini_batches`` optimiser steps. Returns means over all of them."""
        loss_sums: defaultdict[str, float] = defaultdict(float)
        row_sums: defaultdict[str, float] = defaultdict(float)
        total_weight, rows, steps, gradient_norms = 0.0, 0, 0, 0.0
        for units_U in self._mini_batches(experience.units, batch):
            mini_batch = experience.select(units_U[experience.weights_U[units_U] > 0])
            weight = float(mini_batch.weights_U.sum())
            if weight > 0:  # a mini-batch of ties only would move the weights by the optimiser's momentum alone
                self._backward(mini_batch, weight, loss_sums, row_sums)
                gradient_norms += self._step()
                total_weight += weight
                rows += len(mini_batch)
                steps += 1
            self.scheduler.step()
        metrics = {name: value / total_weight for name, value in loss_sums.items()}
        metrics.update({name: value / rows for name, value in row_sums.items()})
        metrics["optimizer_steps"] = float(steps)
        metrics["grad_norm"] = gradient_norms / max(steps, 1)
        metrics["lr"] = self.scheduler.get_last_lr()[0]
        return metrics

    def _mini_batches(self, units: int, batch: int) -> Iterator[Tensor]:
        """Units of each mini-batch, in an order that depends on seed, batch and epoch alone."""
        for epoch in range(self.config.num_epochs):
            key = [self.config.seed, batch << 16 | epoch]
            order_U = np.random.Generator(np.random.Philox(key=key)).permutation(units)
            yield from torch.from_numpy(order_U).chunk(self.config.num_mini_batches)

    def _backward(
        self, mini_batch: Experience, weight: float, loss_sums: dict[str, float], row_sums: dict[str, float]
    ) -> None:
        """Accumulate the gradient of (sum of losses) / weight over micro-batches of like length, and the metrics."""
        longest_U = mini_batch.lengths_B.view(mini_batch.units, -1).amax(dim=1)
        for units_U in by_length(longest_U, self.config.per_device_train_batch_size):
            micro_batch = _to(mini_batch.select(units_U), self.policy.device)
            logprobs_BT, entropies_BT = self._logprobs(self.policy, micro_batch.tokens_BT, micro_batch.response_mask_BT)
            output = self.algorithm.loss(logprobs_BT, micro_batch, self.config)
            (output.loss_sum / weight).backward()
            for name, value in output.metrics.items():
                loss_sums[name] += float(value)
            for name, value in _policy_metrics(logprobs_BT.detach(), entropies_BT, micro_batch).items():
                row_sums[name] += float(value)

    def _step(self) -> float:
        limit = self.config.max_grad_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), limit)
        if not torch.isfinite(norm):
            raise FloatingPointError(f"the gradient's norm is {norm.item()}; the weights were not touched")
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm.item()

    def _logprobs(
        self, model: PreTrainedModel, tokens_BT: Tensor, mask_BT: Tensor, with_entropies: bool = True
    ) -> tuple[Tensor, Tensor]:
        device = model.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.config.bf16):
            return response_logprobs(
                model,
                tokens_BT.to(device),
                mask_BT.to(device),
                self.config.generation.temperature,
                with_entropies,
            )


def _to(experience: Experience, device: torch.device) -> Experience:
    if device.type == "cpu":
        return experience
    tensors = {
        name: getattr(experience, name).to(device, non_blocking=True)
        for name in experience.__slots__
        if name != "rows_per_unit"
    }
    return replace(experience, **tensors)


def _objective_metrics(experience: Experience) -> dict[str, float]:
    """Over all samples, by the log-probabilities of the weights that sampled them: unbiased for those weights."""
    mask_BT = experience.response_mask_BT
    behaviour_BT = experience.behaviour_logprobs_BT
    kl_B = (k1(behaviour_BT, experience.reference_logprobs_BT) * mask_BT).sum(dim=1)
    return {
        "objective/kl": kl_B.mean().item(),
        "objective/entropy": -(behaviour_BT * mask_BT).sum(dim=1).mean().item(),
    }


def _policy_metrics(logprobs_BT: Tensor, entropies_BT: Tensor, rows: Experience) -> dict[str, Tensor]:
    """Sums over rows of per-token means.

    ``policy/behaviour_kl`` compares the weights being trained with those that sampled: policy lag plus engine noise.
    """
    mask_BT = rows.response_mask_BT
    tokens_B = mask_BT.sum(dim=1)
    difference_BT = (rows.behaviour_logprobs_BT - logprobs_BT) * mask_BT
    per_row = {
        "policy/entropy_avg": (entropies_BT * mask_BT).sum(dim=1) / tokens_B,
        "policy/behaviour_kl": difference_BT.sum(dim=1) / tokens_B,
        "policy/logprob_difference": difference_BT.abs().sum(dim=1) / tokens_B,
        "val/ratio": (torch.exp(-difference_BT) * mask_BT).sum(dim=1) / tokens_B,
    }
    return {name: values_B.sum() for name, values_B in per_row.items()}
