"""The reference: the policy that the trained one is to stay close to."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from async_rlhf.config import OnlineConfig
from async_rlhf.distributed.collectives import WHOLE
from async_rlhf.distributed.parallel import ALONE, Parallel
from async_rlhf.models.adapters import adapters_off
from async_rlhf.models.forward import autocast_dtype, response_logprobs
from async_rlhf.models.frozen_models import frozen, on_device
from async_rlhf.models.loading import disable_dropout
from async_rlhf.types import Experience


class Reference:
    """A fixed model, or the policy without its adapters.

    Args:
        policy: that is trained, with the weights that the run starts from.
        model: a model of its own; None for the policy as it is now.
        is_separate: whether there is a model; without one, the policy's adapters are switched off.
        apart: it computes beside training, on rank 0 and on the device that it is on.
        config: the run's.
        parallel: how work and weights are divided among ranks.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        model: PreTrainedModel | None,
        is_separate: bool,
        apart: bool,
        config: OnlineConfig,
        parallel: Parallel,
    ) -> None:
        self._policy, self._config, self._parallel = policy, config, parallel
        self.model: PreTrainedModel | None = None
        """The fixed model; None where the policy takes its place, and on ranks that do not compute with it."""
        if is_separate:
            separate = copy.deepcopy(policy) if model is None else disable_dropout(model)
            self.model = separate.requires_grad_(False).eval()
        self.is_apart = apart and is_separate
        self.at_hand: AbstractContextManager[object] = nullcontext()
        """What to enter while it computes."""

    def prepare(self) -> None:
        """Hand the model's weights to the strategy; once it has been decided how it computes."""
        if self.model is None:
            return
        if self.is_apart and not self._parallel.ranks.is_main:
            self.model = None
            return
        self.model = frozen(self.model, self._config, ALONE if self.is_apart else self._parallel)
        self.at_hand = on_device(self.model, self._config, self._parallel)

    def logprobs(self, rows: Experience, device: torch.device) -> dict[str, Tensor]:
        """Log-probabilities of sampled tokens, as ``reference_logprobs_BT``: (B, T) float32. Routers choose for
        themselves.
        """
        model = self._policy if self.model is None else self.model
        dtype = autocast_dtype(self._config)
        context = WHOLE if self.is_apart else self._parallel.context
        off = adapters_off(model) if self.model is None else nullcontext()
        with off, torch.autocast(device.type, dtype, enabled=dtype is not None):
            output = response_logprobs(
                model,
                rows.tokens_BT,
                rows.sampled_BT,
                self._config.generation.temperature,
                with_entropies=False,
                positions_BT=rows.positions_BT,
                context=context,
                device=device,
            )
        return {"reference_logprobs_BT": output.logprobs_BT}
