"""Who is a rank, what an accelerate config file asks for, and how work is dealt out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_config

from async_rlhf import OnlineDPOConfig
from async_rlhf.algorithms.table import of_config
from async_rlhf.config import ConfigError, ParallelConfig
from async_rlhf.config.parallel import launched_on_host, launched_rank, launched_ranks
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.generation.placement import worker_devices
from async_rlhf.learner.strategies.choice import from_accelerate
from async_rlhf.models.rows import share_of
from async_rlhf.run import build

OF_TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "2"}


def test_a_rank_is_known_by_all_that_its_launcher_sets():
    assert (launched_rank(OF_TORCHRUN), launched_ranks(OF_TORCHRUN), launched_on_host(OF_TORCHRUN)) == (1, 4, 2)
    stray = {"WORLD_SIZE": "8", "RANK": "3"}  # as some schedulers leave them behind
    assert (launched_rank(stray), launched_ranks(stray), launched_on_host(stray)) == (0, 1, 1)


def test_the_batch_grows_with_the_ranks(monkeypatch):
    config = OnlineDPOConfig(per_device_train_batch_size=4, total_episodes=96, parallel=ParallelConfig(ranks=3))
    assert (config.batch_size, config.num_batches) == (12, 8)
    for name, value in OF_TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert OnlineDPOConfig(per_device_train_batch_size=4, total_episodes=96).batch_size == 16
    with pytest.raises(ConfigError, match=r"total_episodes: got 100; .* x 4 ranks\), such as 96"):
        OnlineDPOConfig(per_device_train_batch_size=4, total_episodes=100)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, ParallelConfig("ddp")),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, ParallelConfig("zero2")),
        (
            {
                "ACCELERATE_USE_DEEPSPEED": "true",
                "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
                "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu",
            },
            ParallelConfig("zero3", cpu_offload=True),
        ),
        ({"ACCELERATE_USE_FSDP": "true"}, ParallelConfig("fsdp")),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_RESHARD_AFTER_FORWARD": "false", "FSDP_OFFLOAD_PARAMS": "true"},
            ParallelConfig("fsdp", cpu_offload=True, reshard_after_forward=False),
        ),
    ],
)
def test_what_accelerate_launch_has_said(said, expected):
    assert from_accelerate(ParallelConfig(), False, said) == expected
    chosen = ParallelConfig("zero1")
    assert from_accelerate(chosen, False, said) == chosen


@pytest.mark.parametrize(("asked", "chosen"), [("bf16", None), ("bf16", "fp16"), ("fp16", None), ("fp16", "bf16")])
def test_a_precision_that_contradicts_is_refused(asked, chosen):
    said, precision = {"ACCELERATE_MIXED_PRECISION": asked}, {"bf16": chosen == "bf16", "fp16": chosen == "fp16"}
    with pytest.raises(
        ConfigError, match=f"{asked}: got False; the accelerate config file says mixed_precision: {asked}"
    ):
        from_accelerate(ParallelConfig(), environment=said, **precision)
    same = {"bf16": asked == "bf16", "fp16": asked == "fp16"}
    assert from_accelerate(ParallelConfig(), environment=said, **same) == ParallelConfig("ddp")


def test_a_stage_that_does_not_exist_is_refused():
    said = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"}
    with pytest.raises(ConfigError, match="zero_stage: 0; must be 1, 2 or 3"):
        from_accelerate(ParallelConfig(), False, said)


@given(parts=st.integers(0, 20), count=st.integers(1, 5))
def test_every_part_is_dealt_once_in_as_many_rounds_to_everyone(parts, count):
    shares = [list(share_of(range(parts), rank, count)) for rank in range(count)]
    assert len({len(hand) for hand in shares}) == 1
    assert sorted(part for hand in shares for part, counts in hand if counts) == list(range(parts))
    assert len(shares[0]) == -(-parts // count)


def test_generators_take_the_gpus_that_no_rank_uses(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    learner = torch.device("cuda:0")
    for name, value in OF_TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert [worker_devices(None, n, learner)[0] for n in range(3)] == ["cuda:3", "cuda:2", "cuda:3"]


def test_zero3_is_refused_where_each_rank_would_hold_a_rounded_copy_of_a_large_model():
    zero, large = ParallelConfig("zero3", ranks=8), 8_000_000_000
    with pytest.raises(ConfigError, match=r"strategy: got 'zero3'; must be \"fsdp\" for 8.0 billion trained"):
        zero.require_size(large, rounded=True)
    zero.require_size(large, rounded=False)
    zero.require_size(2_800_000_000, rounded=True)
    ParallelConfig("fsdp", ranks=8).require_size(large, rounded=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 0}, "ranks: got 0; must be at least 1"),
        ({"ranks": 4, "context_parallel": 3}, "context_parallel: got 3; must divide the 4 ranks (parallel.ranks)"),
        ({"context_parallel": 2}, "context_parallel: got 2; must divide the 1 ranks"),
        ({"context_parallel": 0}, "context_parallel: got 0; must be at least 1"),
        ({"strategy": "ddp", "cpu_offload": True}, 'cpu_offload: got True; must be false with strategy "ddp"'),
        ({"strategy": "fsdp", "deepspeed": {"a": 1}}, "deepspeed: got {'a': 1}; must be empty unless strategy"),
        ({"deepspeed": {"gradient_clipping": 1}}, "deepspeed.gradient_clipping: got 1; must be left out"),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, "deepspeed.zero_optimization.stage: got 2; must be left"),
        ({"strategy": "zero3", "reshard_after_forward": False}, "reshard_after_forward: got False; must be true"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ConfigError) as caught:
        ParallelConfig(**changes)
    assert message in str(caught.value)


def test_heads_that_ranks_cannot_divide_are_found_before_a_model_is_loaded(tmp_path, monkeypatch, make_args):
    monkeypatch.setattr(build, "start_ranks", lambda _: Ranks())
    tiny_config().save_pretrained(tmp_path / "no weights")
    args = make_args(total_episodes=96, parallel=ParallelConfig(ranks=3, context_parallel=3))
    with pytest.raises(ConfigError, match="context_parallel: got 3; must divide the 2 attention heads of the policy"):
        build.begin(args, str(tmp_path / "no weights"), of_config(args))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cuda:1"}, "device: got 'cuda:1'; must be null"),
        (
            {"lora": {"rank": 2, "publish": "adapter"}, "generation": "vllm"},
            "lora.publish: got 'adapter'; must be \"merged\"",
        ),
        ({"staleness": 0, "generation": "inline vllm"}, "generation.placement: got 'inline'; must be"),
    ],
)
def test_what_several_ranks_cannot_do_is_refused(changes, message):
    from async_rlhf.config import GenerationConfig, LoRAConfig

    kinds = {"vllm": {"engine": "vllm"}, "inline vllm": {"engine": "vllm", "placement": "inline"}}
    if "generation" in changes:
        changes = {**changes, "generation": GenerationConfig(**kinds[changes["generation"]])}
    if "lora" in changes:
        changes = {**changes, "lora": LoRAConfig(**changes["lora"])}
    with pytest.raises(ConfigError) as caught:
        OnlineDPOConfig(total_episodes=1600, parallel=ParallelConfig("fsdp", ranks=2), **changes)
    assert message in str(caught.value)
