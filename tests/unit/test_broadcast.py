"""Weights over the network: every receiver gets every byte, and one that stays away is an error."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta

import pytest
import torch

from async_rlhf.generation import broadcast
from async_rlhf.generation.broadcast import Sender, receive

CPU = torch.device("cpu")
TENSORS = {
    "matrix": torch.randn(300, 70),
    "half": torch.randn(5).to(torch.bfloat16),
    "count": torch.arange(3),
    "scalar": torch.tensor(2.5),
    "none": torch.empty(0, 4),
    "strided": torch.randn(8, 6).T,
}


@pytest.mark.parametrize("receivers", [1, 2])
def test_every_receiver_gets_every_tensor(receivers):
    sender = Sender("http://127.0.0.1:80", receivers, CPU)
    invitation = sender.invitation(TENSORS)
    assert invitation.pop("backend") == "gloo"
    assert invitation["host"] == "127.0.0.1"
    found: dict[int, dict[str, torch.Tensor]] = {}

    def take(rank: int) -> None:
        found[rank] = dict(receive(rank=rank, device=CPU, **invitation))

    threads = [threading.Thread(target=take, args=(rank,)) for rank in range(1, receivers + 1)]
    for thread in threads:
        thread.start()
    sender.send(TENSORS)
    for thread in threads:
        thread.join()
    for tensors in found.values():
        assert list(tensors) == list(TENSORS)
        for name, tensor in TENSORS.items():
            assert tensors[name].dtype == tensor.dtype
            assert torch.equal(tensors[name], tensor), name


def test_a_receiver_that_does_not_come_is_an_error(monkeypatch):
    monkeypatch.setattr(broadcast, "TIMEOUT", timedelta(seconds=1))
    with pytest.raises(ConnectionError):
        Sender("http://127.0.0.1:80", 1, CPU).send(TENSORS)


def test_the_learner_is_invited_to_under_the_address_that_the_server_sees():
    sender = Sender("http://localhost:8000", 1, CPU)
    invitation = sender.invitation({})
    with socket.create_connection((invitation["host"], invitation["port"]), timeout=5):
        pass
