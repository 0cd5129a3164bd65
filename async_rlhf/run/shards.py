"""What is trained, in shards: each rank writes and reads its own part, by torch.distributed.checkpoint.

The files are safetensors, one or more of each rank. Each says of every tensor which part of the whole it is, so any
number of ranks can read them, however these spread the weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from async_rlhf.learner.learner import Learner
from async_rlhf.run.manifest import CheckpointError, digest_of
from async_rlhf.system.files import naming

SHARDS = "shards"
"""The folder of the files, below ``resume``."""
WEIGHT, MOMENT = "weight.", "optimizer."
_FILE_BYTES = 1 << 32
"""Of one file at most, or of one tensor: a file's bytes are put together in memory before they are written. Smaller
ones would be many: whoever reads them has to open all.
"""
READ_BYTES = 1 << 30
"""Of weights that are read again at a time."""

# Each rank reads its part by itself, and one rank alone writes by itself.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def own_state(learner: Learner) -> dict[str, Tensor]:
    """What this rank writes of the weights that are trained and of the optimiser's state: no copies.

    Sharded tensors are there on every rank. Of what all ranks hold whole, each has a part: rank 0 the weights, which it
    also writes as models, the others more of the optimiser's state.
    """
    parallel, ranks = learner.parallel, learner.ranks
    parallel.reshard(learner.model)
    weights = {f"{WEIGHT}{name}": p.detach() for name, p in learner.model.named_parameters() if p.requires_grad}
    moments = _unshared({f"{MOMENT}{name}": tensor for name, tensor in parallel.own_moments().items()})
    if ranks.count == 1 or parallel.is_sharded:
        return weights | moments
    mine = weights if ranks.is_main else {}
    held = [sum(tensor.nbytes for tensor in weights.values()), *[0] * (ranks.count - 1)]
    for name, tensor in sorted(moments.items(), key=lambda item: -item[1].nbytes):
        least = held.index(min(held))
        held[least] += tensor.nbytes
        if least == ranks.rank:
            mine[name] = tensor
    return mine


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of each plain tensor that lies where another does, such as a table of bitsandbytes: files refuse it."""
    copies, places = {}, set()
    for name, tensor in tensors.items():
        plain = type(tensor) is Tensor and tensor.numel() > 0
        copies[name] = tensor.clone() if plain and tensor.data_ptr() in places else tensor
        if plain:
            places.add(tensor.data_ptr())
    return copies


def make_stager(device: torch.device) -> DefaultStager:
    """What copies tensors to the host's memory, through pinned memory from a GPU. It keeps that memory for the next."""
    pinned = device.type == "cuda"
    options = {"use_pinned_memory": pinned, "use_non_blocking_copy": pinned}
    return DefaultStager(StagingOptions(**options, use_shared_memory=False, use_async_staging=False))


def write_shards(
    tensors: Mapping[str, Tensor],
    folder: Path,
    group: dist.ProcessGroup | None,
    write_rest: Callable[[], None],
    commit: Callable[[Mapping[str, str]], None],
) -> None:
    """Write this rank's part. Every rank must call it; it ends when all have written theirs, and rank 0 has committed.

    Args:
        tensors: of :func:`own_state`, copied to the host's memory.
        folder: where the files go; all ranks see it.
        group: the collectives of the calling thread; None for one rank.
        write_rest: called on every rank, to write what else it has to.
        commit: called on rank 0 at the end, with the checksums of all files by their names.

    Raises:
        OSError: on every rank, if one could not write, or rank 0 could not commit.
    """
    writer = ShardWriter(folder, write_rest, commit)
    try:
        dcp.save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise _first(error) from error


def _first(error: CheckpointException) -> Exception:
    rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    if isinstance(cause, OSError):
        return cause
    return RuntimeError(f"rank {rank} failed while a checkpoint was written or read: {type(cause).__name__}: {cause}")


class ShardWriter(dcp.HuggingFaceStorageWriter):
    """torch's writer of safetensors, which also notes the checksum of every file, and writes no metadata: the files
    say all that it takes to read them.
    """

    def __init__(
        self, folder: Path, write_rest: Callable[[], None], commit: Callable[[Mapping[str, str]], None]
    ) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._folder, self._write_rest, self._commit = folder, write_rest, commit

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files."""
        with naming(self._folder):
            data = {**plan.storage_data, "fqn_to_index_mapping": _files(plan)}
            written = super().write_data(replace(plan, storage_data=data), planner).value()
            names = [result.storage_data.relative_path for result in written]
            digests = {name: digest_of(self._folder / name) for name in set(names)}
        self._write_rest()
        done: Future[list[WriteResult]] = Future()
        named = zip(written, names, strict=True)
        done.set_result([replace(result, storage_data=(name, digests[name])) for result, name in named])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """All ranks have written their files. On rank 0."""
        self._commit(dict(result.storage_data for part in results for result in part))


def _files(plan: SavePlan) -> dict[str, int]:
    """The number, from 1, of the file that each tensor of a rank goes to."""
    numbers, number, held = {}, 1, 0
    for item in plan.items:
        assert item.tensor_data is not None
        size = item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
        if held and held + size > _FILE_BYTES:
            number, held = number + 1, 0
        numbers[item.index.fqn] = number
        held += size
    return numbers


class ShardReader(dcp.HuggingFaceStorageReader):
    """torch's reader of safetensors, which is told what the files hold: to find that out takes opening all of them.

    Args:
        folder: with the files.
        known: what they hold; None to find it out once.
    """

    def __init__(self, folder: Path, known: Metadata | None = None) -> None:
        super().__init__(str(folder))
        self._known = super().read_metadata() if known is None else known

    def read_metadata(self) -> Metadata:
        """What the files hold."""
        return self._known


def load_shards(learner: Learner, folder: Path) -> dict[str, Tensor]:
    """Load the weights that are trained, in place. Every rank must call it: rank 0 alone finds out what the files hold,
    and each then reads only its own part.

    Returns:
        This rank's part of the optimiser's state, under the names of ``learner_state``.

    Raises:
        CheckpointError: the files cannot be read, or are of other weights.
    """
    parallel = learner.parallel
    weights = {f"{WEIGHT}{name}": p.detach() for name, p in learner.model.named_parameters() if p.requires_grad}
    try:
        metadata = learner.ranks.broadcast("what shards hold", lambda: ShardReader(folder).read_metadata())
        known: dict[str, Any] = metadata.state_dict_metadata
        moments = {
            name: parallel.room_for(int(name.split(".")[1]), item.size, item.properties.dtype)
            for name, item in known.items()
            if name.startswith(MOMENT)
        }
        missing = {name for name in known if name.startswith(WEIGHT)} ^ weights.keys()
        if missing:
            raise CheckpointError(f"{str(folder)!r} holds other weights than are trained, such as {min(missing)}")
        dcp.load({**weights, **moments}, storage_reader=ShardReader(folder, metadata), no_dist=True)
    except (CheckpointException, OSError, SafetensorError) as error:
        cause = _first(error) if isinstance(error, CheckpointException) else error
        raise CheckpointError(f"{str(folder)!r} cannot be read: {cause}") from error
    return moments


def whole_weights(folder: Path, prefix: str, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Weights, whole, from the files of all ranks; no more than a few are in memory at a time.

    Args:
        folder: with the files.
        prefix: how their names in the learner's model begin.
        names: what follows there, in the order in which they are to come.
    """
    reader = ShardReader(folder)
    known: dict[str, Any] = reader.read_metadata().state_dict_metadata
    held, first = 0, f"{WEIGHT}{prefix}"
    some: dict[str, Tensor] = {}

    def read() -> Iterator[tuple[str, Tensor]]:
        dcp.load(dict(some), storage_reader=reader, no_dist=True)
        while some:
            name = next(iter(some))
            yield name.removeprefix(first), some.pop(name)

    for name in names:
        item = known[f"{first}{name}"]
        room = torch.empty(item.size, dtype=item.properties.dtype)
        if some and held + room.nbytes > READ_BYTES:
            yield from read()
            held = 0
        some[f"{first}{name}"] = room
        held += room.nbytes
    yield from read()
