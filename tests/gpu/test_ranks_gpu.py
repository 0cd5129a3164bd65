"""Two ranks, each with a GPU of its own: NCCL between them, the same run as on one, and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpus import DEVICE, GPU, needs_gpus
from launching import finish, launch, metrics_of, weights_of
from ranks import new_policy

pytestmark = [pytest.mark.gpu, needs_gpus(2)]

EXACT = {"bf16": False, "max_tokens_per_pass": None, "annotate_max_tokens": None}
"""What a GPU would decide otherwise."""
ASYNC = {**EXACT, "staleness": 1, "reward_model": True, "annotate_batch_size": 8, "lr_scheduler_type": "constant"}
LONG = {**ASYNC, "total_episodes": 96, "save_steps": 3}
# One batch: later ones would be sampled by weights that differ by rounding, which bfloat16 turns into other tokens.
LOW = {**ASYNC, "bf16": True, "total_episodes": 16}
CASES: dict[str, dict[str, Any]] = {
    "fsdp": {"strategy": "fsdp", **LONG},
    "offloaded": {"strategy": "fsdp", "parallel": {"cpu_offload": True}, **LONG},
    "ddp": {"strategy": "ddp", **LONG},
    "fsdp in bfloat16": {"strategy": "fsdp", **LOW},
}
COMPARED = ("schedule/version", "objective/scores", "objective/kl", "loss/policy_avg", "grad_norm")
NEAR = 1e-2 if GPU else 1e-3
"""A GPU adds in another order wherever sizes differ."""
NEAR_IN_BF16 = 0.05
RANKS_DEVICE = "cuda" if GPU else "cpu"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Every case on two ranks, and in one process with as large a batch."""
    folder = tmp_path_factory.mktemp("ranks")
    one = {"folder": str(folder), "gradient_accumulation_steps": 2, "device": DEVICE}
    log = folder / "log"
    finish(launch([{**one, "name": "one", **LONG}, {**one, "name": "one in bfloat16", **LOW}], 1, log), log, 300)
    two = [{"folder": str(folder), "name": name, "device": RANKS_DEVICE, **case} for name, case in CASES.items()]
    finish(launch(two, 2, log), log, 600)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_one(folder, case):
    low = CASES[case].get("bf16", False)
    near = NEAR_IN_BF16 if low else NEAR
    ours, one = metrics_of(folder / case), metrics_of(folder / ("one in bfloat16" if low else "one"))
    assert len(ours) == len(one) == (1 if low else 6)
    for mine, theirs in zip(ours, one, strict=True):
        # Before any training the KL is 0 but for rounding, and FSDP rounds otherwise: it casts before it gathers.
        for name in set(COMPARED) - ({"objective/kl"} if low else set()):
            assert mine[name] == pytest.approx(theirs[name], rel=near, abs=near * 1e-2), name
    require_near(weights_of(folder / case), weights_of(folder / ("one in bfloat16" if low else "one")), near)


def test_fsdp_resumes_from_the_middle(folder):
    log = folder / "resumed.log"
    run = {"folder": str(folder), "name": "resumed", "device": RANKS_DEVICE, **CASES["fsdp"], "save_steps": 0}
    finish(launch([{**run, "resume_from": str(folder / "fsdp" / "checkpoint-3")}], 2, log), log, 300)
    rest, whole = metrics_of(folder / "resumed"), metrics_of(folder / "fsdp")[3:]
    assert len(rest) == len(whole) == 3
    for mine, theirs in zip(rest, whole, strict=True):
        for name in COMPARED:
            assert mine[name] == pytest.approx(theirs[name], rel=NEAR, abs=NEAR * 1e-2), name
    require_near(weights_of(folder / "resumed"), weights_of(folder / "fsdp"), NEAR)


def require_near(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], near: float) -> None:
    """To a share of how far training has moved the weights."""
    start = {name.replace("lm_head", "embed_out"): tensor for name, tensor in new_policy().state_dict().items()}
    moved = max((theirs[name] - start[name]).abs().max().item() for name in theirs)
    assert moved > 1e-3
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.allclose(ours[name], tensor, rtol=0, atol=near * moved), name
