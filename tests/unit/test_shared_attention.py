"""Attention of branches by the kernel: one forward pass, whose copies of keys and values are not kept. Emulated."""

from __future__ import annotations

import gc
import weakref
from functools import partial, partialmethod

import pytest
import torch
import varlen
from families import made
from planted import Fault, planted
from test_forest import computed, difference, drawn, rows
from torch import nn
from torch._dynamo.testing import CompileCounter

from async_rlhf.config import OnlineConfig
from async_rlhf.models import packing
from async_rlhf.models.forward import response_logprobs
from async_rlhf.models.kernels import compile_blocks, recompute
from async_rlhf.models.packing import choose

HOW = [False, "selective", True]


@pytest.fixture(autouse=True)
def kernel(monkeypatch):
    """With the kernel on a CPU."""
    monkeypatch.setattr(packing, "_has_kernel", lambda *_: True)
    monkeypatch.setattr(packing, "varlen_attn", varlen.varlen_attn)
    varlen.CALLS.clear()
    varlen.READ.clear()


def prepared(model, how, compiled=False):
    config = OnlineConfig(gradient_checkpointing=how, torch_compile=compiled)
    compile_blocks(model.train(), config)
    recompute(model, config)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", ["gpt_neox", "llama", "mistral"])
def test_attention_is_computed_once_and_has_the_gradients_of_rows_alone(kind, how, monkeypatch):
    """To twelve digits. Where all of a block is computed again, so is its attention, once; mistral has a window."""
    mine = computed(kind, torch.float64, True, prepare=partial(prepared, how=how))
    checks = 2 * 2  # of short rows come first
    assert dict(varlen.CALLS) == {"forward": checks + (4 if how is True else 2), "backward": 2}
    monkeypatch.undo()
    assert max(difference(mine, computed(kind, torch.float64, False))) < 1e-12


@pytest.mark.parametrize("how", HOW)
def test_nothing_is_kept_longer_than_it_is_needed(how, monkeypatch):
    """No copy of keys and values outlives its call. Where a block is computed again, queries, keys and outputs
    are not kept either; after the backward pass they never are, while the graph is still there.
    """
    model, (tokens_BT, mask_BT), kept = made("llama"), rows(), []
    choose(True, False, {"model": model}, False)
    prepared(model, how)
    taken = packing._Copies.taken

    def seen(copies):
        found = taken(copies)
        kept.extend(map(weakref.ref, found[:5]))
        return found

    monkeypatch.setattr(packing._Copies, "taken", seen)
    varlen.READ.clear()
    logprobs_BT = response_logprobs(model, tokens_BT, mask_BT, 1.0).logprobs_BT
    gc.collect()
    assert [read() for read in varlen.READ] == [None] * 4
    assert len(kept) == 10
    assert all(tensor() is None for tensor in kept) is (how is not False)
    if not how:
        logprobs_BT.sum().backward(retain_graph=True)
        first = [p.grad.clone() for p in model.parameters()]
    logprobs_BT.sum().backward()
    gc.collect()
    assert all(tensor() is None for tensor in kept)
    if not how:
        assert all(torch.equal(p.grad, 2 * one) for p, one in zip(model.parameters(), first, strict=True))


@pytest.mark.parametrize("how", HOW)
def test_compiled_blocks_have_the_same_graphs_for_any_number_of_branches(how, monkeypatch):
    counter, model, found = CompileCounter(), made("llama"), []
    choose(True, False, {"model": model}, False)
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=counter))
    torch._dynamo.reset()
    prepared(model, how, compiled=True)
    for count in (2, 3, 5, 8):
        tokens_BT = torch.tensor([[*drawn(21), *drawn(7, n)] for n in range(count)])
        mask_BT = torch.zeros(tokens_BT.shape)
        mask_BT[:, 21:] = 1
        varlen.CALLS.clear()
        response_logprobs(model, tokens_BT, mask_BT, 1.0).logprobs_BT.sum().backward()
        assert dict(varlen.CALLS) == {"forward": 4 if how is True else 2, "backward": 2}
        found.append(counter.frame_count)
    assert found == [7] * 4


def test_a_gradient_of_another_beginning_is_found():
    fault = Fault("models.packing:_Copies.unpack", "[self._places]", "[self._places.flip(0)]")
    right = computed("llama", torch.float64, True)
    with planted(fault):
        assert difference(computed("llama", torch.float64, True), right)[1] > 1e-3
