"""Training with vLLM in generator processes: rewards rise, every batch is proven, the run is bitwise repeatable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import BATCHES, SHORT, SHORT_BATCHES, metrics_of, new_args, run, same_metrics, widen, worker_pids
from faulty_vllm import run_faulty_worker
from tiny import PROMPTS, rare
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainerCallback

from async_rlhf import LoRAConfig
from async_rlhf.generation import process
from async_rlhf.generation.protocol import GeneratorError

pytestmark = pytest.mark.vllm


class KillWorker(TrainerCallback):
    """Kills the generator process after a batch, while the next one is being sampled."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.killed: set[int] = set()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.after:
            self.killed = worker_pids()
            for pid in self.killed:
                os.kill(pid, signal.SIGKILL)


def mean(metrics: list[dict[str, float]]) -> float:
    return sum(row["objective/scores"] for row in metrics) / len(metrics)


def test_rewards_rise_and_every_batch_is_proven(undisturbed):
    assert [row["schedule/lag"] for row in undisturbed] == [0] + [1] * (BATCHES - 1)
    assert [row["schedule/version"] for row in undisturbed] == [0, *range(BATCHES - 1)]
    assert 0 < max(row["engine/logprob_difference"] for row in undisturbed) < 1e-4
    assert all(0 <= row["engine/kl"] < 1e-6 for row in undisturbed)
    probed = [row for row in undisturbed if "weights/probe_difference" in row]
    assert len(probed) == 5  # of versions 0 (twice), 10, 20 and 30
    assert max(row["weights/probe_difference"] for row in probed) < 1e-4
    assert mean(undisturbed[-10:]) > mean(undisturbed[:4]) + 1.3


def test_two_workers_sample_what_one_does(undisturbed, make_args, tokenizer):
    two = run(make_args(generation={"workers": 2}, **SHORT), tokenizer, PROMPTS)
    assert same_metrics(two, undisturbed[:SHORT_BATCHES])


@pytest.mark.rare  # with a server in test_server.py, and with transformers in the laws
def test_a_killed_worker_is_restarted_and_samples_the_same_again(
    undisturbed, make_args, tokenizer, caplog, fresh_interpreters
):
    killer = KillWorker(after=3)
    killed = run(make_args(**SHORT), tokenizer, PROMPTS, callbacks=[killer])
    assert len(killer.killed) == 1
    assert "generator process 0 died (exit code -9); starting it again" in caplog.text
    assert same_metrics(killed, undisturbed[:SHORT_BATCHES])
    assert worker_pids() == set()


def test_a_resumed_run_is_the_uninterrupted_one(make_args, tokenizer, undisturbed, tmp_path):
    """From the middle, in a new process with an engine of its own; batch 4 had been sampled before it was saved."""
    run(make_args("saved", save_steps=3, **SHORT), tokenizer, PROMPTS)
    resumed = make_args("resumed", resume_from=str(tmp_path / "saved" / "checkpoint-3"), **SHORT)
    assert same_metrics(run(resumed, tokenizer, PROMPTS), undisturbed[3:SHORT_BATCHES])


INLINE = """
import sys
sys.path[:0] = [{tests!r}, {parent!r}]
import torch
from conftest import new_args, new_policy, run
from tiny import PROMPTS, byte_tokenizer
from vllm.distributed.parallel_state import model_parallel_is_initialized
torch.set_num_threads(1)
for name in ("first", "second"):
    assert not model_parallel_is_initialized()
    run(new_args({out!r}, name, {{"placement": "inline"}}, **{options!r}), byte_tokenizer(), PROMPTS)
assert not model_parallel_is_initialized()
new_policy()(torch.tensor([[1, 2, 3]]))
"""


def test_inline_is_the_same_as_a_process_and_can_be_repeated(tmp_path, tokenizer):
    """In a program of its own: vLLM's end in one process takes every other engine of the process along.

    A run ends its engine, and models of the class that vLLM has run can be built and called as ever.
    """
    options = {"staleness": 0, "total_episodes": 8 * SHORT_BATCHES}
    here = Path(__file__).parent
    script = INLINE.format(tests=str(here), parent=str(here.parent), out=str(tmp_path), options=options)
    done = subprocess.run([sys.executable, "-c", script], timeout=180, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    args = new_args(tmp_path, "process", {"placement": "process"}, **options)
    process = run(args, tokenizer, PROMPTS)
    for name in ("first", "second"):
        inline = metrics_of(tmp_path / name)
        assert [row["schedule/lag"] for row in inline] == [0] * SHORT_BATCHES
        assert same_metrics(inline, [{k: v for k, v in row.items() if k in inline[0]} for row in process])


@pytest.mark.parametrize("published", [rare("merged"), "adapter"])
def test_adapters(make_args, tokenizer, published):
    lora = LoRAConfig(rank=4, publish=published)
    metrics = run(make_args(lora=lora, **{**SHORT, "learning_rate": 3e-2}), tokenizer, PROMPTS)
    assert max(row["engine/logprob_difference"] for row in metrics) < 1e-4
    assert metrics[-1]["objective/kl"] > 0.01  # the adapters do something by now
    print([(row["objective/kl"], row["engine/logprob_difference"]) for row in metrics])


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("swaps_two", r"2 of 28 tensors: gpt_neox.layers.0.attention.dense.weight, gpt_neox.layers.1.attention.dense"),
        ("computes_otherwise", r"computes other log-probabilities with them: they differ by .* nats per token"),
        ("ignores_the_update", r"computes other log-probabilities with them: they differ by .* nats per token"),
    ],
)
def test_wrong_weights_stop_the_run_in_the_first_batch(make_args, tokenizer, monkeypatch, fault, named):
    """Version 1 samples batch 3; two batches are trained on, not a third."""
    monkeypatch.setattr(process, "run_worker", partial(run_faulty_worker, fault))
    args = make_args(**SHORT)
    with pytest.raises(GeneratorError, match=named):
        run(args, tokenizer, PROMPTS)
    assert [row["batch"] for row in metrics_of(args.output_dir)] == [1, 2]
    assert worker_pids() == set()


def mixture(kind: str, seed: int = 0) -> torch.nn.Module:
    """A tiny mixture of experts."""
    sizes = {"vocab_size": 258, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 96}
    torch.manual_seed(seed)
    if kind == "mixtral":
        return widen(MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)))
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    return widen(Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts)))


@pytest.mark.parametrize("kind", [rare("mixtral"), "qwen3_moe"])
def test_a_mixture_of_experts_is_loaded_as_from_its_checkpoint(kind, make_args, tokenizer):
    """transformers holds all experts in one tensor, under a name that no checkpoint has: vLLM would not know it. One
    of them with router replay.
    """
    replay = kind == "qwen3_moe"
    args = make_args(generation={"mismatch_samples": 8}, total_episodes=24, learning_rate=1e-2, router_replay=replay)
    metrics = run(args, tokenizer, PROMPTS, mixture(kind))
    assert [row["schedule/version"] for row in metrics] == [0, 0, 1]
    assert max(row["engine/logprob_difference"] for row in metrics) < 1e-3
