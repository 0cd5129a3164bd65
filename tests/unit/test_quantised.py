"""Reward models that a user has loaded in 4 or 8 bits: they score in training, and are known by all that they hold."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import tiny
import torch
from tiny import StopAfter, json_rows, new_args
from torch import nn
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForSequenceClassification, PreTrainedModel

from async_rlhf import OnlineDPOTrainer
from async_rlhf.config import ConfigError
from async_rlhf.models.forward import score_rows
from async_rlhf.models.loading import frozen_checksum, load_reward_model
from async_rlhf.models.saving import write_model

pytestmark = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="pip install 'async-rlhf[quantized]'")
ROWS = [tuple(range(start, start + 24)) for start in (1, 40, 90, 200)]
SIZES = {**tiny.LLAMA_SIZES, "hidden_size": 128, "intermediate_size": 256}


@pytest.fixture
def gold(tmp_path, tokenizer) -> str:
    """The folder of a reward model whose layers are larger than a block of 4-bit weights."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, vocab_size=258, eos_token_id=256, pad_token_id=257, num_labels=1)
    write_model(LlamaForSequenceClassification(config), tokenizer, tmp_path / "gold")
    return str(tmp_path / "gold")


def loaded(gold: str, bits: int) -> PreTrainedModel:
    """As docs/rewards.md loads it."""
    how = BitsAndBytesConfig(load_in_8bit=bits == 8, load_in_4bit=bits == 4, llm_int8_skip_modules=["score"])
    return LlamaForSequenceClassification.from_pretrained(
        gold, num_labels=1, quantization_config=how, dtype=torch.float32, device_map={"": "cpu"}
    )


def linear_bytes(model: nn.Module) -> int:
    layers = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not model.score]
    return sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_run_scores_with_it_and_resumes_with_no_other(gold, make_policy, tokenizer, tmp_path, bits):
    """As near to the whole model as transformers' own scores are: processors without VNNI multiply 8 bits worse."""

    def train(bits: int, *callbacks, **changes) -> PreTrainedModel:
        args = new_args(tmp_path, "run", total_episodes=24, save_steps=1, **changes)
        model = loaded(gold, bits)
        trainer = OnlineDPOTrainer(
            make_policy(), args, tiny.PROMPTS, reward_model=model, processing_class=tokenizer, callbacks=callbacks
        )
        trainer.train()
        return model

    with pytest.raises(SystemExit, match=r"^0$"):
        train(bits, StopAfter(1))
    with pytest.raises(ConfigError, match="reward_model: was"):
        train(12 - bits, resume=True)
    model = train(bits, resume=True)
    assert all("objective/scores" in row for row in json_rows(tmp_path / "run" / "metrics.jsonl"))
    whole = load_reward_model(gold)
    expected, found = score_rows(whole, ROWS, 2), score_rows(model, ROWS, 2)
    with torch.no_grad():
        plain = loaded(gold, bits)(torch.tensor(ROWS)).logits[:, 0]
    ours, theirs = ((scores - expected).norm() / expected.norm() for scores in (found, plain))
    assert 0 < ours < 1.05 * theirs < 0.3
    assert linear_bytes(model) * 32 == linear_bytes(whole) * bits
    assert torch.equal(model.score.weight, whole.score.weight)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_checksum_covers_all_that_decides_a_score(gold, bits):
    model = loaded(gold, bits)
    before = frozen_checksum(model)
    assert frozen_checksum(model) == before == frozen_checksum(loaded(gold, bits))
    assert before != frozen_checksum(load_reward_model(gold))
    # Twice the weights of a layer are the same few bits with twice the scale.
    doubled = load_reward_model(gold)
    with torch.no_grad():
        doubled.model.layers[0].mlp.up_proj.weight.mul_(2)
    doubled.save_pretrained(gold)
    doubled = loaded(gold, bits)
    layers = [each.model.layers[0].mlp.up_proj.weight for each in (model, doubled)]
    assert torch.equal(*layers)
    assert frozen_checksum(doubled) != before
