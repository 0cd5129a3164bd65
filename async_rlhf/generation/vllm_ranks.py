"""A model of vLLM's that several processes share (tensor parallel): how they start, get weights and end.

vLLM's scheduler stays in the generator's process, so that it can still be interrupted between two steps. Weights are
not sent to its processes: they map the memory where a snapshot lies, and each takes its share.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from multiprocessing import util
from typing import Any

from torch import Tensor

from async_rlhf.generation.protocol import EngineLostError
from async_rlhf.models.snapshots import Region, SharedTensors
from async_rlhf.models.weights import mapped_at, nameless_file, region_for, tensors_in
from async_rlhf.system.children import started_within

_LOOK_SECONDS = 0.5
_DEATH_SECONDS = 5.0
"""Within which a process that has died is known to be dead, after the others have complained."""


@contextmanager
def several_processes(number: int, threads: int | None) -> Iterator[dict[str, Any]]:
    """Within, vLLM may start its processes. Yields arguments of ``vllm.LLM``.

    Args:
        number: of processes, each with a GPU or a share of the CPU's threads.
        threads: on a CPU, of all of them together; None on GPUs.
    """
    from vllm import envs

    environment: dict[str, str | None] = {"VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn"}
    if threads is not None:
        environment |= threads_of_each(number, threads)
    envs.disable_envs_cache()  # an engine before this one has read them
    with started_within(environment):
        yield {"tensor_parallel_size": number, "distributed_executor_backend": "mp"}


def threads_of_each(number: int, threads: int) -> dict[str, str]:
    """Environment by which so many processes share a CPU. Left to itself, vLLM wants a memory node for each."""
    return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(max(1, threads // number))}


class SeveralProcesses:
    """vLLM's processes, of one model.

    Args:
        llm: of vLLM, just started.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._executor = llm.llm_engine.engine_core.engine_core.model_executor
        self._copy: tuple[int, Region] | None = None
        llm.collective_rpc(end_with, args=(os.getpid(),))
        # Before multiprocessing's own: they ignore SIGTERM, so it would wait for them forever.
        util.Finalize(None, self._executor.shutdown, exitpriority=100)

    def load(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Have all processes load their shares. Returns the digest of each tensor that all of them were given."""
        return same(self._llm.collective_rpc(load_region, args=(self._region(tensors),)))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within, an error that comes of a process's death is raised as such.

        Raises:
            EngineLostError: a process has died.
        """
        try:
            yield
        except Exception as error:
            deadline = time.monotonic() + _DEATH_SECONDS
            while time.monotonic() < deadline:
                if not all(worker.proc.is_alive() for worker in self._executor.workers):
                    raise EngineLostError(f"lost a process of vLLM's: {error}") from error
                time.sleep(_LOOK_SECONDS / 10)
            raise

    def _region(self, tensors: Mapping[str, Tensor]) -> Region:
        """Where other processes find them: where they are, if that is possible, else in a copy."""
        if isinstance(tensors, SharedTensors):
            return tensors.region
        if self._copy is None:
            specs, size = region_for(tensors)
            fd = nameless_file(size)
            self._copy = fd, Region(f"/proc/{os.getpid()}/fd/{fd}", 0, size, specs)
        region = self._copy[1]
        for name, place in tensors_of(region).items():
            place.copy_(tensors[name])
        return region


def same(found: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Digests by name; those on which processes differ are no digests of anything."""
    names = dict.fromkeys(name for each in found for name in each)
    return {name: " or ".join(dict.fromkeys(each.get(name, "none") for each in found)) for name in names}


def load_region(worker: Any, region: Region) -> dict[str, str]:
    """In vLLM's process: :func:`~async_rlhf.generation.vllm_weights.load_weights` from memory of another process."""
    from async_rlhf.generation.vllm_weights import load_weights

    return load_weights(worker, tensors_of(region).items())


def tensors_of(region: Region) -> dict[str, Tensor]:
    """The tensors in a region of any process of this user on this host, without a copy."""
    return tensors_in(_memory(region.path)[region.start : region.start + region.size], region.specs)


@lru_cache(maxsize=2)
def _memory(path: str) -> Tensor:
    return mapped_at(path)


def end_with(worker: Any, parent: int, end: Callable[[int], None] = os._exit) -> None:
    """In vLLM's process: end when the one that has started it is gone, however busy or stuck this one is."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        end(1)

    threading.Thread(target=watch, daemon=True).start()
