"""Generator processes on vLLM with planted faults. In a module of its own, so that the processes can import it."""

from __future__ import annotations

from async_rlhf.generation.vllm_engine import VLLMEngine
from async_rlhf.generation.worker import run_worker

AT = 1
"""The version whose loading goes wrong."""
SQUARE = "gpt_neox.layers.1.attention.dense.weight"
TWIN = SQUARE.replace("layers.1", "layers.0")


def swaps_two(load, engine, tensors, version):
    """Two tensors of one shape change places."""
    return load(engine, {**tensors, SQUARE: tensors[TWIN], TWIN: tensors[SQUARE]}, version)


def computes_otherwise(load, engine, tensors, version):
    """With the right weights, as a broken kernel would."""
    found = load(engine, tensors, version)
    (model,) = engine._llm.collective_rpc(lambda worker: worker.model_runner.get_model())
    layer = dict(model.named_modules())["model.layers.0.mlp.dense_h_to_4h"]
    forward = layer.forward
    layer.forward = lambda *inputs: 1.5 * forward(*inputs)
    return found


def ignores_the_update(load, engine, tensors, version):
    """And says that it holds what it was given."""
    from async_rlhf.models.weights import digests

    engine.version = version
    engine._llm.llm_engine.set_weight_version(str(version))
    return digests(tensors)


FAULTS = {fault.__name__: fault for fault in (swaps_two, computes_otherwise, ignores_the_update)}


def run_faulty_worker(name, *arguments) -> None:
    """As run_worker, but the given fault happens when version AT is loaded."""
    load = VLLMEngine.load

    def load_badly(engine, tensors, version):
        if version != AT:
            return load(engine, tensors, version)
        return FAULTS[name](load, engine, tensors, version)

    VLLMEngine.load = load_badly
    run_worker(*arguments)
