"""Golden runs: the losses of tiny trainings and supervised stages, stored. A refactor must not move them.

They compute in float64, in which the first weights are drawn, too: in float32 these differ between processors, and so
would all that is learned from them.

After a change that is meant to move them:  python -m pytest tests/golden --update-golden
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import in_float64
from tiny import count_letters, json_rows

from async_rlhf import KLConfig, LoRAConfig, OffPolicyConfig
from async_rlhf.algorithms.table import BUILT_IN, find
from async_rlhf.commands.reward import run_reward
from async_rlhf.commands.sft import run_sft
from async_rlhf.commands.stage import json_lines
from async_rlhf.config import AdapterConfig, RewardConfig, SFTConfig
from async_rlhf.generation import audit
from async_rlhf.models.saving import write_model
from async_rlhf.run.trainer import OnlineTrainer

KEYS = (
    "loss/policy_avg",
    "loss/value_avg",
    "objective/scores",
    "objective/kl",
    "objective/rlhf_reward",
    "rewards/margins",
    "policy/behaviour_kl",
    "policy/approxkl_avg",
    "policy/clipfrac_avg",
    "policy/importance_weight",
    "val/ess_sequence",
    "grad_norm",
    "value_grad_norm",
)
RUNS = {
    "online_dpo": {"loss_type": "sigmoid"},
    "online_ipo": {"loss_type": "ipo"},
    "online_dpo_best_of_4_two_epochs": {"samples_per_prompt": 4, "num_epochs": 2},
    "online_dpo_lora": {"lora": LoRAConfig(rank=4)},
    "best_of_k": {"samples_per_prompt": 4, "kl": KLConfig(coef=0.1, where="loss", estimator="k3")},
    "rloo": {"samples_per_prompt": 4, "num_epochs": 2},
    "ppo": {"num_epochs": 2},
    "ppo_shared_trunk": {"shared_trunk": True, "kl": KLConfig(target=0.01, horizon=100), "vf_coef": 0.5},
    "grpo": {"samples_per_prompt": 4, "num_epochs": 2},
    "grpo_token_masked": {
        "samples_per_prompt": 4,
        "normalization": "token",
        "scale_rewards": "none",
        "cliprange_high": 0.28,
        "off_policy": OffPolicyConfig(importance="masked", level="sequence", cap=1.2),
    },
    "dr_grpo": {"samples_per_prompt": 4, "num_epochs": 2},
    "gspo": {"samples_per_prompt": 4, "num_epochs": 2},
    "cispo": {"samples_per_prompt": 4, "num_epochs": 2, "cliprange_high": 0.1},
    "reinforce_pp": {"num_epochs": 2},
}
"""Name of each run, which begins with the algorithm's, and what is not at its default."""
OF_PAIRS = {
    "pairs_hinge": {"loss_type": "hinge", "beta": 1.5},
    "pairs_conservative": {"flipped": 0.2},
    "pairs_robust": {"flipped": 0.2, "robust": True},
    "pairs_length_normalised": {"per_token": True, "beta": 2.0, "samples_per_prompt": 3, "pairs": "all"},
    "pairs_simpo": {"with_reference": False, "per_token": True, "beta": 2.0, "target": 1.0, "num_epochs": 2},
    "pairs_likelihood": {"nll": 0.2, "samples_per_prompt": 4, "min_gap": 1.0},
}
"""The same of an algorithm from a file of its own."""
PAIRS = f"{Path(__file__).parents[2] / 'recipes/pairs/pairs.py'}:PAIRS"


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("name", [*RUNS, *OF_PAIRS])
def test_losses_do_not_move(
    monkeypatch, request, make_policy, make_reward_model, tokenizer, prompts, make_args, name, staleness
):
    algorithm = PAIRS if name in OF_PAIRS else next((a for a in BUILT_IN if name.startswith(a)), "online_dpo")
    inline = {"placement": "inline"}  # a worker would compute in float32
    args = make_args(generation=inline, algorithm=algorithm, staleness=staleness, **(RUNS | OF_PAIRS)[name])
    for table in (audit.TOLERANCE, audit._LEAST_NOISE):
        monkeypatch.setitem(table, torch.float64, table[torch.float32])
    given = {"algorithm": find(algorithm), "reward_funcs": count_letters, "processing_class": tokenizer}
    with in_float64():
        OnlineTrainer(make_policy(), args, prompts, reward_model=make_reward_model(), **given).train()
    lines = json_rows(Path(args.output_dir) / "metrics.jsonl")
    found = {key: [line[key] for line in lines] for key in KEYS if key in lines[0]}
    compare(request, f"{name}_staleness_{staleness}", found)


def compare(request: pytest.FixtureRequest, name: str, found: dict[str, Any]) -> None:
    golden = Path(__file__).with_name(f"{name}.json")
    if request.config.getoption("--update-golden"):
        golden.write_text(json.dumps(found, indent=1) + "\n")
    stored = json.loads(golden.read_text())
    assert stored.keys() == found.keys()
    for key, values in stored.items():
        assert found[key] == pytest.approx(values, rel=1e-6, abs=1e-8), key


ROWS: dict[str, list[dict[str, Any]]] = {
    "texts": [
        {"query": f"q{i}:", "query_reference_response": f"q{i}:{'ab' * (i % 9)} {i % 7}", "score": i % 5}
        for i in range(45)
    ],
    "pairs": [
        {"prompt": f"p{i}", "chosen": f" a{'d' * (i % 6)}", "rejected": f" {'ab'[i % 3 > 0]}{'d' * (i % 4)}"}
        for i in range(45)
    ],
}
STAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("texts", {"weight_decay": 0.1, "lr_scheduler_type": "cosine", "eval_steps": 4}),
    "sft_lora": ("texts", {"lora": AdapterConfig(rank=2), "completion_only": False, "warmup_steps": 2}),
    "sft_by_tokens": ("texts", {"max_tokens_per_pass": 50}),
    "reward": ("pairs", {"center_rewards_coefficient": 0.1, "eval_steps": 0.5, "gradient_checkpointing": True}),
    "reward_lora": ("pairs", {"lora": AdapterConfig(rank=2)}),
    "ratings": ("texts", {"max_tokens_per_pass": 60}),
}
"""Name of each stage, which begins with the command's unless rows are rated: its data, and what is not at default."""


@pytest.mark.parametrize("name", STAGES)
def test_losses_of_stages_do_not_move(request, tmp_path, make_policy, tokenizer, name):
    """Nor the lines of the history, nor what is held out. Up to rounding: sums may be taken in another order."""
    data, changes = STAGES[name]
    (tmp_path / "rows.jsonl").write_text(json_lines(ROWS[data]))
    common = {"eval_fraction": 0.2, "num_epochs": 1.7, "per_device_train_batch_size": 4, "logging_steps": 2}
    values = {
        "train": str(tmp_path / "rows.jsonl"),
        "output_dir": str(tmp_path / "out"),
        "model": str(tmp_path / "base"),
    }
    values |= {**common, "gradient_accumulation_steps": 2, "learning_rate": 1e-2, **changes}
    with in_float64():
        write_model(make_policy(), tokenizer, tmp_path / "base")
        results = run_sft(SFTConfig(**values)) if name.startswith("sft") else run_reward(RewardConfig(**values))
    lines = json_rows(tmp_path / "out" / "metrics.jsonl")
    found = {f"{line['step']} {key}": value for line in lines for key, value in line.items()}
    found |= {key: value for key, value in results.items() if not isinstance(value, list)}
    compare(request, name, found)
