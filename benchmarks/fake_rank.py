"""One rank of a learner without its memory: weights and activations have shapes and types, but no numbers.

Rows of tokens are real, so everything that depends on them goes as it would. What is computed from weights is
torch's FakeTensor, and the ranks are those of its fake process group, so a 70B learner on 64 ranks runs on a laptop.
The device is called "cpu"; the same tensors would be held on a GPU, except for workspaces of kernels, of NCCL and of
the allocator, which are not counted.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from async_rlhf.distributed.collectives import Ranks

T = TypeVar("T")

KINDS = ("weights", "gradients", "optimiser", "frozen", "gathered", "logits", "activations")
_WEIGHTS = ("weights", "frozen", "gathered")
HOST = "host"
"""What lies in the host's memory, so does not count."""


@dataclass
class Held:
    """A storage while it has one size: from one event to another, in bytes."""

    size: int
    since: int
    kind: str
    until: float = float("inf")


@dataclass(frozen=True)
class Peak:
    """The most that was held during a phase.

    Args:
        total: bytes.
        kinds: bytes of each kind at that moment; they add up to ``total``.
    """

    total: int
    kinds: dict[str, int]


class Ledger:
    """Every storage that a fake tensor has had, from when to when, and the most that was held at any moment."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[weakref.ref[Any], Held]] = {}
        self._past: list[Held] = []
        self._time, self._now = 0, 0
        self._most = (0, 0)
        self._phase = self._during = ""
        self.peaks: dict[str, Peak] = {}
        self.vocabulary = -1
        self.weight_shapes: set[tuple[int, ...]] = set()
        self.backward = False
        """Whether what is made may be gradients."""
        self.kept: Any = None
        """What somebody outside would hold."""

    def see(self, tensor: Tensor, made_by: str, source: str = "") -> None:
        """Note the storage of a tensor, unless it is known."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._held:
            self._add(storage, Held(storage.nbytes(), self._time, self._kind(tensor, made_by, source)))

    def _kind(self, tensor: Tensor, made_by: str, source: str) -> str:
        if self.vocabulary in tensor.shape[-1:]:
            return "logits"
        if made_by.startswith("fsdp "):
            return "gradients" if "foreach_reduce" in made_by else "gathered"
        if self.backward and (not source or tuple(tensor.shape) in self.weight_shapes) and source not in _WEIGHTS:
            return "gradients"
        cast = source in _WEIGHTS and "_to_copy" in made_by
        return "gathered" if cast or "all_gather" in made_by else "activations"

    def _add(self, storage: torch.UntypedStorage, held: Held) -> None:
        key = storage._cdata
        self._held[key] = (weakref.ref(storage, lambda _: self._drop(key)), held)
        self._move(held.size if held.kind != HOST else 0)

    def _drop(self, key: int) -> None:
        _, held = self._held.pop(key)
        held.until = self._time
        self._past.append(held)
        self._move(-held.size if held.kind != HOST else 0)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Note that a known storage has another size now."""
        found = self._held.get(storage._cdata)
        if found is not None and found[1].size != storage.nbytes():
            self._drop(storage._cdata)
            self._add(storage, Held(storage.nbytes(), self._time, found[1].kind))

    def _move(self, size: int) -> None:
        self._time += 1
        self._now += size
        if self._now > self._most[0]:
            self._most = (self._now, self._time)

    def kind_of(self, tensor: Tensor) -> str:
        found = self._held.get(tensor.untyped_storage()._cdata)
        return found[1].kind if found else ""

    def name(self, tensors: list[Tensor], kind: str) -> None:
        """Say what the storages of these tensors are."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if not isinstance(local, FakeTensor):
                continue
            self.see(local, "", kind)
            _, held = self._held[local.untyped_storage()._cdata]
            self._now -= held.size if kind == HOST and held.kind != HOST else 0
            held.kind = kind

    def phase(self, name: str) -> None:
        """Start a phase, or start it again: its peak is the highest that it had at any time."""
        self.end()
        self._during = self._phase = name
        self._past, self._most = [], (self._now, self._time)

    def at(self, place: str) -> None:
        """Start the part of this phase that belongs to a place in a model."""
        during = self._during
        self.phase(f"{during} {place}")
        self._during = during

    def end(self) -> None:
        """End the phase that is under way."""
        if self._phase and (self._phase not in self.peaks or self._most[0] > self.peaks[self._phase].total):
            self.peaks[self._phase] = self._peak()
        self._phase = ""

    def _peak(self) -> Peak:
        total, at = self._most
        there = [held for _, held in self._held.values() if held.since < at]
        there += [held for held in self._past if held.since < at <= held.until]
        kinds: defaultdict[str, int] = defaultdict(int)
        for held in there:
            kinds[held.kind] += held.size
        kinds.pop(HOST, None)
        return Peak(total, dict(kinds))


class _Mode(FakeTensorMode):
    """The one of all fake tensors, also of copies."""

    def __deepcopy__(self, memo: Any) -> _Mode:
        return self


class _Device(TorchDispatchMode):
    """Sends everything that concerns the device to fake tensors, and lets rows on the host be real."""

    def __init__(self, fake: FakeTensorMode, ledger: Ledger) -> None:
        super().__init__()
        self.fake, self.ledger, self.depth = fake, ledger, 0

    def __torch_dispatch__(
        self, function: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # it calls again, with its local tensor
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return function(*args, **kwargs)  # a model is being made, or DTensor only asks for shapes
        if function is torch.ops._c10d_functional._wrap_tensor_autograd.default:
            return args[0]  # which is the same memory, but as a fake tensor it would be new
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(isinstance(x, FakeTensor) for x in given):
            result = function(*args, **kwargs)
        elif not given and self.depth and _numbers(function, kwargs.get("dtype")):
            with self.fake:
                result = function(*args, **kwargs)
        else:
            return function(*args, **kwargs)
        source = next((self.ledger.kind_of(x) for x in given if isinstance(x, FakeTensor)), "")
        for tensor in tree_leaves(result):
            if isinstance(tensor, FakeTensor):
                self.ledger.see(tensor, str(function) if given else _in_fsdp(), source)
        return result


def _numbers(function: Any, dtype: torch.dtype | None) -> bool:
    """Whether a new tensor is one of many numbers: positions and masks are few, and are asked for their values."""
    if dtype is None:
        return function.overloadpacket is not torch.ops.aten.arange
    return dtype.is_floating_point or dtype == torch.uint8


def _in_fsdp() -> str:
    """The function of FSDP that is under way, if any."""
    frame = sys._getframe(2)
    names = []
    while frame is not None:
        if "_fully_shard" in frame.f_code.co_filename:
            names.append(frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return "fsdp " + " ".join(names[:3]) if names else ""


_READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: 1.0,
    "tolist": lambda x: np.ones(tuple(x.shape)).tolist(),
    "numpy": lambda x: np.zeros(0, dtype=np.uint8),
    "__float__": lambda x: 1.0,
    "__int__": lambda x: 1,
    "__bool__": lambda x: True,
}
_SMALL = 1 << 22


class _Host(TorchFunctionMode):
    """What the host reads from the device: some number, as there is none."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        if args and isinstance(args[0], FakeTensor):
            if name in _READS:
                return _READS[name](args[0])
            if name == "cpu" and args[0].numel() <= _SMALL:  # a weight stays: nobody on the host reads its numbers
                return torch.zeros(args[0].shape, dtype=args[0].dtype)
        return function(*args, **kwargs)


def _summed(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """In place of DDP's own sum over ranks, for which torch's fake group has no result: in place, too."""
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


class FakeRanks(Ranks):
    """This rank of many, of which the others say what it says."""

    def barrier(self, point: str) -> None:
        return

    def broadcast(self, point: str, compute: Callable[[], T]) -> T:
        return compute()

    def gather(self, point: str, value: T) -> list[T]:
        return [value] * self.count

    def collect(self, point: str, value: T) -> Iterator[T]:
        return iter([value] * self.count)


class FakeRank:
    """A device and a process group that hold nothing. Within, models are made by :meth:`new`.

    Args:
        count: ranks.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.ledger = Ledger()
        self._fake = _Mode(allow_non_fake_inputs=True)
        self._device = _Device(self._fake, self.ledger)
        self._open = ExitStack()
        self._blocks: dict[nn.Module, str] = {}

    def __enter__(self) -> FakeRank:
        if self.count > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=self.count)
            self._open.callback(dist.destroy_process_group)
        resize, ledger, call = torch.UntypedStorage.resize_, self.ledger, nn.Module.__call__
        initialise = DistributedDataParallel.__init__

        def initialised(module: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            initialise(module, *args, **kwargs)
            module.register_comm_hook(None, lambda _, bucket: _summed(bucket))

        def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            found = resize(storage, size)
            ledger.resized(storage)
            return found

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            place = self._blocks.get(module)
            if place is not None:
                ledger.at(place)
            with self.computing():
                result = call(module, *args, **kwargs)
            if place is not None and result.requires_grad:
                result.register_hook(lambda _: ledger.at(place))
            return result

        self._open.enter_context(patch.object(torch.UntypedStorage, "resize_", resized))
        self._open.enter_context(patch.object(nn.Module, "__call__", called))
        self._open.enter_context(patch.object(DistributedDataParallel, "__init__", initialised))
        self._open.enter_context(_Host())
        self._open.enter_context(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Within, new tensors of numbers are the device's."""
        self._device.depth += 1
        try:
            yield
        finally:
            self._device.depth -= 1

    def new(self, make: Callable[[], T]) -> T:
        """A model, made on the device."""
        with self._fake:
            return make()

    def follow(self, name: str, blocks: Iterable[nn.Module]) -> None:
        """Make a part of each phase of what happens from the beginning of a model's first two and last two blocks on,
        forward or backward. In between, bytes are a linear function of a block's number.
        """
        every = list(blocks)
        for number, block in enumerate(every):
            nearest = number if number < 2 else number - len(every)
            self._blocks[block] = f"{name} {nearest if nearest >= -2 else 'between'}"
