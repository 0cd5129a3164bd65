"""Generator processes with planted faults. In a module of its own, so that the processes can import it."""

from __future__ import annotations

import os
import time

import torch

from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.generation.worker import run_worker
from async_rlhf.models.weights import digests, named_weights

AT = 1
"""The version whose loading goes wrong."""


def ignores_the_update(held, tensors):
    return {}


def loads_half_of_the_tensors(held, tensors):
    return {name: tensors[name] for name in list(held)[: len(held) // 2]}


def loads_in_the_wrong_order(held, tensors):
    """Two tensors of one shape change places."""
    names = [name for name in held if name.endswith("attention.dense.weight")]
    return {**tensors, names[0]: tensors[names[1]], names[1]: tensors[names[0]]}


def transposes_one(held, tensors):
    name = "gpt_neox.layers.1.attention.dense.weight"
    return {**tensors, name: tensors[name].T}


FAULTS = {
    fault.__name__: fault
    for fault in (ignores_the_update, loads_half_of_the_tensors, loads_in_the_wrong_order, transposes_one)
}


def run_hanging_worker(flag, *arguments) -> None:
    """As run_worker, but the first process to sample version AT hangs in the middle of it."""
    generate = TransformersEngine.generate

    def hang(engine, prompts, progress=None):
        if engine.version == AT and _first(flag):
            time.sleep(3600)
        return generate(engine, prompts, progress)

    TransformersEngine.generate = hang
    run_worker(*arguments)


def run_stillborn_worker(flag, *arguments) -> None:
    """As run_worker, but the first process hangs before it has built anything, as in an import that waits for ever."""
    if _first(flag):
        time.sleep(3600)
    run_worker(*arguments)


def run_hungry_worker(flag, *arguments) -> None:
    """As run_worker, but the first process to sample version AT has no memory for it."""
    generate = TransformersEngine.generate

    def run_out(engine, prompts, progress=None):
        if engine.version == AT and _first(flag):
            torch.empty(1 << 60)
        return generate(engine, prompts, progress)

    TransformersEngine.generate = run_out
    run_worker(*arguments)


def run_slow_worker(*arguments) -> None:
    """As run_worker, but a token takes so long that the learner publishes while a batch is being sampled."""
    forward = TransformersEngine._forward

    def slowly(engine, *inputs, **options):
        time.sleep(0.01)
        return forward(engine, *inputs, **options)

    TransformersEngine._forward = slowly
    run_worker(*arguments)


def _first(flag: str) -> bool:
    try:
        os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def run_faulty_worker(name, *arguments) -> None:
    """As run_worker, but the given fault happens when version AT is loaded."""
    load = TransformersEngine.load

    def load_badly(engine, tensors, version):
        if version != AT:
            return load(engine, tensors, version)
        held = named_weights(engine.model)
        with torch.no_grad():
            if name == "computes_otherwise":  # with the right weights, as a broken kernel would
                load(engine, tensors, version)
                found = digests(held)
                engine.model.gpt_neox.layers[0].mlp.dense_h_to_4h.weight.mul_(1.5)
                return found
            for key, tensor in FAULTS[name](held, tensors).items():
                held[key].copy_(tensor.clone())
        engine.version = version
        return digests(held)

    TransformersEngine.load = load_badly
    run_worker(*arguments)
