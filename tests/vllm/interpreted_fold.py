"""The kernel for checksums on a machine without a GPU: run by Triton's interpreter, and compiled.

A process of its own: TRITON_INTERPRET is read when Triton is imported, and holds for all kernels.
"""

from __future__ import annotations

import json
from functools import partial
from itertools import product

import numpy as np
import torch
import triton
from torch import Tensor

from async_rlhf.models import fold_kernel, weights

MASK = (1 << 64) - 1
SHAPES = ((), (0, 4), (1,), (7,), (64,), (65,), (191, 3), (4, 100))
DTYPES = (torch.uint8, torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64)


def by_hand(tensor: Tensor) -> list[int]:
    """The two sums, word by word, from the bytes in row-major order."""
    data = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    found = [0, 0]
    for place, start in enumerate(range(0, len(data), 8), start=1):
        word = mixed(int.from_bytes(data[start : start + 8], "little"))
        for n, key in enumerate((0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)):
            found[n] += word * (mixed(place * key & MASK) | 1)
    return [number & MASK for number in found]


def mixed(word: int) -> int:
    """MurmurHash3's finaliser for 64 bits."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        word = (word ^ word >> 33) * factor & MASK
    return word ^ word >> 33


def tensors() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    memory = torch.randint(0, 256, (1 << 15,), dtype=torch.uint8, generator=random)
    found = {}
    for dtype, shape, offset in product(DTYPES, SHAPES, (0, 1)):
        size, start = torch.Size(shape).numel() * dtype.itemsize, offset * dtype.itemsize
        data = memory[start : start + size]
        if dtype is torch.bool:
            data = data & 1
        found[f"{dtype} {shape} from byte {start}"] = data.view(dtype).view(shape)
    found["strided"] = memory[:6000].view(torch.float32).view(50, 30).T
    found["every other"] = memory[:8000].view(torch.int64)[::2]
    return found


def compare() -> None:
    """Print, by tensor: the sums by hand, by torch's operations and by the kernel; the kernel's bytes, the tensor's."""
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    moved = []

    def counted(name: str) -> None:
        operation = getattr(interpreter_builder, name)

        def count(*args: object, **options: object) -> object:
            masks = [arg.data for arg in args if isinstance(arg, TensorHandle) and arg.data.dtype == np.bool_]
            values = operation(*args, **options)
            moved.append(8 * sum(int(np.count_nonzero(mask)) for mask in masks))
            return values

        setattr(interpreter_builder, name, count)

    for name in ("create_masked_load", "create_masked_store", "create_atomic_rmw"):
        counted(name)
    kernel = partial(fold_kernel.fold_words, keys=weights._KEYS, factors=weights._FACTORS)
    found = {}
    for name, tensor in tensors().items():
        expected = [number & MASK for number in weights.fold(tensor).tolist()]
        by_kernel = {}
        # Of several programs with several blocks each, too.
        for sizes in ((1024, 1024), (16, 3)):
            fold_kernel._BLOCK, fold_kernel._PROGRAMS = sizes
            moved.clear()
            with_kernel = weights._fold_on
            weights._fold_on = lambda device: kernel
            by_kernel[str(sizes)] = [number & MASK for number in weights.fold(tensor).tolist()]
            weights._fold_on = with_kernel
        found[name] = [by_hand(tensor), expected, *by_kernel.values()], sum(moved), tensor.nbytes
    print(json.dumps(found))


def compile_for(*capabilities: int) -> None:
    """Print the bytes of machine code for each compute capability."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    values = (*weights._KEYS, *weights._FACTORS, fold_kernel._BLOCK)
    parameters = fold_kernel._fold.params
    constants = dict(zip([each.name for each in parameters if each.is_constexpr], values, strict=True))
    kinds = {"words": "*i64", "totals": "*i64", **dict.fromkeys(constants, "constexpr")}
    signature = {each.name: kinds.get(each.name) or each.annotation_type for each in parameters}
    assert signature["count"] == "i64"
    found = []
    for capability in capabilities:
        source, target = ASTSource(fold_kernel._fold, signature, constants), GPUTarget("cuda", capability, 32)
        found.append(len(triton.compile(source, target=target, options={"num_warps": 8}).asm["cubin"]))
    print(json.dumps(found))
