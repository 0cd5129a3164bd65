"""A model that waits as one on a device of its own does: while a GPU computes, no core of the host is needed."""

from __future__ import annotations

import functools
import multiprocessing
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GPTNeoXForCausalLM
from workload import neox

STEP_SECONDS, ROW_SECONDS, TOKEN_SECONDS = 0.015, 0.0005, 0.00025
"""Of a step of decoding, of each row of it, and of each token of any other pass."""


class WaitingModel(GPTNeoXForCausalLM):
    """Passes take a time by rows and tokens."""

    @functools.wraps(GPTNeoXForCausalLM.forward)  # engines look at what it takes
    def forward(self, input_ids: Tensor, *others: Any, **options: Any) -> Any:
        rows, length = input_ids.shape
        time.sleep(STEP_SECONDS + ROW_SECONDS * rows if length == 1 else TOKEN_SECONDS * rows * length)
        return super().forward(input_ids, *others, **options)


def small(kind: type[GPTNeoXForCausalLM], vocabulary: int, positions: int, **more: Any) -> Any:
    """So small that waiting is all of its time."""
    return neox(vocabulary, 16, 1, 2, positions, intermediate_size=16, kind=kind, **more)


def waiting_policy(vocabulary: int, positions: int) -> WaitingModel:
    return small(WaitingModel, vocabulary, positions)


class SleepingModel(GPTNeoXForCausalLM):
    """Each pass ends when a device would have done it, which takes ``config.seconds`` a row at speed 1; generator
    process n has speed n of ``config.speeds``. What the host does meanwhile costs nothing.
    """

    @functools.wraps(GPTNeoXForCausalLM.forward)
    def forward(self, input_ids: Tensor, *others: Any, **options: Any) -> Any:
        rows, length = input_ids.shape
        began = time.monotonic() if length > 1 else self.done
        out = super().forward(input_ids, *others, **options)
        number = int(multiprocessing.current_process().name.removeprefix("generator-"))
        self.done = began + rows * self.config.seconds / self.config.speeds[number]
        time.sleep(max(0.0, self.done - time.monotonic()))
        return out


def sleeping_policy(vocabulary: int, positions: int, seconds: float, speeds: Sequence[float]) -> SleepingModel:
    return small(SleepingModel, vocabulary, positions, seconds=seconds, speeds=list(speeds))


class CountingModel(GPTNeoXForCausalLM):
    """Counts down: after token n comes n - 1, and after token 1 the last of the vocabulary. So the last token of a
    prompt is the length of its answer. Each step of decoding takes the same time, however many rows it has, as on a
    device that mostly reads weights, and what the host does meanwhile costs nothing; a token of any other pass takes
    ``config.token_seconds``.
    """

    done = 0.0
    """When the device has done the last step."""

    @functools.wraps(GPTNeoXForCausalLM.forward)
    def forward(self, input_ids: Tensor, *others: Any, **options: Any) -> Any:
        rows, length = input_ids.shape
        out, step = super().forward(input_ids, *others, **options), self.config.step_seconds
        if length > 1:
            time.sleep(self.config.token_seconds * rows * length)
            return out
        now = time.monotonic()
        self.done = step + (self.done if now - self.done < step else now)
        time.sleep(max(0.0, self.done - now))
        return out


def counting_policy(vocabulary: int, positions: int, step_seconds: float, token_seconds: float) -> CountingModel:
    """One layer, which adds nothing."""
    times = {"step_seconds": step_seconds, "token_seconds": token_seconds}
    # Without an end of its own it is token 2, which would end every answer two tokens early.
    ends = {"eos_token_id": vocabulary - 1, "intermediate_size": 16, "kind": CountingModel}
    model = neox(vocabulary, vocabulary, 1, 2, positions, **ends, **times)
    with torch.no_grad():
        for weights in model.parameters():
            weights.zero_()
        model.gpt_neox.final_layer_norm.weight.fill_(1.0)
        model.get_input_embeddings().weight.copy_(torch.eye(vocabulary))
        after = torch.arange(vocabulary) - 1
        after[1] = vocabulary - 1
        model.get_output_embeddings().weight[after[1:], torch.arange(1, vocabulary)] = 5.0
    return model
