"""What runs in a generator process: take a request, load the weights it names, sample, answer.

Two threads keep the pipe moving, so that neither process ever waits for the other's main thread: one reads requests
(and ends the process when the learner is gone), one sends answers.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from async_rlhf.generation.protocol import Completions, SamplingParams
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.types import Prompt
from async_rlhf.weights import SnapshotRing


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Enough to build the policy's architecture; its weights come as snapshots."""

    model_class: type[PreTrainedModel]
    config: PretrainedConfig
    dtype: torch.dtype
    device: str
    num_threads: int | None
    """CPU threads; None leaves torch's choice."""
    autocast: torch.dtype | None = None

    def build(self) -> PreTrainedModel:
        """The model on its device, with weights still to be loaded."""
        with torch.device(self.device):
            model = self.model_class._from_config(self.config, dtype=self.dtype)
        return model.eval()


@dataclass(frozen=True, slots=True)
class Request:
    """One worker's share of a batch."""

    batch: int
    version: int | None
    """None for the newest that there is when the worker starts."""
    prompts: tuple[Prompt, ...]
    probe: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """The completions of a request, and proof of the weights they come from."""

    batch: int
    version: int
    digests: dict[str, str]
    """Of each tensor, as read back from the engine after it loaded them."""
    completions: Completions
    started: float
    """Monotonic clock."""
    ended: float
    load_seconds: float
    probe: list[float] | None = None
    """Log-probabilities of the probe's sequences, where the request asked for them."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The engine raised; the learner raises it again."""

    message: str
    traceback: str
    out_of_memory: bool = False
    """A new process, with its memory whole, may succeed where this one did not."""


def run_worker(pipe: Connection, spec: ModelSpec, params: SamplingParams, ring: SnapshotRing, beat: Any) -> None:
    """Serve requests until None comes or the learner is gone.

    Args:
        pipe: to the learner.
        spec: the model.
        params: how to sample.
        ring: the weights.
        beat: shared memory that takes the time, on the monotonic clock, of the latest sign of life.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the learner, which ends its workers
    logging.getLogger("transformers").setLevel(logging.ERROR)
    requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
    replies: queue.SimpleQueue[Reply | Failure | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(pipe, requests), daemon=True).start()
    sender = threading.Thread(target=_send, args=(pipe, replies))
    sender.start()
    try:
        if spec.num_threads is not None:
            torch.set_num_threads(spec.num_threads)
        engine = TransformersEngine(spec.build(), params, version=-1, autocast=spec.autocast)
        engine.beat_with(lambda: setattr(beat, "value", time.monotonic()))
        held: dict[str, str] = {}
        while (request := requests.get()) is not None:
            started = time.monotonic()
            version = ring.newest if request.version is None else request.version
            if version != engine.version:
                held = engine.load(ring.views(version), version)
            loaded = time.monotonic()
            completions = engine.generate(request.prompts)
            ended = time.monotonic()
            probe = engine.probe() if request.probe else None
            replies.put(Reply(request.batch, version, held, completions, started, ended, loaded - started, probe))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        replies.put(Failure(text, traceback.format_exc(), _is_out_of_memory(error)))
    finally:
        replies.put(None)
        sender.join()


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def _read(pipe: Connection, requests: queue.SimpleQueue[Request | None]) -> None:
    try:
        while True:
            requests.put(pipe.recv())
    except (EOFError, OSError):
        os._exit(0)  # the learner is gone: nobody needs what this process is computing


def _send(pipe: Connection, replies: queue.SimpleQueue[Reply | Failure | None]) -> None:
    try:
        while (reply := replies.get()) is not None:
            pipe.send(reply)
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)
