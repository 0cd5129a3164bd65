"""Every command after the other on local files, by the command line: summaries as Parquet, and chats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict
from safetensors.torch import load_file
from tiny import byte_tokenizer
from transformers import AutoModelForSequenceClassification

from async_rlhf.cli import main
from async_rlhf.models.saving import write_model

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
REWARD = """
def letters(prompts, completions, **columns):
    return [sum(c.isascii() and c.isalpha() for c in text) / 10 for text in completions]
"""
N = 24


def said(prompt: str, answer: str | None = None) -> list[dict[str, str]]:
    answered = [] if answer is None else [{"role": "assistant", "content": answer}]
    return [{"role": "user", "content": prompt}, *answered]


def summaries(folder: Path) -> dict[str, str]:
    """The columns of TL;DR, as Parquet; pairs as a folder by datasets."""
    rows = [{"query": f"post {i}\nTL;DR:", "query_reference_response": f"post {i}\nTL;DR: ab{i % 5}"} for i in range(N)]
    rows.append({"query": "z" * 90, "query_reference_response": "z" * 91})  # is left out everywhere
    Dataset.from_list(rows).to_parquet(str(folder / "posts.parquet"))
    pairs = [{"prompt": row["query"], "chosen": f" good {i}", "rejected": f" b{i}"} for i, row in enumerate(rows[:-1])]
    data = Dataset.from_list(pairs)
    DatasetDict({"train": data, "validation": data.select(range(6))}).save_to_disk(str(folder / "pairs"))
    return {"sft": "posts.parquet", "prompts": "posts.parquet", "field": "query", "pairs": "pairs"}


def chats(folder: Path) -> dict[str, str]:
    """The columns of No Robots and of UltraFeedback, as JSON lines, with the splits in a folder."""
    rows = [{"messages": said(f"say {i}", f"ab{i % 5}"), "category": "x"} for i in range(N)]
    rows.append({"messages": said("z" * 90, "z"), "category": "x"})
    pairs = [{"chosen": said(f"say {i}", f"good {i}"), "rejected": said(f"say {i}", f"b{i}")} for i in range(N)]
    (folder / "pairs").mkdir()
    for name, part in (("chats", rows), ("pairs/train", pairs), ("pairs/validation", pairs[:6])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return {"sft": "chats.jsonl", "prompts": "chats.jsonl", "field": "messages", "pairs": "pairs"}


def run(*words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 0, words


def train_online(data: dict[str, str], caplog) -> None:
    """Two batches from sft by both kinds of reward; the policy has moved."""
    online = {
        "output_dir": "policy",
        "total_episodes": 16,
        "save_steps": 1,
        "learning_rate": 1e-3,
        "non_eos_penalty": "false",
        "max_prompt_length": 60,
        "generation.response_length": 8,
        "generation.placement": "inline",
        "staleness": 0,
        "device": "cpu",
    }
    words = [f"--train.{key}={value}" for key, value in online.items()]
    fields = [f"--data.train={data['prompts']}", f"--data.prompt_field={data['field']}"]
    run("train", "--model=sft", "--reward_model=reward", "--reward=judge.py:letters", *fields, *words)
    assert "dropped 1 of 25 prompts" in caplog.text
    (sample, *_) = (json.loads(line) for line in Path("policy/samples.jsonl").read_text().splitlines())
    assert "TL;DR:" in json.dumps(sample) or "[user]say" in json.dumps(sample)
    before, after = (load_file(f"{name}/model.safetensors") for name in ("sft", "policy/final"))
    assert max((before[name] - after[name]).abs().max().item() for name in after) > 1e-5


@pytest.mark.parametrize("rows", [summaries, chats])
def test_every_command_on_local_files(tmp_path, monkeypatch, make_policy, rows, caplog):
    monkeypatch.chdir(tmp_path)
    Path("judge.py").write_text(REWARD)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    write_model(make_policy(), tokenizer, Path("base"))
    data = rows(tmp_path)
    small = ["--per_device_train_batch_size", "8", "--max_length", "80", "--learning_rate", "1e-3"]
    held_out = [f"--prompt_field={data['field']}", "--max_prompt_length=60", "--response_length=8", "--device=cpu"]

    run("sft", "--model", "base", "--train", data["sft"], "--output_dir", "sft", "--lora.rank", "2", *small)
    assert json.loads(Path("sft/sft.json").read_text())["results"]["dropped"] == 1
    run(
        "pairs",
        "--model=sft",
        "--prompts",
        data["prompts"],
        "--output=pairs.jsonl",
        "--reward=judge.py:letters",
        *held_out,
    )
    assert json.loads(Path("pairs.jsonl.json").read_text())["results"]["pairs"] > 10
    splits = '--splits=["train", "validation"]'
    run(
        "relabel",
        "--data",
        data["pairs"],
        "--output_dir=relabelled",
        splits,
        "--reward=judge.py:letters",
        "--reward_tokenizer=base",
        "--device=cpu",
    )
    assert json.loads(Path("relabelled/.relabel.json").read_text())["results"]["train"]["swapped"] == 0
    run("reward", "--model=sft", "--train=relabelled", "--eval=relabelled", "--output_dir=reward", *small)
    assert AutoModelForSequenceClassification.from_pretrained("reward").config.num_labels == 1

    train_online(data, caplog)

    run(
        "generate", "--run=policy", "--models.sft=sft", "--data", data["prompts"], "--output_dir=generations", *held_out
    )
    run("evaluate", "--generations=generations", "--output_dir=judged", "--reward_model=reward", "--device=cpu")
    models = json.loads(Path("judged/evaluation.json").read_text())["results"]["models"]
    assert list(models) == ["sft", "checkpoint-1", "checkpoint-2", "final"]
    assert models["checkpoint-2"]["reward_mean"] == models["final"]["reward_mean"] != models["sft"]["reward_mean"]
    assert ("win_rate_vs_reference_response" in models["final"]) == (rows is summaries)
