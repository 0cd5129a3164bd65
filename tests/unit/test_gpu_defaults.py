"""What a GPU decides where nobody has: 16 bits, packed rows and limits by tokens. On a CPU nothing is as if there were
no such keys.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import count_letters, new_policy
from transformers import MambaConfig

from async_rlhf import GRPOConfig, OnlineDPOConfig
from async_rlhf.commands.stage import Stage
from async_rlhf.config import ConfigError, GenerationConfig, RayConfig
from async_rlhf.config.sizes import PassLimits
from async_rlhf.config.stages import SFTConfig
from async_rlhf.models import gpu_defaults
from async_rlhf.models.gpu_defaults import decided, packs_rows, with_gpu_defaults
from async_rlhf.run.checkpoint import ResumeState
from async_rlhf.run.trainer import OnlineTrainer
from async_rlhf.studies.plan.command import find_times, with_recipe
from async_rlhf.studies.plan.config import ModelSizeConfig, PlanConfig

GPU = torch.device("cuda:0")
SIZES = {"max_prompt_length": 32, "generation": GenerationConfig(response_length=12)}
ROWS = {"max_tokens_per_pass": 8 * (32 + 12), "annotate_max_tokens": 64 * (32 + 12)}
KEYS = ("bf16", "max_tokens_per_pass", "annotate_max_tokens")


@pytest.fixture
def gpu(monkeypatch):
    """A GPU with bfloat16 and PyTorch's kernel, unless it is told otherwise."""

    def install(bf16: bool = True, kernel: bool = True) -> torch.device:
        monkeypatch.setattr(torch.cuda, "device", lambda device: torch.device("cpu"))
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16 or including_emulation)
        monkeypatch.setattr(gpu_defaults, "runs_kernel", lambda device: kernel)
        return GPU

    install()
    return install


def values(config) -> tuple[object, ...]:
    found = tuple(getattr(config, key) for key in KEYS if hasattr(config, key))
    return (*found, config.generation.dtype) if hasattr(config, "generation") else found


def test_a_gpu_takes_16_bits_and_packs_as_many_tokens_as_the_largest_pass_of_rows_has(gpu, caplog):
    caplog.set_level(logging.INFO, "async_rlhf")
    config = with_gpu_defaults(GRPOConfig(**SIZES), new_policy(), GPU)
    assert values(config) == (True, *ROWS.values(), "bfloat16")
    assert (config.batch_size, config.training_limits.rows(config.max_length)) == (GRPOConfig(**SIZES).batch_size, 8)
    told = 'cuda:0 decides: bf16 true, max_tokens_per_pass 352, annotate_max_tokens 2816, generation.dtype "bfloat16"; '
    assert caplog.messages == [told + "what you set is left as it is"]
    assert with_gpu_defaults(config, new_policy(), GPU) == config
    assert len(caplog.messages) == 1
    pairs = with_gpu_defaults(OnlineDPOConfig(**SIZES), new_policy(), GPU, rows_per_unit=2)
    assert pairs.max_tokens_per_pass == 16 * 44


def test_a_cpu_is_as_before(gpu, caplog):
    caplog.set_level(logging.INFO, "async_rlhf")
    for given in (GRPOConfig(**SIZES), GRPOConfig(bf16=True, **SIZES)):
        config = with_gpu_defaults(given, new_policy(), torch.device("cpu"))
        assert values(config) == (given.in_bfloat16, None, None, "float32")
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("set_", "found"),
    [
        ({"bf16": False}, (False, None, None, "float32")),
        ({"fp16": True}, (False, *ROWS.values(), "float32")),
        ({"bf16": True, "max_tokens_per_pass": None}, (True, None, ROWS["annotate_max_tokens"], "bfloat16")),
        ({"annotate_max_tokens": "auto"}, (True, ROWS["max_tokens_per_pass"], "auto", "bfloat16")),
        ({"max_tokens_per_pass": 100}, (True, 100, ROWS["annotate_max_tokens"], "bfloat16")),
        ({"packing": False}, (True, None, None, "bfloat16")),
        ({"attn_implementation": "eager"}, (True, None, None, "bfloat16")),
        ({"deterministic": True}, (True, None, None, "bfloat16")),
        ({"per_device_train_batch_size": 2}, (True, 2 * 44, ROWS["annotate_max_tokens"], "bfloat16")),
        ({"generation": GenerationConfig(response_length=12, dtype="float32")}, (True, *ROWS.values(), "float32")),
    ],
)
def test_a_key_that_is_set_wins_also_where_it_is_set_to_what_a_cpu_takes(gpu, set_, found):
    assert values(with_gpu_defaults(GRPOConfig(**SIZES | set_), new_policy(), GPU)) == found


@pytest.mark.parametrize(
    ("bf16", "kernel", "set_", "found"),
    [
        (False, False, {}, (False, None, None, "float32")),
        (False, True, {"fp16": True}, (False, *ROWS.values(), "float32")),
        (False, False, {"bf16": True}, (True, None, None, "float32")),  # the GPU imitates it
        (True, False, {}, (True, None, None, "bfloat16")),
    ],
)
def test_a_gpu_that_has_not_all_takes_what_it_has(gpu, bf16, kernel, set_, found):
    assert values(with_gpu_defaults(GRPOConfig(**SIZES | set_), new_policy(), gpu(bf16, kernel))) == found


def test_models_that_cannot_be_packed_are_known_by_name_without_their_weights(gpu, tmp_path):
    kinds = {"can": new_policy().config, "state": MambaConfig(hidden_size=16, num_hidden_layers=1, state_size=4)}
    for name, config in kinds.items():
        config.save_pretrained(tmp_path / name)
    found = {name: packs_rows(str(tmp_path / name), trust=False) for name in kinds}
    assert (found["can"], found["state"]) == (True, False)
    (tmp_path / "adapters").mkdir()
    assert not packs_rows(str(tmp_path / "adapters"), trust=False)
    config = with_gpu_defaults(GRPOConfig(**SIZES), str(tmp_path / "state"), GPU)
    assert values(config) == (True, None, None, "bfloat16")


def test_stages_take_the_same(gpu):
    config = SFTConfig(train="x", output_dir="y", max_length=50)
    assert values(with_gpu_defaults(config, None, GPU)) == (True, 32 * 50)
    own = with_gpu_defaults(config, None, GPU).for_learner(100, "z")
    assert (own.in_bfloat16, own.training_limits) == (True, PassLimits(None, 1600))
    assert own.batch_size == config.for_learner(100, "z").batch_size == 32
    assert values(with_gpu_defaults(config, None, torch.device("cpu"))) == (False, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"generation": GenerationConfig(response_length=12, device="cpu", placement="process")},
        {"launch": "ray", "staleness": 1, "ray": RayConfig(num_gpus=0)},
    ],
)
def test_generators_on_cpus_stay_in_float32(changes):
    config = decided(GRPOConfig(**{**SIZES, **changes}), has_bf16=True, packs=False)
    assert (config.bf16, config.generation.dtype) == (True, "float32")


def resumable(make_args, tokenizer, prompts, **changes) -> OnlineTrainer:
    args = replace(make_args(save_steps=2, total_episodes=32), **changes)
    return OnlineTrainer(new_policy(), args, prompts, reward_funcs=count_letters, processing_class=tokenizer)


def test_a_run_of_before_goes_on_on_a_cpu_and_is_refused_with_the_keys_to_set_where_a_gpu_decides_otherwise(
    make_args, tokenizer, prompts, monkeypatch
):
    trainer = resumable(make_args, tokenizer, prompts)
    trainer.train()
    path = Path(trainer.args.output_dir) / "checkpoint-2" / "resume" / "state.json"
    saved = json.loads(path.read_text())["config"]
    before = {"bf16": False, "max_tokens_per_pass": None, "annotate_max_tokens": None, "generation.dtype": "float32"}
    assert {key: saved[key] for key in before} == before, "as versions before have written it"
    resumable(make_args, tokenizer, prompts, resume=True)
    older = ResumeState.read(path.parents[1])
    older.config = {key: x for key, x in older.config.items() if key not in before}  # which knew no such keys
    older.check(decided(trainer.args, has_bf16=False, packs=False), "online_dpo")

    def as_on_a_gpu(config, model, device, rows_per_unit):
        return decided(config, has_bf16=True, packs=True, rows_per_unit=rows_per_unit)

    monkeypatch.setattr("async_rlhf.run.build.with_gpu_defaults", as_on_a_gpu)
    with pytest.raises(ConfigError) as caught:
        resumable(make_args, tokenizer, prompts, resume=True)
    for told in ("bf16: was False, is True", "max_tokens_per_pass: was None, is ", "generation.dtype: was 'float32'"):
        assert told in str(caught.value)
    old = {"bf16": False, "max_tokens_per_pass": None, "annotate_max_tokens": None, "resume": True}
    resumable(make_args, tokenizer, prompts, **old)


def test_markers_of_stages_that_were_done_before_still_count_without_a_gpu(tmp_path):
    """Also of the trials of a sweep, whose keys stay open, and which a host without a GPU may look at."""
    config = SFTConfig(train="x", output_dir="y")
    stage = Stage(tmp_path, "sft", config, {})
    assert (stage.identity["config"]["bf16"], stage.identity["config"]["max_tokens_per_pass"]) == (False, None)
    assert Stage(tmp_path, "sft", replace(config, bf16=True), {}).identity["config"]["bf16"] is True
    known = json.loads(json.dumps({"stage": "sft", **stage.identity, "results": {}}))
    for old in ({}, {"bf16": "auto", "max_tokens_per_pass": "on_gpu"}, {"bf16": False}):
        kept = {key: x for key, x in known["config"].items() if key not in ("bf16", "max_tokens_per_pass")}
        (tmp_path / "sft.json").write_text(json.dumps({**known, "config": kept | old}))
        assert Stage(tmp_path, "sft", config, {}).done() == {}


def test_a_plan_knows_what_a_gpu_decides(tmp_path):
    recipe = tmp_path / "run.yml"

    def planned(text: str, **model):
        recipe.write_text("model: x\nreward_model: x\nalgorithm: grpo\ndata: {train: x}\ntrain:\n" + text)
        sizes = ModelSizeConfig(parameters=1e9, layers=16, kv_width=512, **model)
        return find_times(with_recipe(PlanConfig(run=str(recipe), devices=4, model=sizes))).times

    open_, low, high = planned("  seed: 0\n"), planned("  bf16: true\n"), planned("  bf16: false\n")
    assert open_.phases(2, False) == low.phases(2, False) != high.phases(2, False)
    assert (open_._weights(), high._weights()) == (2e9, 4e9)
    assert planned("  bf16: false\n", bf16=True, generator_bytes=2.0)._weights() == 2e9
    limited = planned("  per_device_train_batch_size: 4\n  max_prompt_length: 32\n")
    assert (limited.batch.train_rows, limited.batch.annotate_rows) == (4, 64)
