"""Golden runs: the losses of tiny trainings, stored. A refactor must not move them.

After a change that is meant to move them:  python -m pytest tests/golden --update-golden
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import count_letters

from async_rlhf import KLConfig, LoRAConfig, OffPolicyConfig
from async_rlhf.algorithms.table import BUILT_IN
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


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("name", RUNS)
def test_losses_do_not_move(request, make_policy, make_reward_model, tokenizer, prompts, make_args, name, staleness):
    algorithm = next((a for a in BUILT_IN if name.startswith(a)), "online_dpo")
    args = make_args(algorithm=algorithm, staleness=staleness, **RUNS[name])
    trainer = OnlineTrainer(
        make_policy(),
        args,
        prompts,
        reward_model=make_reward_model(),
        reward_funcs=count_letters,
        processing_class=tokenizer,
    )
    trainer.train()
    lines = [json.loads(line) for line in (Path(args.output_dir) / "metrics.jsonl").read_text().splitlines()]
    found = {key: [line[key] for line in lines] for key in KEYS if key in lines[0]}
    golden = Path(__file__).with_name(f"{name}_staleness_{staleness}.json")
    if request.config.getoption("--update-golden"):
        golden.write_text(json.dumps(found, indent=1) + "\n")
    stored = json.loads(golden.read_text())
    assert stored.keys() == found.keys()
    for key, values in stored.items():
        assert found[key] == pytest.approx(values, rel=2e-3, abs=2e-5), key
