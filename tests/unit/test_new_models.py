"""Models from zero: the body, the tokenizer, the chat template; and the rest of the road with each body."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import byte_tokenizer, json_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rlhf import config as keys
from async_rlhf.commands.evaluate import run_evaluate
from async_rlhf.commands.reward import run_reward
from async_rlhf.commands.sft import run_sft
from async_rlhf.commands.stage import json_lines
from async_rlhf.commands.train import run_train
from async_rlhf.config.online import OnlineConfig
from async_rlhf.data.templates import CHATML, read_template, use_template
from async_rlhf.data.tokenizer import train_tokenizer
from async_rlhf.models.loading import load_policy, load_tokenizer
from async_rlhf.models.new import new_language_model
from async_rlhf.models.saving import write_model
from async_rlhf.models.weights import checksum, named_weights
from async_rlhf.run.config import DataConfig, RunConfig

ARCHITECTURES = ("gpt_neox", "llama", "qwen2", "qwen3")


def size(architecture: str = "llama", **changes: int) -> keys.NewModelConfig:
    values = {"vocab_size": 300, "hidden_size": 32, "num_layers": 1, "num_heads": 2, "max_positions": 96}
    return keys.NewModelConfig(**values | changes, architecture=architecture)


def chat(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


CHATS = [{"messages": chat(f"say {i % 6}", "ab" * (1 + i // 6)), "n": i} for i in range(24)]
"""Each question has four answers, so samples differ."""


def written(path: Path, rows) -> str:
    path.write_text(json_lines(rows))
    return str(path)


@pytest.fixture(scope="module")
def bpe():
    return train_tokenizer(["some words and some more words"] * 4, 300, 96)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bodies_by_name(architecture, bpe, tmp_path):
    model = new_language_model(size(architecture), bpe, seed=0)
    assert model.config.model_type == architecture
    assert model.config.vocab_size == len(bpe)
    assert model.config.max_position_embeddings == 96
    twin, other = (new_language_model(size(architecture), bpe, seed) for seed in (0, 1))
    assert checksum(named_weights(twin)) == checksum(named_weights(model))
    assert checksum(named_weights(other)) != checksum(named_weights(model))
    write_model(model, bpe, tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert type(again) is type(model)
    assert checksum(named_weights(again)) == checksum(named_weights(model))
    # About as many weights in every body: Pythia has two matrices four times as wide, the others three narrower ones.
    weights = {name: new_language_model(size(name, hidden_size=96), bpe, 0).num_parameters() for name in ARCHITECTURES}
    assert max(weights.values()) / min(weights.values()) < 1.05


def test_a_size_that_no_body_has():
    with pytest.raises(keys.ConfigError, match=r"hidden_size: got 6; must be an even multiple of num_heads \(2\)"):
        size(hidden_size=6)


def test_the_template_brings_its_tokens_and_the_end_of_an_answer(bpe):
    tokenizer = train_tokenizer(["words"], 300, 96)
    assert use_template(tokenizer, CHATML) == ["<|im_start|>", "<|im_end|>"]
    assert tokenizer.eos_token == "<|im_end|>"
    text = tokenizer.apply_chat_template(chat("a", "b"), tokenize=False)
    assert text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(tokenizer.eos_token_id) == 2
    assert tokenizer.decode(ids) == text
    assert use_template(tokenizer, CHATML) == []


@pytest.mark.parametrize(
    ("template", "special", "end"),
    [
        # What a template writes from pieces is found in what it has written.
        ("{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>{% endfor %}", ["</s>", "<|user|>"], "</s>"),
        ("{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}", [], "<|endoftext|>"),
        ("{% for m in messages %}{{ m.content }}{{ eos_token }}<|x|>{% endfor %}", ["<|x|>"], "<|endoftext|>"),
        (
            "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}",
            ["<start_of_turn>", "<end_of_turn>"],
            "<end_of_turn>",
        ),
    ],
)
def test_other_templates(template, special, end):
    tokenizer = train_tokenizer(["words"], 300, 96)
    assert set(special) <= set(use_template(tokenizer, template))
    assert tokenizer.eos_token == end
    for token in special:
        assert tokenizer.encode(f"a{token}b") == [
            *tokenizer.encode("a"),
            tokenizer.convert_tokens_to_ids(token),
            *tokenizer.encode("b"),
        ]


def test_where_a_template_comes_from(tmp_path, bpe):
    (tmp_path / "own.jinja").write_text(CHATML)
    assert read_template("chatml") == read_template(str(tmp_path / "own.jinja")) == read_template(CHATML) == CHATML
    with pytest.raises(
        keys.ConfigError, match=r"chat_template: got 'chatlm'; there is no such file; must be \"chatml\", a"
    ):
        read_template("chatlm")
    for text, message in (
        ("{% for %}", "it cannot write a question and its answer"),
        ("{{ messages[0].content }}", "it writes 'the answer' as 'the question'; must have every message's content"),
    ):
        with pytest.raises(keys.ConfigError, match=rf"chat_template: {message}"):
            use_template(train_tokenizer(["words"], 300, 96), text)
    with pytest.raises(keys.ConfigError, match="chat_template: got ' '; must not be empty"):
        keys.SFTConfig("d.jsonl", output_dir="o", chat_template=" ")


def sft(tmp_path: Path, train: str, **changes) -> keys.SFTConfig:
    values = {"new_model": size(), "per_device_train_batch_size": 8, "learning_rate": 1e-2, "num_epochs": 20.0}
    return keys.SFTConfig(train, output_dir=str(tmp_path / "sft"), **values | changes)


def online(folder: Path, algorithm: str = "online_dpo", **changes) -> OnlineConfig:
    """Two batches of four prompts."""
    values = {
        "output_dir": str(folder / "policy"),
        "staleness": 0,
        "total_episodes": 8,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "max_prompt_length": 60,
        "device": "cpu",
        "num_threads": 1,
        "progress": False,
        "generation": keys.GenerationConfig(response_length=16, temperature=1.0, num_threads=1),
    }
    return RunConfig.of(algorithm).__dataclass_fields__["train"].type(**values | changes)


@pytest.mark.parametrize(("architecture", "staleness"), [("llama", 0), ("qwen2", 0), ("qwen3", 1)])
def test_the_whole_road_on_chats_from_zero(tmp_path, architecture, staleness):
    """sft, reward, train (in this process and in another one), evaluate; answers end with the template's token."""
    data = written(tmp_path / "chats.jsonl", CHATS)
    new = size(architecture)
    assert run_sft(sft(tmp_path, data, new_model=new, chat_template="chatml"))["train_loss"] < 2
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "sft")
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_token_id == stop
    assert stop in load_policy(str(tmp_path / "sft")).generation_config.eos_token_id

    rated = [{"prompt": chat(f"say {i % 12}", "")[:1], "completion": "ab" * (i % 3), "score": i % 3} for i in range(36)]
    reward = keys.RewardConfig(
        written(tmp_path / "rated.jsonl", rated), str(tmp_path / "reward"), model=str(tmp_path / "sft"), num_epochs=2
    )
    assert run_reward(reward)["eval_rows"] > 0

    run = RunConfig(
        str(tmp_path / "sft"),
        DataConfig(data, prompt_field="messages", eval_fraction=0.3),
        reward_model=str(tmp_path / "reward"),
        train=online(tmp_path, staleness=staleness),
    )
    run_train(run)
    samples = json_rows(tmp_path / "policy" / "samples.jsonl")
    assert {sample["finish_reason"] for sample in samples} == {"stop"}
    assert all("<|im" not in sample["completion"] for sample in samples)
    final = AutoModelForCausalLM.from_pretrained(tmp_path / "policy" / "final", dtype=torch.float32)
    assert final.config.model_type == architecture
    before = dict(load_policy(str(tmp_path / "sft")).named_parameters())
    assert max((value - before[name]).abs().max().item() for name, value in final.named_parameters()) > 1e-4

    found = run_evaluate(
        keys.EvaluateConfig(
            models={"sft": str(tmp_path / "sft"), "policy": str(tmp_path / "policy" / "final")},
            data=data,
            prompt_field="messages",
            output_dir=str(tmp_path / "evaluation"),
            reward_model=str(tmp_path / "reward"),
            response_length=16,
            device="cpu",
        )
    )
    assert found["prompts"] == 24
    assert found["models"]["policy"]["ended_share"] > 0.9


def test_merges_are_not_spent_on_the_template(tmp_path):
    """The vocabulary's words are those of the chats; the template's tokens are never part of one."""
    data = written(tmp_path / "chats.jsonl", CHATS)
    run_sft(sft(tmp_path, data, chat_template="chatml", num_epochs=1))
    words = load_tokenizer(str(tmp_path / "sft")).get_vocab()
    assert "assistant" in words
    assert {word for word in words if "<|" in word or "|>" in word or "start" in word} == {
        *("<|endoftext|>", "<|padding|>", "<|im_start|>", "<|im_end|>")
    }


def test_a_given_tokenizer_decides_the_vocabulary(tmp_path):
    given = byte_tokenizer()
    given.save_pretrained(tmp_path / "bytes")
    data = written(tmp_path / "chats.jsonl", CHATS)
    with pytest.raises(keys.ConfigError, match=r"new_model.vocab_size: got 300; must be left out with tokenizer"):
        sft(tmp_path, data, tokenizer="bytes")
    with pytest.raises(keys.ConfigError, match="tokenizer: got 'bytes'; must be null with model, which has its own"):
        sft(tmp_path, data, new_model=size(vocab_size=1536), tokenizer="bytes", model="m")
    new, place = size(vocab_size=1536), str(tmp_path / "bytes")
    run_sft(sft(tmp_path, data, num_epochs=1, new_model=new, tokenizer=place, chat_template="chatml"))
    tokenizer = load_tokenizer(str(tmp_path / "sft"))
    assert len(tokenizer) == load_policy(str(tmp_path / "sft")).config.vocab_size == len(given) + 2
    assert tokenizer.get_vocab().items() >= given.get_vocab().items()
    assert (tokenizer.model_max_length, tokenizer.eos_token) == (96, "<|im_end|>")


def test_a_template_for_a_model_that_has_none(tmp_path, make_policy, tokenizer):
    """Its new tokens get embeddings, which are trained; the old ones keep theirs up to then."""
    write_model(make_policy(), tokenizer, tmp_path / "base")
    data = written(tmp_path / "chats.jsonl", CHATS)
    chats = sft(tmp_path, data, model=str(tmp_path / "base"), new_model=keys.NewModelConfig(), num_epochs=1)
    with pytest.raises(
        keys.ConfigError, match=r"is a chat, and no tokenizer with a chat template .* \(sft adds one: chat"
    ):
        run_sft(chats)
    with pytest.raises(
        keys.ConfigError, match=r"lora.rank: got 2; must be 0 where chat_template adds tokens \(<\|im_start"
    ):
        run_sft(replace(chats, chat_template="chatml", lora=keys.AdapterConfig(2)))
    run_sft(replace(chats, chat_template="chatml", learning_rate=1e-9))
    model, base = (load_policy(str(tmp_path / name)) for name in ("sft", "base"))
    assert model.config.vocab_size == 260
    for side in ("input", "output"):
        ours, old = (getattr(one, f"get_{side}_embeddings")().weight for one in (model, base))
        assert torch.allclose(ours[:258], old, atol=1e-6)
        assert torch.allclose(ours[258:], old.mean(dim=0).expand(2, -1), atol=1e-3)
    assert load_tokenizer(str(tmp_path / "sft")).eos_token_id == 259


def test_a_template_file_counts_by_its_content(tmp_path):
    data, file = written(tmp_path / "chats.jsonl", CHATS), tmp_path / "own.jinja"
    file.write_text(CHATML)
    config = sft(tmp_path, data, num_epochs=1, chat_template=str(file))
    results = run_sft(config)
    assert run_sft(config) == results
    file.write_text(CHATML.replace("im_", "in_"))
    with pytest.raises(keys.ConfigError, match=r"chat_template: was '.*own.jinja' \(xxh3:\w+\), is "):
        run_sft(config)
    with pytest.raises(keys.ConfigError, match=r"chat_template: was '.*own.jinja' .*, is 'chatml' "):
        run_sft(replace(config, chat_template="chatml"))
