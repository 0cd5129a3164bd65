"""Golden runs: the losses of tiny trainings, stored. A refactor must not move them.

After a change that is meant to move them:  python -m pytest tests/golden --update-golden
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import count_letters

from async_rlhf import OnlineDPOTrainer

KEYS = ("loss/policy_avg", "objective/scores", "objective/kl", "rewards/margins", "policy/behaviour_kl", "grad_norm")
RUNS = {
    "online_dpo": {"loss_type": "sigmoid"},
    "online_ipo": {"loss_type": "ipo"},
    "online_dpo_best_of_4_two_epochs": {"samples_per_prompt": 4, "num_epochs": 2},
}


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("name", RUNS)
def test_losses_do_not_move(request, make_policy, make_reward_model, tokenizer, prompts, make_args, name, staleness):
    args = make_args(staleness=staleness, **RUNS[name])
    trainer = OnlineDPOTrainer(
        make_policy(),
        args,
        prompts,
        reward_model=make_reward_model(),
        reward_funcs=count_letters,
        processing_class=tokenizer,
    )
    trainer.train()
    lines = (Path(args.output_dir) / "metrics.jsonl").read_text().splitlines()
    found = {key: [json.loads(line)[key] for line in lines] for key in KEYS}
    golden = Path(__file__).with_name(f"{name}_staleness_{staleness}.json")
    if request.config.getoption("--update-golden"):
        golden.write_text(json.dumps(found, indent=1) + "\n")
    stored = json.loads(golden.read_text())
    for key in KEYS:
        assert found[key] == pytest.approx(stored[key], rel=2e-3, abs=2e-5), key
