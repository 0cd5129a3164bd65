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
from multiprocessing.connection import Connection
from typing import Any

import torch

from async_rlhf.config import ConfigError
from async_rlhf.generation.messages import Failure, ModelSpec, Reply, Request
from async_rlhf.generation.protocol import Engine, SamplingParams
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.weights import SnapshotRing


def make_engine(spec: ModelSpec, params: SamplingParams) -> Engine:
    """The engine that the spec asks for, its weights still to be loaded."""
    if spec.vllm is not None:
        from async_rlhf.generation.vllm_engine import VLLMEngine

        return VLLMEngine(spec, params)
    with torch.device(spec.device):
        model = spec.model_class._from_config(spec.config, dtype=spec.dtype)
    return TransformersEngine(model.eval(), params, version=-1, autocast=spec.autocast)


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
        engine = make_engine(spec, params)
        engine.beat_with(lambda: setattr(beat, "value", time.monotonic()))
        held: dict[int, dict[str, str]] = {}

        def load(version: int) -> None:
            if version != engine.version:
                held[version] = engine.load(ring.views(version), version)

        while (request := requests.get()) is not None:
            started = time.monotonic()
            version = ring.newest if request.version is None else request.version
            load(version)
            loaded = time.monotonic()
            engine.refresh = (lambda: load(ring.newest)) if request.in_flight else None
            completions = engine.generate(request.prompts)
            ended = time.monotonic()
            probe = (engine.version, engine.probe()) if request.probe else None
            replies.put(Reply(request.batch, version, held, completions, started, ended, loaded - started, probe))
            held = {engine.version: held[engine.version]}
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        is_config = isinstance(error, ConfigError)
        text = str(error) if is_config else text
        replies.put(Failure(text, traceback.format_exc(), is_config, _is_out_of_memory(error)))
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
