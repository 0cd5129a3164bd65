"""The learner on several ranks, by torchrun: the same run as in one process, whatever spreads its weights."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launching
import pytest
import torch
from launching import chosen, family, finish, kill_all, launch, left_of, metrics_of, start_ranks, weights_of
from ports import free_port
from ranks import new_policy
from tiny import rare_unless

pytestmark = pytest.mark.distributed

STRATEGIES = ["ddp", "fsdp", "zero1", "zero2", "zero3"]
ASYNC = {"staleness": 1, "reward_model": True, "annotate_batch_size": 8}
"""So small that every rank has passes without gradient to make, and some of the reward model's."""
EPISODES = {
    "episodes": True,
    "generation": {
        "response_length": 8,
        "max_turns": 3,
        "episode_length": 40,
        "stop_token_ids": list(range(60)),
        "mismatch_steps": 1,
    },
}
"""With an environment that answers the policy; every batch is compared."""
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    # What it changes, and under what it is tried.
    "dpo": (
        {**ASYNC, "total_episodes": 96, "save_steps": 3, "lr_scheduler_type": "constant", "weight_decay": 1.0},
        STRATEGIES,
    ),
    "inline": ({"staleness": 0, "evaluate": True, "eval_steps": 2}, ["ddp", "fsdp", "zero3"]),
    "inline, stale": ({"staleness": 2, "generation": {"placement": "inline"}}, ["ddp", "fsdp"]),
    "evaluated beside": (
        {**ASYNC, "evaluate": True, "eval_steps": 2, "eval_samples_per_prompt": 2, "save_steps": 1},
        ["ddp", "zero3"],
    ),
    # DeepSpeed clips policy and value model together: without clipping it must be the same.
    "ppo": (
        {**ASYNC, "algorithm": "ppo", "max_grad_norm": 0.0, "num_epochs": 2, "weight_decay": 1.0},
        ["ddp", "fsdp", "zero2", "zero3"],
    ),
    "grpo": (
        {"algorithm": "grpo", "staleness": 1, "normalization": "token", "num_mini_batches": 2, "samples_per_prompt": 4},
        ["ddp", "zero3"],
    ),
    "strategy of the page": ({**ASYNC, "of_page": True}, ["ddp"]),
    "lora": ({"algorithm": "rloo", "staleness": 1, "lora": 2}, ["ddp", "fsdp", "zero3"]),
    # FSDP2 rounds otherwise, see below.
    "bf16": ({**ASYNC, "bf16": True}, ["ddp", "zero2", "zero3"]),
    # One batch: later ones would be sampled by weights that differ by rounding, which float16 turns into other tokens.
    "fp16": ({**ASYNC, "fp16": True, "first_scale": 2.0**8, "total_episodes": 16}, ["ddp", "zero2", "zero3"]),
    # One batch, for the same reason. Sharded weights are rounded before they are gathered.
    "rounded for generators": (
        {**ASYNC, "generation": {"dtype": "bfloat16"}, "total_episodes": 16},
        ["ddp", "fsdp", "zero3"],
    ),
    "checkpointing": ({"staleness": 1, "gradient_checkpointing": True}, ["ddp", "fsdp", "zero3"]),
    # Passes of up to 150 tokens instead of so many rows: each rank has sequences of other lengths.
    "packed": (
        {
            **ASYNC,
            "algorithm": "ppo",
            "max_grad_norm": 0.0,
            "max_tokens_per_pass": 150,
            "annotate_max_tokens": 200,
            "gradient_checkpointing": True,
        },
        ["ddp", "fsdp", "zero3"],
    ),
    "a batch without rewards": (
        {"algorithm": "rloo", "staleness": 1, "reward_errors": "skip", "no_reward_at": 1},
        ["ddp", "zero2"],
    ),
    # 11 of 16 prompts are left, so that the last round of micro-batches is short.
    "uneven": ({"algorithm": "rloo", "staleness": 1, "reward_errors": "skip", "missing_rewards": 10}, ["ddp", "fsdp"]),
    "kl target": (
        {"algorithm": "rloo", "staleness": 1, "kl": {"coef": 0.3, "target": 0.01, "horizon": 100}},
        ["ddp", "zero3"],
    ),
    "frozen models apart": ({**ASYNC, "reward_model_device": "cpu", "reference_device": "cpu"}, ["fsdp", "zero3"]),
    "reduced once": ({**ASYNC, "parallel": {"reduce": "once"}}, ["fsdp"]),
    "two copies": ({**ASYNC, "parallel": {"shard_size": 1}}, ["fsdp"]),
    # Both ranks compute every row, each a part of it and one of two heads.
    "shared rows": ({**ASYNC, "parallel": {"context_parallel": 2}, "save_steps": 2, "total_episodes": 64}, STRATEGIES),
    "shared rows, by tokens": (
        {
            "algorithm": "ppo",
            "staleness": 1,
            "shared_trunk": True,
            "max_grad_norm": 0.0,
            "max_tokens_per_pass": 150,
            "lora": 2,
            "parallel": {"context_parallel": 2},
        },
        ["fsdp"],
    ),
    "kept whole": ({**ASYNC, "parallel": {"reshard_after_forward": False}}, ["fsdp"]),
    # The others compute a micro-batch's logits at once; these a few tokens at a time, and again in the backward pass.
    "head in chunks": ({**ASYNC, "head_rows": 5}, ["ddp", "fsdp", "zero2", "zero3"]),
    "adapters on a head in chunks": (
        {"algorithm": "rloo", "staleness": 1, "lora": 2, "lora_targets": ["dense", "lm_head"], "head_rows": 5},
        ["ddp", "fsdp", "zero3"],
    ),
    # Rank 0 alone plays, and all ranks sample its turns: their shares, or all of them if the weights are sharded.
    "episodes": (
        {**EPISODES, "algorithm": "grpo", "samples_per_prompt": 4, "normalization": "token"},
        ["ddp", "fsdp", "zero3"],
    ),
    "episodes beside": ({**EPISODES, "staleness": 1}, ["ddp", "fsdp"]),
    "conversations": ({**EPISODES, "agent": True, "algorithm": "grpo", "samples_per_prompt": 4}, ["ddp", "zero3"]),
    "offload": ({**ASYNC, "parallel": {"cpu_offload": True}}, ["zero2", "zero3"]),
}


TRIED = [(case, strategy) for case, (_, tried) in CASES.items() for strategy in tried]
OFTEN = {
    (case, s)
    for i, (case, (_, tried)) in enumerate(CASES.items())
    for s in (tried if tried == STRATEGIES else tried[i % len(tried) :][:1])
}
"""Under every strategy what the laws say of all, each other case under one; the rest is rare."""


def run_of(case: str, strategy: str, folder: Path, **changes: Any) -> dict[str, Any]:
    return {"folder": str(folder), "name": f"{case}-{strategy}", "strategy": strategy, **CASES[case][0], **changes}


@pytest.fixture(scope="module")
def alone(tmp_path_factory, request) -> Path:
    """Every chosen case in one process, with as large a batch."""
    folder = tmp_path_factory.mktemp("alone")
    runs = []
    for case in dict.fromkeys(case for case, strategy in TRIED if (case, strategy) in chosen(request)):
        changes, _ = CASES[case]
        plain = {key: value for key, value in changes.items() if key not in ("parallel", "head_rows")}
        runs.append({"folder": str(folder), "name": case, "gradient_accumulation_steps": 2, **plain})
    finish(launch(runs, 1, folder / "log"), folder / "log", 300)
    return folder


@pytest.fixture(scope="module")
def spread(tmp_path_factory, request) -> Path:
    """The chosen cases on two ranks, and those that others go on from."""
    folder = tmp_path_factory.mktemp("spread")
    runs = [run_of(*tried, folder) for tried in TRIED if tried in chosen(request) or CASES[tried[0]][1] == STRATEGIES]
    finish(launch(runs, 2, folder / "log"), folder / "log", 500)
    return folder


@pytest.mark.parametrize(("case", "strategy"), rare_unless(lambda i: TRIED[i] in OFTEN, TRIED))
def test_two_ranks_train_as_one(alone, spread, case, strategy):
    """The same losses, norms, ratios and weights, to rounding: so the gradients are the same, whoever computes them."""
    ours, theirs = metrics_of(spread / f"{case}-{strategy}"), metrics_of(alone / case)
    assert len(ours) == len(theirs)
    clipped_together = strategy.startswith("zero") and CASES[case][0].get("algorithm") == "ppo"
    if "episodes" in CASES[case][0]:
        assert min(row["episode/turns"] for row in theirs) > 1
        assert max(row["engine/logprob_difference"] for row in ours) < 1e-4
    for mine, one in zip(ours, theirs, strict=True):
        left_out = {"grad_norm", "value_grad_norm"} if clipped_together else set()
        assert mine.keys() - left_out == one.keys() - left_out
        for name in one.keys() - left_out:
            # What measures rounding itself is not the same to rounding.
            noise = name.startswith(("engine/", "weights/"))
            assert mine[name] == pytest.approx(one[name], rel=1e-3, abs=1e-4 if noise else 1e-5), name
    left, right = weights_of(spread / f"{case}-{strategy}"), weights_of(alone / case)
    assert left.keys() == right.keys()
    moved = max((right[k] - weights_of_start()[k]).abs().max().item() for k in right)
    assert moved > 1e-3
    for name, tensor in right.items():
        assert torch.allclose(left[name], tensor, rtol=0, atol=1e-3 * moved), name


def test_weights_that_are_gathered_in_half_precision_train_as_autocast_does_to_its_rounding(tmp_path):
    """FSDP2 casts the weights before it gathers them, so that sums between layers are rounded too.

    One batch, so that all train on the same samples. Metrics of a size near 0, such as the KL, are all rounding.
    """
    kinds = {"bf16": 2.0**-8, "fp16": 2.0**-11}
    changes = {**ASYNC, "total_episodes": 16}
    options = {"bf16": {"bf16": True}, "fp16": {"fp16": True, "first_scale": 2.0**8}}
    runs = [
        {"folder": str(tmp_path), "name": f"{kind}-{strategy}", "strategy": strategy, **changes, **options[kind]}
        for kind in kinds
        for strategy in ("ddp", "fsdp")
    ]
    finish(launch(runs, 2, tmp_path / "log"), tmp_path / "log", 300)
    for kind, rounding in kinds.items():
        ((ours,), (theirs,)) = (metrics_of(tmp_path / f"{kind}-{strategy}") for strategy in ("fsdp", "ddp"))
        assert ours["objective/entropy"] == theirs["objective/entropy"]  # of the sampler
        for name in ("loss/policy_avg", "grad_norm", "rewards/margins", "val/ratio"):
            if name in theirs:
                assert ours[name] == pytest.approx(theirs[name], rel=8 * rounding, abs=rounding), name
        # The engine computes as autocast does.
        assert theirs["engine/logprob_difference"] < ours["engine/logprob_difference"] < 2 * rounding


def test_what_overflows_is_skipped_by_all_ranks_and_under_every_strategy(tmp_path):
    """float16: DeepSpeed leaves the weights alone as we do, and all have the same loss scale after it."""
    # Two batches, both sampled by the first weights: rounding changes no token.
    changes = {**ASYNC, "fp16": True, "first_scale": 2.0**20, "total_episodes": 32}
    runs = [{"folder": str(tmp_path), "name": s, "strategy": s, **changes} for s in STRATEGIES]
    finish(launch(runs, 2, tmp_path / "log"), tmp_path / "log", 300)
    names = ("skipped_steps", "optimizer_steps", "loss_scale")
    found = {s: [tuple(line[name] for name in names) for line in metrics_of(tmp_path / s)] for s in STRATEGIES}
    assert all(lines == found["ddp"] for lines in found.values()), found
    assert found["ddp"][0][0] == 2
    assert found["ddp"][-1][1] == 2
    left = weights_of(tmp_path / "ddp")
    for s in STRATEGIES[1:]:
        for name, tensor in weights_of(tmp_path / s).items():
            assert torch.allclose(left[name], tensor, rtol=0, atol=1e-3), (s, name)


def weights_of_start() -> dict[str, torch.Tensor]:
    """Of every run, as transformers saves them."""
    weights = new_policy().state_dict()
    return {name.replace("lm_head", "embed_out"): tensor for name, tensor in weights.items()}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, spread) -> Path:
    """From the middle of each, in new processes: with the same strategy, and with others'."""
    folder = tmp_path_factory.mktemp("resumed")
    runs = [
        run_of("dpo", s, folder, resume_from=str(spread / f"dpo-{s}" / "checkpoint-3"), save_steps=0)
        for s in STRATEGIES
    ]
    for s in CASES["shared rows"][1]:
        checkpoint = str(spread / f"shared rows-{s}" / "checkpoint-2")
        runs.append(run_of("shared rows", s, folder, resume_from=checkpoint, save_steps=0))
    for s, other in (("fsdp", "zero3"), ("zero2", "ddp"), ("zero3", "fsdp")):
        checkpoint = str(spread / f"dpo-{other}" / "checkpoint-3")
        again = run_of("dpo", s, folder, resume_from=checkpoint, save_steps=0, resume_anyway=True)
        runs.append({**again, "name": f"{s}-from-{other}"})
    finish(launch(runs, 2, folder / "log"), folder / "log", 300)
    return folder


@pytest.mark.parametrize(("case", "strategy"), [(case, s) for case in ("dpo", "shared rows") for s in CASES[case][1]])
def test_a_resumed_run_is_the_uninterrupted_one(spread, resumed, case, strategy):
    whole, rest = spread / f"{case}-{strategy}", resumed / f"{case}-{strategy}"
    assert metrics_of(rest) == metrics_of(whole)[CASES[case][0]["save_steps"] :]
    left, right = weights_of(rest), weights_of(whole)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in right)


@pytest.mark.parametrize(("strategy", "other"), [("fsdp", "zero3"), ("zero2", "ddp"), ("zero3", "fsdp")])
def test_a_checkpoint_does_not_depend_on_what_spread_the_weights(spread, resumed, strategy, other):
    left, right = weights_of(resumed / f"{strategy}-from-{other}"), weights_of(spread / f"dpo-{other}")
    for name, tensor in right.items():
        assert torch.allclose(left[name], tensor, rtol=0, atol=1e-6), name


def test_three_ranks_whose_number_divides_nothing(tmp_path):
    """Parts of parameters are padded, and so are rounds of micro-batches: the batch of three is 9 prompts of size 2."""
    sizes = {"per_device_train_batch_size": 3, "total_episodes": 27, "staleness": 1, "reward_model": True}
    ppo = {"algorithm": "ppo", "shared_trunk": True, "max_grad_norm": 0.0, "samples_per_prompt": 1}
    runs = [
        {"folder": str(tmp_path), "name": f"{algorithm}-{s}", "strategy": s, "num_mini_batches": 1, **changes, **sizes}
        for s in ("fsdp", "zero3")
        for algorithm, changes in (("dpo", {}), ("ppo", ppo))
    ]
    one = [
        {**run, "name": run["name"].removesuffix("-fsdp"), "strategy": "auto", "gradient_accumulation_steps": 3}
        for run in runs[:2]
    ]
    log = tmp_path / "log"
    finish(launch(one, 1, log), log, 120)
    finish(launch(runs, 3, log), log, 240)
    for run in runs:
        left, right = weights_of(tmp_path / run["name"]), weights_of(tmp_path / run["name"].split("-")[0])
        for name, tensor in right.items():
            assert torch.allclose(left[name], tensor, rtol=0, atol=1e-6), (run["name"], name)


def launch_node(run: dict[str, Any], number: int, port: int, log: Path) -> Any:
    """One of two nodes with a rank each, as torchrun starts them on each host."""
    words = ["--nnodes=2", f"--node-rank={number}", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
    return start_ranks([run], [*words, f"--master-port={port}"], log)


def test_two_nodes_train_as_one_host(spread, tmp_path):
    """Local ranks are both 0; only the first node samples, writes and logs."""
    run, port = run_of("dpo", "fsdp", tmp_path), free_port()
    logs = [tmp_path / f"log{number}" for number in range(2)]
    nodes = [launch_node(run, number, port, log) for number, log in enumerate(logs)]
    for node, log in zip(nodes, logs, strict=True):
        finish(node, log, 120)
    assert metrics_of(tmp_path / "dpo-fsdp") == metrics_of(spread / "dpo-fsdp")


def test_a_node_that_is_lost_ends_the_other(tmp_path):
    run, port = run_of("dpo", "ddp", tmp_path, total_episodes=160_000, save_steps=0), free_port()
    logs = [tmp_path / f"log{number}" for number in range(2)]
    nodes = [launch_node(run, number, port, log) for number, log in enumerate(logs)]
    try:
        metrics = tmp_path / "dpo-ddp" / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0, nodes[0], logs[0])
        others = family(nodes[0])
        kill_all(nodes[1])  # the whole node at once
        started = time.monotonic()
        assert nodes[0].wait(30) != 0
        assert time.monotonic() - started < 10
        assert "rank 1 is gone, without a word" in logs[0].read_text(errors="replace")
        assert left_of(others) == []
    finally:
        for node in nodes:
            kill_all(node)


@pytest.mark.parametrize("told", ["torchrun", "rank 1"])
def test_sigterm_saves_and_the_run_goes_on_exactly(spread, tmp_path, told):
    """As torchrun hands it on to all ranks; or to one of them, whose host is about to go."""
    run, log = run_of("dpo", "zero2", tmp_path, total_episodes=160_000, save_steps=0), tmp_path / "log"
    process = launch([run], 2, log)
    try:
        metrics = tmp_path / "dpo-zero2" / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 2, process, log)
        members = family(process)
        if told == "torchrun":
            process.send_signal(signal.SIGTERM)
        else:
            launching.process_of(1, log).terminate()
        process.wait(30)
        assert left_of(members) == []
    finally:
        kill_all(process)
    checkpoints = list((tmp_path / "dpo-zero2").glob("checkpoint-*"))
    assert len(checkpoints) == 1, log.read_text(errors="replace")[-4000:]
    batch = int(checkpoints[0].name.rpartition("-")[2])
    again = {**run, "resume": True, "total_episodes": 16 * (batch + 2)}
    finish(launch([again], 2, log), log, 120)
    found = metrics_of(tmp_path / "dpo-zero2")
    assert [row["batch"] for row in found] == list(range(1, batch + 3))
    theirs = metrics_of(spread / "dpo-zero2")
    assert found[: len(theirs)] == theirs[: len(found)]


FAILURES = {
    "rank 1 raises": ({"fail": {"rank": 1, "how": "raise"}}, "rank 1 failed: RuntimeError: told to fail"),
    "rank 0 raises": ({"fail": {"rank": 0, "how": "raise"}}, "rank 0 failed: RuntimeError: told to fail"),
    "rank 1 is killed": ({"fail": {"rank": 1, "how": "kill"}}, "rank 1 is gone, without a word"),
    "rank 0 is killed": ({"fail": {"rank": 0, "how": "kill"}}, "rank 0 is gone, without a word"),
    # Rank 0 is busy with something that has nothing to do with the others.
    "rank 1 is killed during rewards": (
        {"fail": {"rank": 1, "how": "kill", "after": 2.0}, "slow_rewards": 120.0},
        "rank 1 is gone, without a word",
    ),
    # Each waits for the others somewhere else, for ever if nothing compared the places.
    "rank 1 leaves out an update": (
        {"fail": {"rank": 1, "how": "an update"}},
        "rank 0 has come to 'training on batch 2', rank 1 to 'publishing version 2'",
    ),
    "rank 1 leaves out its share of the weights": (
        {"strategy": "fsdp", "fail": {"rank": 1, "how": "its share of the weights"}},
        "rank 0 has come to 'reading weights', rank 1 to 'prompts of batch 4'",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failing_rank_ends_all_of_them_within_seconds(tmp_path, name):
    changes, said = FAILURES[name]
    run = {"folder": str(tmp_path), "name": "run", "strategy": "ddp", "staleness": 1, "total_episodes": 800, **changes}
    log = tmp_path / "log"
    process = launch([run], 2, log)
    try:
        wait_for(lambda: "FAILING" in log.read_text(errors="replace"), process, log)
        members, started = family(process), time.monotonic()
        assert process.wait(30) != 0
        assert time.monotonic() - started < 10
        assert said in log.read_text(errors="replace")
        assert left_of(members) == []
    finally:
        kill_all(process)


def wait_for(condition: Callable[[], bool], process: Any, log: Path) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-4000:]
        assert process.poll() is None, log.read_text(errors="replace")[-4000:]
        time.sleep(0.1)
