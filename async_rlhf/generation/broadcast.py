"""Weights straight from the learner's memory to a server's, over the network: no folder that both must see.

Gloo between CPUs, NCCL between GPUs. Each transfer makes a group of its own, so that a server which was restarted has
nothing to join again and nobody waits for one that is gone.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT = timedelta(seconds=120)


class Sender:
    """The learner's end of one transfer.

    Args:
        url: of the server; decides under which address the learner is seen from there.
        receivers: processes of the server.
        device: of the learner; on a GPU the transfer goes by NCCL.
    """

    def __init__(self, url: str, receivers: int, device: torch.device) -> None:
        self.device = device
        self._world = receivers + 1
        self._store = dist.TCPStore("0.0.0.0", 0, self._world, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
        self._host = _own_address(url)

    def invitation(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """What :func:`receive` needs to know, for JSON."""
        return {
            "host": self._host,
            "port": self._store.port,
            "world": self._world,
            "backend": "nccl" if self.device.type == "cuda" else "gloo",
            "tensors": [[name, list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in tensors.items()],
        }

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Send them in order. Blocks until every receiver has them all.

        Raises:
            ConnectionError: a receiver did not come, or went away.
        """
        try:
            group = _group(self._store, 0, self._world, self.device)
            for tensor in tensors.values():
                _broadcast(group, tensor.to(self.device))
        except RuntimeError as error:
            raise ConnectionError(str(error)) from error


def receive(
    host: str, port: int, world: int, rank: int, device: torch.device, tensors: Sequence[Sequence[Any]]
) -> Iterator[tuple[str, Tensor]]:
    """A server process's end: names and tensors, one after the other as they come.

    Args:
        host: of the learner.
        port: see host.
        world: learner and receivers.
        rank: from 1.
        device: where the tensors are needed.
        tensors: name, shape and dtype of each.
    """
    store = dist.TCPStore(host, port, world, is_master=False, timeout=TIMEOUT)
    group = _group(store, rank, world, device)
    for name, shape, dtype in tensors:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        _broadcast(group, tensor)
        yield name, tensor


def _group(store: dist.TCPStore, rank: int, world: int, device: torch.device) -> Any:
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = TIMEOUT
        return dist.ProcessGroupNCCL(store, rank, world, options)
    return dist.ProcessGroupGloo(store, rank, world, TIMEOUT)


def _broadcast(group: Any, tensor: Tensor) -> None:
    if tensor.numel():
        # As bytes: not every backend knows every type.
        group.broadcast([tensor.contiguous().view(-1).view(torch.uint8)], dist.BroadcastOptions()).wait()


def _own_address(url: str) -> str:
    """The address of this host on the way to a server."""
    place = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((place.hostname, place.port or 80))  # of a datagram socket, sends nothing
        return probe.getsockname()[0]
