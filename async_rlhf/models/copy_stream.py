"""Weights that leave a model: its thread goes on as soon as they are copied, the rest is done beside it.

On the host a copy goes straight to its place. On a GPU the weights are rounded and copied within the device, which
takes milliseconds; they cross the bus on a stream of their own, so that neither the host nor its next kernels wait.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from async_rlhf.distributed.parallel import Parallel, trainable

logger = logging.getLogger(__name__)

Work = Callable[[], None]
Later = Callable[[Work], "Future[None]"]
"""Does work some time, in the order in which it is handed over."""
_LEAST_ROOM = 1 << 30


def at_once(work: Work) -> Future[None]:
    """Do it now."""
    work()
    done: Future[None] = Future()
    done.set_result(None)
    return done


class BackgroundThread:
    """Does work in order. After an error nothing more is done, and :meth:`require` raises it."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, name)
        self._failure: BaseException | None = None
        self.began: float | None = None
        """When the first work began since this was last set to None, on the monotonic clock."""

    def __call__(self, work: Work) -> Future[None]:
        """Hand over work. Returns at once."""
        return self._pool.submit(self._do, work)

    def _do(self, work: Work) -> None:
        if self._failure is None:
            self.began = self.began or time.monotonic()
            try:
                work()
            except BaseException as error:  # of any kind: it is raised where the run next asks
                self._failure = error

    def require(self) -> None:
        """Raise what has gone wrong so far."""
        if self._failure is not None:
            raise self._failure

    def finish(self) -> None:
        """Wait until everything is done, and raise what has gone wrong."""
        self._pool.submit(int).result()
        self.require()

    def close(self) -> None:
        """Wait for what is under way, and end the thread."""
        self._pool.shutdown()


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """One for all versions: torch has 32 streams, and a new one is in the end one that somebody else works on."""
    return torch.cuda.Stream(device)


class AsyncCopy:
    """Copies of tensors on their way to where they are needed.

    What is under way on a device takes no more than gradients would, which nobody holds between two updates.

    Args:
        model: that they leave.
        parallel: how its weights are sharded.
        later: does what need not be done now.
    """

    def __init__(self, model: nn.Module, parallel: Parallel, later: Later) -> None:
        self._device = device = parallel.device or next(model.parameters()).device
        self._stream = _stream_of(device) if device.type == "cuda" else None
        self._later = later
        held = sum(parameter.nbytes for parameter in trainable(model))
        self._room = max(_LEAST_ROOM, held // (parallel.shards if parallel.is_sharded else 1))
        self._under_way: deque[tuple[int, Future[None]]] = deque()
        own = (getattr(tensor, "_local_tensor", tensor) for tensor in (*model.parameters(), *model.buffers()))
        self._own = {tensor.untyped_storage().data_ptr() for tensor in own} if self._stream is not None else set()

    def copy(self, tensor: Tensor, place: Tensor) -> None:
        """Copy a tensor, which may change as soon as this returns.

        Args:
            tensor: of any type.
            place: for it; filled once what :meth:`end` is given begins.
        """
        if self._stream is None or tensor.device == place.device:
            place.copy_(tensor)
            return
        # Rounded before it crosses the bus: a copy that rounds moves the wider type, and rounds on the host.
        copied = tensor.to(place.dtype)
        if copied.untyped_storage().data_ptr() in self._own:  # else it was rounded, gathered or merged
            copied = copied.clone()
        while self._under_way and sum(size for size, _ in self._under_way) + copied.nbytes > self._room:
            self._under_way.popleft()[1].result()
        work = partial(self._beside, self._ready(), partial(place.copy_, copied, non_blocking=True))
        self._under_way.append((copied.nbytes, self._later(work)))

    def end(self, work: Work) -> Future[None]:
        """Have this done when all copies are in place."""
        return self._later(partial(self._beside, self._ready(), work))

    def _ready(self) -> Any:
        """Marks what the device has been asked to do so far."""
        if self._stream is None:
            return None
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._device))  # not of the current device, which may be another GPU
        return ready

    def _beside(self, ready: Any, work: Callable[[], Any]) -> None:
        """Do work that needs what was marked, apart from what the device is asked to do meanwhile."""
        if self._stream is None:
            work()
            return
        with torch.no_grad(), torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            work()
            self._stream.synchronize()


@contextmanager
def pinned(memory: Tensor) -> Iterator[None]:
    """Within, a GPU copies to this memory of the host by itself; where that cannot be had, copies are slower."""
    runtime: Any = torch.cuda.cudart()
    error = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if error:
        size = memory.nbytes / 1e9
        logger.warning("%.3g GB of the host cannot be pinned (CUDA error %d): weights leave more slowly", size, error)
    try:
        yield
    finally:
        if not error:
            runtime.cudaHostUnregister(memory.data_ptr())
