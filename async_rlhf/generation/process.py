"""Sampling in separate processes: the learner's side.

Each worker has one pipe, which two threads here serve. A worker that dies or hangs is restarted, and whoever is free
samples again what it had; the weights are still in the ring.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import signal
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from async_rlhf.config import ConfigError, OnlineConfig
from async_rlhf.config.engines import find
from async_rlhf.generation.dispatch import Worker
from async_rlhf.generation.engines import ModelSpec
from async_rlhf.generation.placement import worker_devices
from async_rlhf.generation.protocol import Request
from async_rlhf.generation.remote import RemoteGenerator
from async_rlhf.generation.worker import run_worker
from async_rlhf.models.adapters import only_adapter, write_base
from async_rlhf.models.publish import DeviceRing, SnapshotRing, Snapshots
from async_rlhf.system.subprocesses import NO_RANK, context_of, hang_up, start_process

logger = logging.getLogger(__name__)

_ENDING_SECONDS = 10.0
"""For a killed process to be gone. Where process 1 waits for no orphans, as in some containers, it never is."""


class ProcessGenerator(RemoteGenerator):
    """Generator processes that sample the requests of every batch."""

    kind, streams, grows = "generator process", True, True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # Before multiprocessing's own exit handler, which would wait forever for processes that ignore SIGTERM.
        atexit.register(self.close)

    def prepare(self, config: OnlineConfig, policy: PreTrainedModel) -> tuple[Snapshots, int]:
        """See :meth:`RemoteGenerator.prepare`."""
        generation, adapters_only = config.generation, config.lora.publish == "adapter"
        self.devices_of = partial(
            worker_devices,
            generation.device,
            learner=self.parallel.device_of(policy),
            each=generation.vllm.tensor_parallel_size,
            apart=config.own_devices,
        )
        devices = {taken for number in range(generation.workers) for taken in self.devices_of(number)}
        shared = policy.device.type == "cuda" and devices == {f"cuda:{policy.device.index or 0}"}
        self.spec = ModelSpec.for_workers(config, policy, self.parallel, "cpu", generation.num_threads)
        kind = DeviceRing if shared else SnapshotRing
        # Adapters stay on the host, where vLLM reads them.
        on_gpus = not adapters_only and all(device.startswith("cuda") for device in devices)
        self.ring = kind.for_model(policy, self.spec.dtype, config.snapshots, adapters_only, self.parallel, on_gpus)
        architecture = self.spec.model_class
        if architecture.__module__ == "__main__":
            raise ConfigError(
                f"model: {architecture.__name__} is defined in the script itself, where generator processes cannot "
                "find it; must be in a module of its own, or use staleness 0"
            )
        self._base = tempfile.TemporaryDirectory() if adapters_only else None
        if self._base is not None:
            write_base(policy, Path(self._base.name), self.spec.dtype)
            self.spec = replace(self.spec, base=self._base.name, adapter=only_adapter(policy))
            # vLLM gives no log-probabilities of prompts with an adapter.
            self.config = replace(generation, probe_steps=0)
        return self.ring, generation.workers

    def make(self, number: int) -> ProcessWorker:
        """See :meth:`RemoteGenerator.make`."""
        return ProcessWorker(number, self)

    def close(self) -> None:
        """End the processes."""
        atexit.unregister(self.close)
        super().close()
        if self._base is not None:
            self._base.cleanup()


class ProcessWorker(Worker):
    """One generator process.

    Two threads serve its pipe, so that a process that is stopped in the middle of a message blocks nothing here.

    Args:
        number: among the processes.
        generator: whose worker it is.
    """

    def __init__(self, number: int, generator: ProcessGenerator) -> None:
        super().__init__(number, f"generator {number}", generator.arrived)
        devices = generator.devices_of(number)
        spec = replace(generator.spec, device=devices[0])
        self._arguments = (spec, generator.params, generator.ring)
        environment = spec.environment(devices)
        # A fresh interpreter for an engine whose libraries take long to import anyway, or are to be preloaded.
        self._method = "forkserver" if environment is None else "spawn"
        self._environment: dict[str, str | None] = {**NO_RANK, **(environment or {})}
        self.start()

    def start(self) -> None:
        context = context_of(self._method)
        pipe, theirs = context.Pipe()
        self.heartbeat = context.RawValue("d", 0.0)
        self.since = time.monotonic()
        self.starts += 1
        process = context.Process(
            target=run_worker,
            args=(theirs, *self._arguments, self.heartbeat),
            name=f"generator-{self.number}",
            daemon=self._arguments[0].gpus == 1,  # else vLLM starts processes of its own there
        )
        if starting := find(self._arguments[0].engine).starting:
            self.started = self.since
            logger.info("%s: %s", self.label, starting)
        start_process(process, self.label, self._method, self._environment)
        self.process, self._pipe = process, pipe
        theirs.close()  # only the worker holds it now, so its death ends our read
        self._outbox: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(pipe, self.starts), daemon=True).start()
        name = f"requests to {self.label}"
        threading.Thread(target=_write, args=(pipe, self._outbox), name=name, daemon=True).start()

    def _read(self, pipe: Connection, start: int) -> None:
        with suppress(EOFError, OSError):
            while True:
                self.arrive(pipe.recv(), start)
        self.arrive(None, start)

    @property
    def has_begun(self) -> bool:
        """Whether it has given a sign of life since it was started."""
        return bool(self.heartbeat.value)

    def silent_for(self) -> float:
        """Seconds since its last sign of life, or its start, while it had something to do."""
        return time.monotonic() - max(self.heartbeat.value, self.since)

    def kill(self) -> None:
        self.process.kill()

    def end(self) -> str:
        """Wait for it to end, and describe how it ended."""
        hang_up(self._pipe)  # if the fork server is dead, nothing else shows whether it has ended
        self.process.join()
        self._end_ranks()
        self._outbox.put(None)  # the thread that sends ends, too
        return f"died (exit code {self.process.exitcode})"

    def submit(self, request: Request) -> None:
        """Send a request; its time begins. If the process has died, it is noticed by the thread that reads."""
        self.since = time.monotonic()
        self.open.append(request)
        self._outbox.put(request)

    def close(self) -> None:
        self._outbox.put(None)
        if self.open:  # nothing waits for these requests any more
            self.process.kill()
        self.process.join(timeout=5)
        hang_up(self._pipe)
        if self.process.is_alive():
            self.process.kill()
        self.end()

    def _end_ranks(self) -> None:
        """Wait for the end of the processes that vLLM started in it, which outlive it: a restart needs their GPUs."""
        deadline = time.monotonic() + _ENDING_SECONDS
        with suppress(ProcessLookupError):  # its group is empty
            while self._arguments[0].gpus > 1 and time.monotonic() < deadline:
                os.killpg(self.process.pid, signal.SIGKILL)
                time.sleep(0.01)


def _write(pipe: Connection, outbox: queue.SimpleQueue[Request | None]) -> None:
    """Send requests until a None, which ends the process, or until the process is gone."""
    with suppress(OSError):
        while True:
            request = outbox.get()
            pipe.send(request)
            if request is None:
                return
