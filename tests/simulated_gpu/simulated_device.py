"""A simulated GPU: tensors that say cuda:0, hold real numbers, compute on the CPU, and refuse what CUDA refuses.

A tensor of the device wraps one on the CPU. Every operation on it comes through :func:`_run`, which raises where CUDA
would raise because devices mix, counts what waits for the device and what crosses the bus, and computes on the CPU.
Of streams one thing is simulated: what the host does not wait for on a stream of its own happens as late as it can.
NCCL is not simulated, and of kernels none but that for packed rows. :func:`install` patches torch for good, so call it
in a process of its own.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from operator import attrgetter
from typing import Any, ClassVar

import simulated_kernels
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
GPUS = 2
_INDEXING = {
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index_put.default,
}
_COPIES = {aten.copy_.default, aten._to_copy.default}
_EMPTY = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
_SIZE_UNKNOWN = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
}
"""The size of the result depends on numbers, so the host has to wait for them."""
_NOT_DETERMINISTIC = {aten.cumsum.default: "cumsum_cuda_kernel"}
"""Kernels for numbers with a point that CUDA has no deterministic form of, as far as the package could use them."""
_READING = {aten._local_scalar_dense.default, aten.equal.default}
"""The result is a number on the host."""


class Traffic:
    """What has waited for the device and what has crossed the bus, by the place in the code that caused it."""

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        """Times that the host waited, by place."""
        self.to_host: Counter[str] = Counter()
        """Bytes by place."""
        self.to_device: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        """Copies to the device that the host does not wait for, by "pinned" or "pageable" and place."""
        self.most_float64 = 0
        """Elements of the largest float64 tensor on the device."""


_listening: list[Traffic] = []
allocations: list[Callable[[int, int, int, Any], None]] = []
"""Told of each tensor that is made: its GPU, the address and the bytes of its memory, and what lives as long."""
crossings: list[Callable[[str, int], None]] = []
"""Told of each copy over the bus: "to_host", or "pinned" or "pageable" to a GPU; and of its bytes."""
_backward: list[int] = []
"""The GPU of the backward pass that is under way."""


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Count what happens within."""
    found = Traffic()
    _listening.append(found)
    try:
        yield found
    finally:
        _listening.remove(found)


def _place() -> str:
    """The innermost line of code that is neither torch's nor the simulation's: "package/path.py function"."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/torch/" not in path and path != __file__:
            return f"{'/'.join(path.split('/')[-3:])} {frame.f_code.co_name}"
        frame = frame.f_back
    return "?"


def _waits() -> None:
    for found in _listening:
        found.waits[_place()] += 1


def _crosses(way: str, size: int) -> None:
    for found in _listening:
        getattr(found, way)[_place()] += size


class _Life:
    """Lives as long as its tensor: a tensor itself cannot be swapped once something refers to it weakly."""


class SimulatedTensor(torch.Tensor):
    """A tensor of a simulated GPU.

    To torch's C++ code it is a CPU tensor without memory, so autograd needs no CUDA; Python code sees a CUDA tensor.
    """

    held: Tensor
    """The numbers, on the CPU."""
    index: int
    life: _Life

    @staticmethod
    def __new__(cls, held: Tensor, index: int) -> SimulatedTensor:
        options = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, held.size(), **options, layout=held.layout, device="cpu")
        made.held, made.index = held, index
        _used.add(index)
        memory = held.untyped_storage()
        address = memory.data_ptr()
        for taken in allocations:
            made.life = _Life()
            taken(index, address, memory.nbytes(), made.life)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run_unless_wrapped(function, types, args, kwargs or {})

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index)

    is_cuda, is_cpu = property(lambda self: True), property(lambda self: False)

    def get_device(self) -> int:
        return self.index

    def to(self, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        dtype = self.dtype if dtype is None else dtype
        if device is None or _on(device) == self.index:
            return super().to(dtype, copy=copy)
        if device.type == "cpu" and torch._C._current_graph_task_id() != -1:  # in a backward pass: see _target
            return torch.empty_like(self.held, dtype=dtype).copy_(self, non_blocking)
        return aten._to_copy(self, device=device, dtype=dtype, non_blocking=non_blocking)

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
        return self.to("cpu")

    def cuda(self, device: Any = "cuda", non_blocking: bool = False, **kwargs: Any) -> Tensor:
        return self.to(device, non_blocking=non_blocking)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        _backward.append(self.index)
        try:
            super().backward(*args, **kwargs)
        finally:
            _backward.pop()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        text = f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
        raise TypeError(text + "memory first.")

    __array__ = numpy

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Which tensors share memory is asked when a model is saved."""
        return self.held.untyped_storage()

    def record_stream(self, stream: SimulatedStream) -> None:
        """Memory is not used again here while a stream needs it."""

    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        return f"SimulatedTensor({self.held!r}, {self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copied: Tensor = SimulatedTensor(self.held.clone(), self.index)
            if isinstance(self, nn.Parameter):
                copied = nn.Parameter(copied, self.requires_grad)
            memo[id(self)] = copied
        return memo[id(self)]


class _Factories(TorchDispatchMode):
    """Sees operations without a tensor of the device, which may make one or move one there."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run_unless_wrapped(function, types, args, kwargs or {})


def _run_unless_wrapped(function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What wraps tensors of the device, such as a DTensor, comes first: it then asks for what is within. Tensors
    without numbers, by which it finds shapes, are on no device.
    """
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return function(*args, **kwargs)
    if any(hasattr(kind, "__tensor_flatten__") or issubclass(kind, FakeTensor) for kind in types):
        return NotImplemented
    return _run(function, args, kwargs)


def _on(device: Any) -> int | None:
    """The number of the GPU; None for the CPU."""
    if isinstance(device, int):
        device = torch.device("cuda", device)
    device = torch.device(device)
    if device.type != "cuda":
        return None
    index = current_device() if device.index is None else device.index
    if index >= GPUS:
        raise RuntimeError("CUDA error: invalid device ordinal")
    _initialize()
    return index


def _numbered(device: Any) -> Any:
    """torch's C++ code asks CUDA itself which GPU is the current one."""
    if device == "cuda" or (isinstance(device, torch.device) and device.type == "cuda" and device.index is None):
        _here()  # Ray's actors work in threads that are not Python's
        return torch.device("cuda", current_device())
    return device


def current_device() -> int:
    """That of this thread."""
    return getattr(_thread, "device", 0)


@contextmanager
def _with_device(device: Any) -> Iterator[None]:
    before = current_device()
    _set_device(device)
    try:
        yield
    finally:
        _thread.device = before


def _set_device(device: Any) -> None:
    _thread.device = _on("cuda" if device is None else device) or 0
    _here()


_used: set[int] = set()
"""The GPUs on which this process has had tensors."""
_state: dict[str, bool] = {"initialized": False, "forked": False}


def _initialize() -> None:
    """From its first use on, a process that is forked from this one cannot use the GPUs."""
    if _state["forked"]:
        text = "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
        raise RuntimeError(text + "'spawn' start method")
    _state["initialized"] = True


def _forked() -> None:
    _state["forked"] = _state["initialized"]


def _place_of(tensor: Tensor) -> int | None:
    return tensor.index if isinstance(tensor, SimulatedTensor) else None


def _run(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute on the CPU, as if on the device."""
    tensors = list(_tensors_in((*args, *kwargs.values())))
    here = next((x.index for x in tensors if isinstance(x, SimulatedTensor)), None)
    asked = kwargs.get("device")
    target = _target(function, asked, here)
    if here is None and target is None:
        return function(*args, **kwargs)
    if function in _COPIES:
        source = args[1] if function is aten.copy_.default else args[0]
        if function is aten.copy_.default:
            target, kind = _place_of(args[0]), args[0].dtype
            non_blocking = bool(args[2]) if len(args) > 2 else False
        else:
            kind, non_blocking = kwargs.get("dtype") or source.dtype, kwargs.get("non_blocking", False)
        _count_copy(source, kind, target, non_blocking)
    else:
        _require_one_device(function, args, kwargs, tensors, here, target)
        _count_waits(function, args, tensors)
        _require_deterministic(function, args)
    if asked is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if function is aten.copy_.default and non_blocking and _stream() is not None:
        place, source = (getattr(tensor, "held", tensor) for tensor in args[:2])
        _stream().pending.append(partial(place.copy_, source))
        return args[0]
    owners = {id(x.held): x for x in tensors if isinstance(x, SimulatedTensor)}
    held = partial(_mapped, SimulatedTensor, attrgetter("held"))
    out = function(*map(held, args), **{name: held(value) for name, value in kwargs.items()})
    if function in _EMPTY and out.dtype != torch.bool:
        out.untyped_storage().fill_(0xFF)  # else it may hold the right numbers, left there by the test before

    def wrapped(x: Tensor) -> Tensor:
        x = x.trigger_wait() if isinstance(x, AsyncCollectiveTensor) else x
        owner = owners.get(id(x))
        if owner is None:
            made = x if target is None else SimulatedTensor(x, target)
            if target is not None and x.dtype == torch.float64:
                for found in _listening:
                    found.most_float64 = max(found.most_float64, x.numel())
            return made
        if owner.shape != x.shape or owner.stride() != x.stride():
            raise NotImplementedError(f"{function} changes the shape of a tensor in place; the simulation cannot")
        return owner

    return _mapped(Tensor, wrapped, out)


def _target(function: Any, asked: Any, here: int | None) -> int | None:
    """Where the result will be.

    torch's C++ code asks for a CPU tensor where it means the device of a tensor at hand (see SimulatedTensor).
    """
    if asked is None or _on(asked) is not None:
        return here if asked is None else _on(asked)
    backward = _backward[-1] if _backward and torch._C._current_graph_task_id() != -1 else None
    if function is aten._to_copy.default:
        return None if backward is None else here
    return backward if here is None else here


def _tensors_in(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)


def _mapped(kind: type, function: Callable[[Any], Any], value: Any) -> Any:
    """The value with every tensor of that kind replaced, also within lists and tuples."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(kind, function, part) for part in value])
    return value


def _count_copy(source: Tensor, kind: torch.dtype, target: int | None, non_blocking: bool) -> None:
    """Count a copy as torch makes it between host and device: the host waits unless it need not (``non_blocking``), and
    where the type changes, it changes on the host unless the host does not wait.
    """
    start = _place_of(source)
    if (start is None) == (target is None) or source.numel() == 0:
        return
    to_host = target is None
    host_type, device_type = (kind, source.dtype) if to_host else (source.dtype, kind)
    size = source.numel() * (host_type if non_blocking else device_type).itemsize
    _crosses("to_host" if to_host else "to_device", size)
    pinned = not to_host and source.untyped_storage().data_ptr() in SimulatedRuntime.pinned
    for crossed in crossings:
        crossed("to_host" if to_host else "pinned" if pinned else "pageable", size)
    if non_blocking and not to_host:
        for listener in _listening:
            listener.copies[f"{'pinned' if pinned else 'pageable'} {_place()}"] += 1
    if not non_blocking or (to_host and _stream() is None):  # to pageable memory the host copies by itself
        _waits()


def _require_one_device(
    function: Any, args: Any, kwargs: Any, tensors: list[Tensor], here: int | None, target: int | None
) -> None:
    """Raise as CUDA does where devices mix: tensors of several, or a generator of another."""
    generator = kwargs.get("generator")
    if target is not None and generator is not None and generator.device.type != "cuda":
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    if function in _INDEXING:
        return _require_indices(args, here)
    # A number that is on the host as a tensor may take part where elements are combined, and only there.
    lone = torch.Tag.pointwise in function.tags or function is aten.fill_.Tensor
    places = {_place_of(x) for x in tensors if not (lone and x.ndim == 0 and not isinstance(x, SimulatedTensor))}
    if len(places) > 1:
        names = " and ".join(sorted({str(x.device) for x in tensors}))
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {names}! ({function})"
        )
    return None


def _require_deterministic(function: Any, args: Any) -> None:
    kernel = _NOT_DETERMINISTIC.get(function)
    if kernel is not None and args[0].is_floating_point() and torch.are_deterministic_algorithms_enabled():
        raise RuntimeError(
            f"{kernel} does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms"
            "(True)'"
        )


def _require_indices(args: Any, here: int | None) -> None:
    self, indices = args[0], [index for index in args[1] if isinstance(index, Tensor)]
    others = [index for index in indices if _place_of(index) not in (None, _place_of(self))]
    if others:
        raise RuntimeError(
            f"indices should be either on cpu or on the same device as the indexed tensor ({self.device})"
        )
    values = args[2] if len(args) > 2 else None
    if isinstance(values, Tensor) and _place_of(values) != _place_of(self) and (here is None or values.ndim > 0):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{self.device} and {values.device}! (index_put_)"
        )
    for index in indices:
        if _place_of(self) is not None and _place_of(index) is None:  # torch copies it to the device, and waits
            _crosses("to_device", index.nbytes)
            _waits()


def _count_waits(function: Any, args: Any, tensors: list[Tensor]) -> None:
    on_device = any(isinstance(x, SimulatedTensor) for x in tensors)
    masked = function in _INDEXING and any(
        isinstance(x, SimulatedTensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1]
    )
    if on_device and (masked or function in _SIZE_UNKNOWN or function in _READING):
        _waits()
    if on_device and function is aten._local_scalar_dense.default:
        _crosses("to_host", tensors[0].element_size())


def share_tensor(tensor: Tensor) -> tuple[Any, ...]:
    """In place of CUDA IPC: the memory that holds the numbers is shared."""
    if not isinstance(tensor, SimulatedTensor):
        return reduce_tensor(tensor)
    return shared, (*reduce_tensor(tensor.held), tensor.index)


def shared(rebuild: Any, arguments: tuple[Any, ...], storage_device: int) -> Tensor:
    """The tensor of another process, on the GPU that has this number here."""
    held = rebuild(*arguments)
    foreign.add(held.untyped_storage().data_ptr())
    return SimulatedTensor(held, _on(torch.device("cuda", storage_device)) or 0)


foreign: set[int] = set()
"""Addresses of memory that another process has taken."""


class SimulatedEvent:
    """What a stream has been asked to do up to here."""

    def __init__(self) -> None:
        self.upto: list[Callable[[], Any]] = []
        self.index = current_device()

    def wait(self, stream: SimulatedStream | None = None) -> None:
        """Have the stream wait for it."""
        if stream is not None:
            stream.wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _waits()
        self.happen()

    def record(self, stream: SimulatedStream | None = None) -> None:
        """Without a stream, of the one of the current device, wherever tensors are."""
        stream = stream or _stream()
        if stream is not None:
            self.stream, self.upto, self.index = stream, list(stream.pending), stream.index

    def happen(self) -> None:
        """Do what the stream was asked up to here, if it has not been done."""
        for work in self.upto:
            if work in self.stream.pending:
                self.stream.pending.remove(work)
                work()


class SimulatedStream:
    """Copies that it has been asked for, and has not begun.

    Args:
        device: its GPU.
        at_once: it is the one on which everything happens at once.
    """

    def __init__(self, device: Any = None, priority: int = 0, at_once: bool = False) -> None:
        self.pending: list[Callable[[], Any]] = []
        self.index = _on("cuda" if device is None else device) or 0
        self._at_once = at_once

    def wait_event(self, event: SimulatedEvent) -> None:
        """The stream of the tensors themselves is never behind, but that of another GPU says nothing of them."""
        assert event.index == self.index, f"GPU {self.index} waits for what GPU {event.index} was asked to do"
        if self._at_once:
            event.happen()

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        """The event, or a new one."""
        event = event or SimulatedEvent()
        event.record(self)
        return event

    def wait_stream(self, stream: SimulatedStream) -> None:
        """The stream on which everything happens at once has nothing that could be waited for."""
        assert stream.index == self.index, f"GPU {self.index} waits for GPU {stream.index}"

    def synchronize(self) -> None:
        _waits()
        while self.pending:
            self.pending.pop(0)()


class _OnStream:
    """Within, any number of times, this thread asks a stream; with None, the one that it has asked before."""

    def __init__(self, stream: SimulatedStream | None) -> None:
        self._stream, self._before = stream, list[SimulatedStream | None]()

    def __enter__(self) -> None:
        self._before.append(_stream())
        _thread.stream = self._stream or _stream()

    def __exit__(self, *error: object) -> None:
        _thread.stream = self._before.pop()


def _stream() -> SimulatedStream | None:
    """That of this thread; None for the one on which everything happens at once."""
    return getattr(_thread, "stream", None)


class SimulatedRuntime:
    """CUDA's own functions for memory of the host."""

    pinned: ClassVar[dict[int, int]] = {}
    """Bytes by address."""

    @classmethod
    def cudaHostRegister(cls, address: int, size: int, flags: int) -> int:  # noqa: N802
        """CUDA opens a context on the current GPU, which takes half a gigabyte of it."""
        if _used and current_device() not in _used:
            raise RuntimeError(f"a context is opened on GPU {current_device()}, on which this process has nothing")
        cls.pinned[address] = size
        return 0

    @classmethod
    def cudaHostUnregister(cls, address: int) -> int:  # noqa: N802
        del cls.pinned[address]
        return 0


def _pinned(tensor: Tensor) -> Tensor:
    copied = tensor.clone()
    address = copied.untyped_storage().data_ptr()
    SimulatedRuntime.pinned[address] = copied.nbytes  # torch does it with a context that there is
    weakref.finalize(copied, SimulatedRuntime.cudaHostUnregister, address)
    return copied


_thread = threading.local()


def _here() -> None:
    """From now on tensors can be made on the device in this thread."""
    if not hasattr(_thread, "factories"):
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(numbers, device=...) then asks the mode below
        _thread.factories = _Factories()
        _thread.factories.__enter__()


def install() -> None:
    """Let this process have ``GPUS`` simulated GPUs from now on; in this thread, tensors can be made there."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    cuda: Any = torch.cuda
    cuda._lazy_init = _initialize
    cuda.is_available = lambda: True
    cuda.is_initialized = lambda: _state["initialized"] and not _state["forked"]
    cuda.device_count = lambda: GPUS
    cuda.current_device, cuda.set_device, cuda.device = current_device, _set_device, _with_device
    cuda.is_bf16_supported = lambda *args, **kwargs: True
    cuda.get_device_name = lambda device=None: "simulated GPU"
    cuda.mem_get_info = lambda device=None: (80 * 10**9, 80 * 10**9)
    cuda.get_device_capability = lambda *args: (9, 0)
    cuda.manual_seed_all = cuda.manual_seed = lambda seed: None
    cuda.get_rng_state_all = lambda: [torch.zeros(16, dtype=torch.uint8) for _ in range(GPUS)]
    cuda.set_rng_state = lambda state, device=0: None
    cuda.synchronize = lambda device=None: _waits()
    cuda.Stream, cuda.Event, cuda.stream = SimulatedStream, SimulatedEvent, _OnStream
    cuda.current_stream = lambda device=None: _stream() or SimulatedStream(device, at_once=True)
    cuda.cudart = lambda: SimulatedRuntime
    Tensor.pin_memory = _pinned
    Tensor.is_pinned = lambda self, device=None: self.untyped_storage().data_ptr() in SimulatedRuntime.pinned
    Tensor.cuda = lambda self, device=None, **options: self.to("cuda" if device is None else device, **options)
    to = Tensor.to
    Tensor.to = lambda self, *args, **options: to(self, *map(_numbered, args), **options)
    os.register_at_fork(after_in_child=_forked)
    simulated_kernels.install()
    _redirect_autocast()
    _here()


def _redirect_autocast() -> None:
    """Autocast of the device is torch's for the CPU; that for the CPU does nothing to tensors of the device."""
    autocast: Any = torch.autocast
    start, is_enabled, kind = autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype

    @wraps(start)
    def begin(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        if device_type != "cuda":
            dtype, enabled = kind("cpu"), is_enabled("cpu")
        start(self, "cpu", dtype, enabled, cache_enabled)

    autocast.__init__ = begin
    torch.is_autocast_enabled = lambda device="cuda": device == "cuda" and is_enabled("cpu")
    torch.get_autocast_dtype = lambda device: kind("cpu")
