"""Completions for evaluation: every checkpoint of a run, once; and evaluation of what lies there."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from async_rlhf.config import ConfigError, EvaluateConfig, GenerateConfig, JudgeConfig
from async_rlhf.evaluation.evaluate import run_evaluate
from async_rlhf.evaluation.generate import read_generations, run_generate
from async_rlhf.evaluation.likelihood import EncodedRow, original_perplexity, response_logprob_sums
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.models import load_policy, write_model
from async_rlhf.stage import json_lines

REWARD = """
def letters(prompts, completions, **columns):
    return [float(sum(c.isascii() and c.isalpha() for c in text)) for text in completions]
"""


@pytest.fixture
def config(tmp_path, make_policy, tokenizer) -> GenerateConfig:
    """Of a run with two checkpoints and its final model."""
    for seed, name in enumerate(("checkpoint-2", "checkpoint-10", "final")):
        write_model(make_policy(seed), tokenizer, tmp_path / "run" / name)
    rows = [{"query": f"p{i}{'z' * (i % 3)}", "reference_response": "ab" * (1 + i % 2), "n": i} for i in range(22)]
    rows.insert(3, {"query": "z" * 40, "reference_response": "", "n": -1})
    (tmp_path / "held.jsonl").write_text(json_lines(rows))
    return GenerateConfig(
        run=str(tmp_path / "run"),
        data=str(tmp_path / "held.jsonl"),
        output_dir=str(tmp_path / "generations"),
        response_length=8,
        max_prompt_length=20,
        batch_size=1,  # eight prompts are written down together
        device="cpu",
    )


@pytest.fixture
def sampled(monkeypatch):
    """How many prompts every call of the engine was given."""
    counts: list[int] = []
    real = TransformersEngine.generate

    def generate(self, prompts, progress=None):
        counts.append(len(prompts))
        return real(self, prompts, progress)

    monkeypatch.setattr(TransformersEngine, "generate", generate)
    return counts


def test_every_checkpoint_answers_every_prompt(config, tmp_path, sampled, tokenizer):
    results = run_generate(config)
    assert (results["prompts"], results["dropped"]) == (22, 1)
    assert list(results["models"]) == ["checkpoint-2", "checkpoint-10", "final"]
    assert sampled == [8, 8, 6] * 3
    found = read_generations(tmp_path / "generations")
    assert list(found) == ["checkpoint-2", "checkpoint-10", "final"]
    for name, (source, lines) in found.items():
        assert source == str(tmp_path / "run" / name)
        rows = [EncodedRow(line.prompt_tokens + line.tokens, len(line.prompt_tokens)) for line in lines]
        sums = response_logprob_sums(load_policy(source), rows, temperature=0.7, batch_size=4)
        assert [sum(line.logprobs) for line in lines] == pytest.approx(sums.tolist(), rel=1e-4)
        for line in lines:
            stopped = line.finish_reason == "stop"
            assert tokenizer.decode(line.tokens[:-1] if stopped else line.tokens) == line.completion
            assert (line.tokens[-1] == 256) == stopped
            assert line.columns.keys() == {"reference_response", "n"}
            assert line.columns["n"] == line.row - (line.row > 3)
    texts = {name: [line.completion for line in lines] for name, (_, lines) in found.items()}
    assert texts["final"] != texts["checkpoint-2"]
    run_generate(config)
    assert len(sampled) == 9  # nothing twice
    more = replace(config, models={"copy": str(tmp_path / "run" / "final")}, checkpoints=["final"])
    run_generate(more)
    assert sampled[9:] == [8, 8, 6]
    assert [line.completion for line in read_generations(tmp_path / "generations")["copy"][1]] == texts["final"]


@pytest.mark.parametrize("cut", [0, 25])
def test_interrupted_it_goes_on_where_it_stopped(config, tmp_path, sampled, monkeypatch, cut):
    config = replace(config, checkpoints=["final"])
    whole = run_generate(replace(config, output_dir=str(tmp_path / "whole")))
    expected = (tmp_path / "whole" / "final.jsonl").read_text()
    real, calls = TransformersEngine.generate, []

    def interrupted(self, prompts, progress=None):
        calls.append(len(prompts))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, prompts, progress)

    monkeypatch.setattr(TransformersEngine, "generate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_generate(config)
    part = tmp_path / "generations" / ".final.jsonl.part"
    assert not (tmp_path / "generations" / "final.jsonl").exists()
    if cut:  # the last line is not whole: the machine lost its power
        part.write_text(part.read_text()[:-cut])
    calls += [0] * 10
    sampled.clear()
    assert run_generate(config) == whole
    assert (tmp_path / "generations" / "final.jsonl").read_text() == expected
    assert sampled == ([6] if not cut else [7])
    assert not part.exists()


def test_a_part_of_other_work_is_not_gone_on_with(config, tmp_path, sampled):
    config = replace(config, checkpoints=["final"])
    run_generate(config)
    done = (tmp_path / "generations" / "final.jsonl").read_text()
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / ".final.jsonl.part").write_text('{"config": {"seed": 0}}\n' + done)
    sampled.clear()
    run_generate(replace(config, seed=1, output_dir=str(folder)))
    assert sampled == [8, 8, 6]
    assert (folder / "final.jsonl").read_text() != done
    with pytest.raises(ConfigError, match="seed: was 0, is 1"):
        run_generate(replace(config, seed=1))


def test_what_is_wrong_is_said_before_anything_is_sampled(config, tmp_path):
    with pytest.raises(ConfigError, match=r"run: got .*; must be the output folder of train, with checkpoints"):
        run_generate(replace(config, run=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"got 'checkpoint-3'; must be among checkpoint-2, checkpoint-10"):
        run_generate(replace(config, checkpoints=["checkpoint-3"]))
    with pytest.raises(ConfigError, match=r"models: got {}; give at least one"):
        replace(config, run=None)
    with pytest.raises(ConfigError, match="models: got 'a/b'; must be a name that can be a file's"):
        replace(config, models={"a/b": "x"})
    with pytest.raises(ConfigError, match=r"generations: got .*; must be the output folder of async-rlhf generate"):
        read_generations(tmp_path)


# ---------------------------------------------------------------- evaluation of it


@pytest.fixture
def evaluation(config, tmp_path) -> EvaluateConfig:
    (tmp_path / "judge.py").write_text(REWARD)
    return EvaluateConfig(
        generations=config.output_dir,
        output_dir=str(tmp_path / "evaluation"),
        reward_funcs=[f"{tmp_path / 'judge.py'}:letters"],
        batch_size=4,
        device="cpu",
    )


def test_generations_are_judged_as_models_are(config, evaluation, tmp_path, sampled):
    run_generate(config)
    found = run_evaluate(evaluation)
    assert sampled == [8, 8, 6] * 3
    own = {key: getattr(config, key) for key in ("run", "data", "response_length", "max_prompt_length", "device")}
    again = run_evaluate(replace(evaluation, generations=None, output_dir=str(tmp_path / "again"), **own, batch_size=1))
    assert again["dropped"] == 1
    assert found["reference"] == again["reference"] == "checkpoint-2"
    for name, one in found["models"].items():
        other = again["models"][name]
        assert other.keys() == one.keys() | {"perplexity"}  # of the human responses needs the model
        for key in one:
            assert one[key] == pytest.approx(other[key], rel=1e-4, abs=1e-5), key
    assert (tmp_path / "evaluation" / "evaluation.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    text = (tmp_path / "evaluation" / "evaluation.txt").read_text()
    for word in (
        "wins against human responses",
        "at equal length",
        "ties",
        "perplexity under reference",
        "checkpoint-10",
    ):
        assert word in text


def test_perplexities_by_hand(config, evaluation, tmp_path):
    run_generate(config)
    reference = str(tmp_path / "run" / "checkpoint-10")
    found = run_evaluate(replace(evaluation, ref_model=reference))["models"]
    model = load_policy(reference)
    for name, (_, lines) in read_generations(tmp_path / "generations").items():
        nats, tokens, original, kl = 0.0, 0, [], []
        for line in lines:
            row = EncodedRow(line.prompt_tokens + line.tokens, len(line.prompt_tokens))
            alone = -response_logprob_sums(model, [row], temperature=1.0, batch_size=1).item()
            nats, tokens = nats + alone, tokens + len(line.tokens)
            original.append(torch.tensor(alone / (len(line.prompt_tokens) + len(line.tokens) - 1)).exp().item())
            kl.append(sum(line.logprobs) - response_logprob_sums(model, [row], temperature=0.7, batch_size=1).item())
        assert found[name]["perplexity_under_reference"] == pytest.approx(
            torch.tensor(nats / tokens).exp().item(), rel=1e-4
        )
        assert found[name]["ppl_original"] == pytest.approx(sum(original) / len(original), rel=1e-4)
        assert found[name]["ppl_original"] < found[name]["perplexity_under_reference"]
        assert found[name]["kl_to_reference"]["estimate"] == pytest.approx(sum(kl) / len(kl), rel=1e-3, abs=1e-4)
    assert original_perplexity(torch.tensor([-2.0, -6.0]), [EncodedRow((1, 2, 3), 2), EncodedRow((1,) * 5, 1)]) == (
        pytest.approx((torch.tensor(1.0).exp() + torch.tensor(1.5).exp()).item() / 2)
    )


def test_generations_outlive_their_models(config, evaluation, tmp_path, caplog):
    run_generate(config)
    (tmp_path / "run").rename(tmp_path / "moved")
    found = run_evaluate(evaluation)
    assert "no KL and no perplexity under the reference: give ref_model" in caplog.text
    assert "kl_to_reference" not in found["models"]["final"]
    assert "win_rate_vs_checkpoint-2" in found["models"]["final"]
    with pytest.raises(ConfigError, match="ref_model"):
        run_evaluate(replace(evaluation, ref_model=str(tmp_path / "run" / "final"), output_dir=str(tmp_path / "b")))


def test_functions_get_every_column_but_the_prompt(config, evaluation, tmp_path):
    """Also one that is called `query` beside another that is the prompt."""
    rows = [{"ask": f"p{i}", "query": f"other {i}", "query_reference_response": f"p{i} it"} for i in range(4)]
    (tmp_path / "asked.jsonl").write_text(json_lines(rows))
    (tmp_path / "judge.py").write_text(
        "def letters(prompts, completions, query, query_reference_response):\n"
        "    assert prompts == [f'p{i}' for i in range(4)] and query == [f'other {i}' for i in range(4)]\n"
        "    return [len(text) for text in completions]\n"
    )
    run_generate(replace(config, data=str(tmp_path / "asked.jsonl"), prompt_field="ask", checkpoints=["final"]))
    assert run_evaluate(evaluation)["reference_response"]["gold_mean"]["estimate"] == 3.0


def test_a_judge_that_compares(config, evaluation, tmp_path):
    from test_pairwise import Server, serving

    run_generate(config)
    server = Server(lambda first, second: "A" if len(first) > len(second) else "B")
    with serving(server) as url:
        changed = replace(evaluation, reward_funcs=[], judge=JudgeConfig(url=url, model="m"))
        found = run_evaluate(changed)
        asked = len(server.requests)
        assert run_evaluate(changed) == found
        assert len(server.requests) == asked
    lines = read_generations(tmp_path / "generations")
    ours, human = (
        [one.completion for one in lines["final"][1]],
        [one.columns["reference_response"] for one in lines["final"][1]],
    )
    pairs = [(len(a), len(b), a == b) for a, b in zip(ours, human, strict=True)]
    by_hand = sum(0.5 if a == b else float(a > b) for a, b, _ in pairs) / len(pairs)
    assert found["models"]["final"]["win_rate_vs_reference_response"]["estimate"] == pytest.approx(by_hand)
    assert "gold_mean" not in found["models"]["final"]
    assert found["reference_response"] == {}
    assert (tmp_path / "evaluation" / "evaluation.png").is_file()
    rows = [json.loads(line) for line in (tmp_path / "evaluation" / "samples.jsonl").read_text().splitlines()]
    assert rows[0]["models"]["final"]["score"] is None


def test_generations_and_models_do_not_go_together(evaluation):
    for change in ({"run": "x"}, {"models": {"a": "b"}}, {"data": "x"}):
        with pytest.raises(ConfigError, match="must be left out with generations"):
            replace(evaluation, **change)
    with pytest.raises(ConfigError, match=r"reward_funcs: got .*; must be left out with judge.url"):
        replace(evaluation, judge=JudgeConfig(url="http://localhost:1", model="m"))
    with pytest.raises(ConfigError, match="reward_tokenizer: got 'x'; must be null without reward_model"):
        replace(evaluation, reward_tokenizer="x")
