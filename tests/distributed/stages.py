"""Commands in this process, which is one of several ranks or alone, one after the other; and the data that they read.

torchrun --nproc-per-node 2 tests/distributed/stages.py '[["sft", "--train=texts.jsonl", "--output_dir=sft"]]'
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from tiny import byte_tokenizer, new_policy, new_reward_model
from transformers import PreTrainedModel

from async_rlhf.cli import _run
from async_rlhf.commands.stage_loop import StageLoop
from async_rlhf.distributed.parallel import decayed_groups, trainable
from async_rlhf.learner.learner import Learner
from async_rlhf.models.saving import write_model


def smooth_adamw(learner: Learner, own: None) -> torch.optim.Optimizer:
    """With a large epsilon a step is nearly proportional to the gradient: rounding stays rounding."""
    config = learner.config
    groups = decayed_groups(trainable(learner.policy), config.learning_rate, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.learning_rate, weight_decay=config.weight_decay, eps=1e-2)


def write_inputs(folder: Path) -> None:
    """Models, and data of rows with different lengths."""
    write_model(new_policy(), byte_tokenizer(), folder / "policy")
    write_model(new_reward_model(), byte_tokenizer(), folder / "judge")
    rows = {
        "texts": [
            {"query": f"q{i}:", "query_reference_response": f"q{i}:{'ab' * (i % 9)} {i % 7}", "score": i % 5}
            for i in range(45)
        ],
        "pairs": [
            {
                "prompt": f"p{i}",
                "chosen": f" {'ab'[i % 3 > 0]}{'d' * (i % 6)}",
                "rejected": f" {'ab'[i % 3 < 1]}{'d' * (i % 4)}",
            }
            for i in range(45)
        ],
        "rated": [{"text": f"a{'b' * (i % 8)}{i}", "score": (i % 5) * 2.0} for i in range(45)],
    }
    for name, each in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each))
    (folder / "letters.py").write_text(
        "import os\n\n\n"
        "def letters(prompts, completions, **columns):\n"
        "    assert os.environ.get('RANK', '0') == '0', 'functions are called on rank 0 alone'\n"
        "    return [sum(map(ord, text)) % 97 + 0.01 * len(text) for text in completions]\n"
    )


def save_twice(loop: StageLoop) -> None:
    """Leave what there is after the fourth step as if the stage had been killed then, under another name."""
    SAVE(loop)
    if loop.saves is not None:
        loop.saves.finished(wait=True)
    folder = loop.run.folder.path
    if loop.run.ranks.is_main and loop.run.callbacks.state.global_step == 4:
        shutil.copytree(folder, folder.with_name(f".again {folder.name[1:]}"))


def made(learner: Learner, model: PreTrainedModel, *rest: Any, **more: Any) -> None:
    """Say in the log where the weights are that this rank has before the model is sharded."""
    print(f"{rest[2].parallel.strategy}: on rank {os.environ.get('RANK', 0)}: {model.device}", flush=True)
    INIT(learner, model, *rest, **more)


SAVE, INIT = StageLoop.save, Learner.__init__

if __name__ == "__main__":
    torch.set_num_threads(1)
    StageLoop.save, Learner.__init__ = save_twice, made
    Learner._optimizer = smooth_adamw
    for words in json.loads(sys.argv[1]):
        code = _run(words[0], words[1:])
        if code:
            sys.exit(code)
