"""Models that ``sft`` has made from zero, of each body, train with vLLM on chats, and stop where the template says."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import metrics_of, new_args, run
from tiny import json_rows

from async_rlhf.commands.sft import run_sft
from async_rlhf.commands.stage import json_lines
from async_rlhf.config import NewModelConfig, SFTConfig
from async_rlhf.models.loading import load_policy, load_tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.rare]

CHATS = [
    {"messages": [{"role": "user", "content": f"say {i % 6}"}, {"role": "assistant", "content": "ab" * (1 + i // 6)}]}
    for i in range(24)
]


def longer(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    return [float(len(text)) for text in completions]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_chats_from_zero(architecture, tmp_path):
    (tmp_path / "chats.jsonl").write_text(json_lines(CHATS))
    # vLLM's attention on a CPU needs heads of 32.
    size = NewModelConfig(300, hidden_size=64, num_layers=1, num_heads=2, max_positions=96, architecture=architecture)
    config = SFTConfig(
        str(tmp_path / "chats.jsonl"), str(tmp_path / "sft"), new_model=size, chat_template="chatml", num_epochs=20
    )
    run_sft(config)
    tokenizer = load_tokenizer(config.output_dir)
    args = new_args(
        tmp_path, total_episodes=16, max_prompt_length=60, generation={"response_length": 16, "temperature": 1.0}
    )
    policy = load_policy(config.output_dir)
    run(args, tokenizer, CHATS, policy, longer, prompt_field="messages")
    metrics = metrics_of(args.output_dir)
    assert len(metrics) == 2
    assert 0 < max(row["engine/logprob_difference"] for row in metrics) < 1e-4
    samples = json_rows(Path(args.output_dir) / "samples.jsonl")
    assert sum(sample["finish_reason"] == "stop" for sample in samples) >= len(samples) - 1
    assert all("<|im" not in sample["completion"] for sample in samples)
