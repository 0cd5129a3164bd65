"""Completions for evaluation: every checkpoint of a run, once; and evaluation of what lies there."""

from __future__ import annotations

import json
import os
import re
from dataclasses import fields, replace
from datetime import datetime

import pytest
import torch
from tiny import byte_tokenizer, json_rows

from async_rlhf.commands.evaluate import run_evaluate
from async_rlhf.commands.evaluation.generations import read_generations
from async_rlhf.commands.evaluation.likelihood import EncodedRow, original_perplexity, response_logprob_sums
from async_rlhf.commands.evaluation.statistics import clustered_mean_interval, length_controlled_win_rate, outcomes
from async_rlhf.commands.generate import run_generate
from async_rlhf.commands.stage import json_lines
from async_rlhf.config import ConfigError, EvaluateConfig, GenerateConfig, JudgeConfig, VLLMConfig
from async_rlhf.data.tokenizer import train_tokenizer
from async_rlhf.generation import vllm_engine
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.models.forward import score_rows
from async_rlhf.models.loading import load_policy, load_reward_model
from async_rlhf.models.saving import write_model
from async_rlhf.system.files import whole_lines

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
    _, found = read_generations(tmp_path / "generations")
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
    assert [line.completion for line in read_generations(tmp_path / "generations")[1]["copy"][1]] == texts["final"]


def interrupt(config: GenerateConfig, monkeypatch) -> None:
    """Ctrl-C in the third chunk."""
    real, calls = TransformersEngine.generate, []

    def interrupted(self, prompts, progress=None):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, prompts, progress)

    with monkeypatch.context() as patched:
        patched.setattr(TransformersEngine, "generate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_generate(config)


@pytest.mark.parametrize("cut", [0, 25])
def test_interrupted_it_goes_on_where_it_stopped(config, tmp_path, sampled, monkeypatch, cut):
    config = replace(config, checkpoints=["final"])
    whole = run_generate(replace(config, output_dir=str(tmp_path / "whole")))
    expected = (tmp_path / "whole" / "final.jsonl").read_text()
    interrupt(config, monkeypatch)
    part = tmp_path / "generations" / ".final.jsonl.part"
    assert not (tmp_path / "generations" / "final.jsonl").exists()
    if cut:  # the last line is not whole: the machine lost its power
        part.write_text(part.read_text()[:-cut])
    sampled.clear()
    assert run_generate(config) == whole
    assert (tmp_path / "generations" / "final.jsonl").read_text() == expected
    assert sampled == ([6] if not cut else [8, 6])  # of a chunk that is not whole, all: its batches are those of before
    assert not part.exists()


def test_whole_lines(tmp_path):
    """Ends of lines are those of the file, and a tail that is cut within a character goes."""
    file = tmp_path / "lines"
    assert whole_lines(file) == []
    file.write_bytes("a\u2028b\u0085\nc\né".encode()[:-1])
    assert whole_lines(file) == ["a\u2028b\u0085", "c"]
    assert file.read_bytes() == "a\u2028b\u0085\nc\n".encode()
    assert whole_lines(file) == ["a\u2028b\u0085", "c"]
    file.write_bytes(b"cut")
    assert (whole_lines(file), file.read_bytes()) == ([], b"")


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
    for name, message in (
        ("final", "which is the name of one in run"),
        ("reference_response", "of the human responses"),
    ):
        with pytest.raises(ConfigError, match=message):
            run_generate(replace(config, models={name: str(tmp_path / "run" / "final")}))
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
    for name, (_, lines) in read_generations(tmp_path / "generations")[1].items():
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


def test_generations_of_different_kinds_are_not_compared(config, evaluation, tmp_path):
    run_generate(replace(config, checkpoints=["checkpoint-2"], temperature=1.5))
    found = run_evaluate(evaluation)["models"]["checkpoint-2"]
    assert found["kl_to_reference"]["estimate"] == pytest.approx(0.0, abs=1e-4)  # to itself, at its temperature
    run_generate(replace(config, checkpoints=["final"]))
    with pytest.raises(ConfigError, match=r"final and checkpoint-2 in .* have temperature 0.7 and 1.5"):
        run_evaluate(replace(evaluation, overwrite=True))
    rows = json_lines([{"query": f"other {i}"} for i in range(22)])
    (tmp_path / "other.jsonl").write_text(rows)
    other = replace(config, data=str(tmp_path / "other.jsonl"), checkpoints=["final"], output_dir=str(tmp_path / "o"))
    run_generate(other)
    for suffix in (".jsonl", ".json"):
        (tmp_path / "o" / f"final{suffix}").rename(tmp_path / "generations" / f"final{suffix}")
    with pytest.raises(ConfigError, match=r"final and checkpoint-2 in .* do not answer the same prompts"):
        run_evaluate(replace(evaluation, overwrite=True))


def test_a_reference_with_another_tokenizer_is_refused(config, evaluation, tmp_path, make_policy):
    run_generate(config)
    other = train_tokenizer((f"p{i} zz" for i in range(50)), 300, 96)
    write_model(make_policy(), other, tmp_path / "other")
    with pytest.raises(ConfigError, match=r"ref_model: got .*; must be a model with the tokenizer of"):
        run_evaluate(replace(evaluation, ref_model=str(tmp_path / "other")))


def test_judging_anew_does_not_sample_anew(config, evaluation, tmp_path, sampled):
    own = {key: getattr(config, key) for key in ("run", "data", "response_length", "max_prompt_length")}
    models = replace(evaluation, generations=None, **own)
    run_evaluate(models)
    sampled.clear()
    (tmp_path / "judge.py").write_text(REWARD.replace("float(sum", "-float(sum"))
    with pytest.raises(ConfigError, match="reward_funcs"):
        run_evaluate(models)
    run_evaluate(replace(models, overwrite=True))
    assert sampled == []
    run_evaluate(replace(models, overwrite=True, seed=1))
    assert sampled == [22] * 3
    # Its own files beside those of generate change nothing.
    run_generate(config)
    beside = replace(evaluation, output_dir=config.output_dir)
    assert run_evaluate(beside) == run_evaluate(beside)


def test_the_longer_answer_loses_by_length_control(config, evaluation, tmp_path):
    """The human answers are the shorter ones, and the judge counts letters. (Which of two is the longer one makes no
    difference to where the regression is at equal length.)
    """
    rows = [{"query": f"p{i}", "reference_response": "ab" * (i % 4)} for i in range(20)]
    (tmp_path / "held.jsonl").write_text(json_lines(rows))
    run_generate(config)
    found = run_evaluate(evaluation)["models"]["final"]
    _, lines = read_generations(tmp_path / "generations")[1]["final"]
    human = [[*line.columns["reference_response"], "<eos>"] for line in lines]
    longer = [len(line.tokens) - len(tokens) for line, tokens in zip(lines, human, strict=True)]
    scores = [sum(c.isascii() and c.isalpha() for c in line.completion) for line in lines]
    won = outcomes(scores, [len(tokens) - 1 for tokens in human])
    expected = length_controlled_win_rate(won, longer)._asdict()
    assert found["length_controlled_win_rate_vs_reference_response"] == pytest.approx(expected)
    assert expected["estimate"] < found["win_rate_vs_reference_response"]["estimate"]


def test_the_gold_model_sees_who_ended(config, evaluation, tmp_path, make_reward_model, tokenizer):
    write_model(make_reward_model(), tokenizer, tmp_path / "gold")
    run_generate(config)
    run_evaluate(replace(evaluation, reward_funcs=[], reward_model=str(tmp_path / "gold")))
    rows = json_rows(tmp_path / "evaluation" / "samples.jsonl")
    model = load_reward_model(str(tmp_path / "gold"))
    answers = [
        (row["query"], one["completion"], one["ended"], one["score"], name)
        for row in rows
        for name, one in row["models"].items()
    ]
    answers += [(row["query"], row["reference_response"], True, row["reference_score"], "human") for row in rows]
    assert {ended for _, _, ended, *_ in answers} == {True, False}
    found = read_generations(tmp_path / "generations")[1].items()
    sampled = {(line.query, name): line.tokens for name, (_, lines) in found for line in lines}
    for query, text, ended, score, name in answers:
        read = [*tokenizer.encode(text), *([256] if ended else [])]
        tokens = (*tokenizer.encode(query), *sampled.get((query, name), read))
        assert score == pytest.approx(score_rows(model, [tokens], 1).item(), abs=1e-4)


def test_a_judge_that_compares_needs_two(config, evaluation, tmp_path):
    (tmp_path / "held.jsonl").write_text(json_lines([{"query": f"p{i}"} for i in range(4)]))
    run_generate(replace(config, checkpoints=["final"]))
    with pytest.raises(ConfigError, match=r"judge.url: there is one model and no human response"):
        run_evaluate(replace(evaluation, reward_funcs=[], judge=JudgeConfig(url="http://localhost:1/v1", model="m")))


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
    assert run_evaluate(evaluation)["reference_response"]["reward_mean"]["estimate"] == 3.0


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
    _, lines = read_generations(tmp_path / "generations")[1]["final"]
    longer = [len(line.completion) - len(line.columns["reference_response"]) for line in lines]
    by_hand = sum((d > 0) + (d == 0) / 2 for d in longer) / len(longer)
    assert found["models"]["final"]["win_rate_vs_reference_response"]["estimate"] == pytest.approx(by_hand)
    assert "reward_mean" not in found["models"]["final"]
    assert found["reference_response"] == {}
    assert (tmp_path / "evaluation" / "evaluation.png").is_file()
    rows = json_rows(tmp_path / "evaluation" / "samples.jsonl")
    assert rows[0]["models"]["final"]["score"] is None


def test_generations_and_models_do_not_go_together(evaluation):
    for change in ({"run": "x"}, {"models": {"a": "b"}}, {"data": "x"}, {"temperature": 1.0}, {"seed": 3}):
        with pytest.raises(ConfigError, match="must be left out with generations"):
            replace(evaluation, **change)
    with pytest.raises(ConfigError, match=r"reward_funcs: got .*; must be left out with judge.url"):
        replace(evaluation, judge=JudgeConfig(url="http://localhost:1", model="m"))
    replace(evaluation, judge=JudgeConfig(url="http://localhost:1", model="m"), reward_funcs=())  # as [] is
    with pytest.raises(ConfigError, match="reward_tokenizer: got 'x'; must be null without reward_model"):
        replace(evaluation, reward_tokenizer="x")


@pytest.mark.parametrize(
    ("device", "visible", "together", "seen"),
    [("cuda:1", "", 1, "1"), ("cuda:1", "4,6,7", 1, "6"), ("cuda:1", "4,6,7", 2, "6,7"), ("cuda:0", "4,6", 1, "4,6")],
)
@pytest.mark.parametrize("command", ["generate", "evaluate"])
def test_vllm_sees_the_gpu_that_is_asked_for_first(
    config, evaluation, monkeypatch, command, device, visible, together, seen
):
    """It takes the first that it sees."""
    handed_on = []

    def start(spec, params):
        handed_on.append((spec.device, os.environ["CUDA_VISIBLE_DEVICES"]))
        raise ConfigError("started")

    monkeypatch.setattr(vllm_engine, "VLLMEngine", start)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    changes = {"engine": "vllm", "device": device, "vllm": VLLMConfig(tensor_parallel_size=together)}
    judged = replace(evaluation, generations=None, run=config.run, data=config.data, **changes)
    with pytest.raises(ConfigError, match="started"):
        run_generate(replace(config, **changes)) if command == "generate" else run_evaluate(judged)
    assert handed_on == [("cuda", seen)]


def test_a_gpu_that_vllm_cannot_get_is_named(config, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    asked = replace(config, engine="vllm", device="cuda:2")
    with pytest.raises(ConfigError, match="device: got 'cuda:2'; must be one of the GPUs in CUDA_VISIBLE_DEVICES=4,6"):
        run_generate(asked)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(
        ConfigError, match="device: got 'cuda:2'; must be the first GPU with vLLM: this process has used"
    ):
        run_generate(asked)


WORLDS = """
from async_rlhf import Observation

class Twice:
    def reset(self, row, seed):
        self.row, self.left = row, 2
        return [{"role": "user", "content": f"row {row['n']}: "}]
    def step(self, message):
        self.left -= 1
        more = {"role": "user", "content": "again "}
        return Observation([more], reward=float(len(message["content"])), done=not self.left)
    def close(self):
        pass

async def agent(client, row):
    chat = [{"role": "user", "content": row["query"]}]
    chat.append(await client.chat(chat))
    return float(row["n"])

def shout(text: str) -> str:
    \"\"\"
    Shout.

    Args:
        text: What.
    \"\"\"
    return text.upper()

def count(completions, messages, metrics, n, **columns):
    return [len(chat) + each["turns"] + 100.0 * number for chat, each, number in zip(messages, metrics, n, strict=True)]
"""


@pytest.fixture
def playing(config, tmp_path):
    """The same with episodes; the policy ends most answers early."""
    (tmp_path / "worlds.py").write_text(WORLDS)
    for path in (tmp_path / "run").iterdir():
        generation = json.loads((path / "generation_config.json").read_text())
        (path / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": [256, *range(30)]}))
    return replace(config, environment=f"{tmp_path / 'worlds.py'}:Twice", max_turns=3, batch_size=4)


def test_models_play_an_environment(playing, tmp_path):
    """Its rewards, turns and conversations are in the files; sampled again they are the same."""
    found = run_generate(playing)["models"]
    rows = json_rows(tmp_path / "generations" / "final.jsonl")
    assert len(rows) == 22
    turns = [row["episode"]["metrics"]["turns"] for row in rows]
    assert set(turns) == {1, 2}
    assert found["final"]["mean_turns"] == pytest.approx(sum(turns) / 22)
    rewards = [sum(row["episode"]["rewards"]) for row in rows]
    assert found["final"]["mean_reward"] == pytest.approx(sum(rewards) / 22)
    for row in rows:
        first, *rest = row["episode"]["messages"]
        assert first["content"] == f"row {row['columns']['n']}: "
        said = [message["content"] for message in rest if message["role"] == "assistant"]
        assert len(said) == row["episode"]["metrics"]["turns"]
        assert len(row["tokens"]) == len(row["logprobs"])
        if row["finish_reason"] == "stop":
            assert row["episode"]["rewards"] == [float(len(text)) for text in said]
    again = replace(playing, output_dir=str(tmp_path / "again"))
    run_generate(again)
    assert json_rows(tmp_path / "again" / "final.jsonl") == rows


@pytest.mark.parametrize("given", [False, True], ids=["sampled", "from generations"])
def test_evaluation_judges_episodes_by_their_own_rewards_and_functions(playing, tmp_path, given):
    options = {item.name: getattr(playing, item.name) for item in fields(playing)}
    options |= {"output_dir": str(tmp_path / "evaluation"), "reward_funcs": [f"{tmp_path / 'worlds.py'}:count"]}
    if given:
        run_generate(playing)
        options = {key: options[key] for key in ("output_dir", "reward_funcs", "device")}
        options["generations"] = playing.output_dir
    found = run_evaluate(EvaluateConfig(**options))
    rows = json_rows(tmp_path / "evaluation" / "samples.jsonl")
    scores = []
    for number, row in enumerate(rows):
        one = row["models"]["final"]
        by_function = len(one["messages"]) + one["metrics"]["turns"] + 100.0 * number
        assert one["score"] == pytest.approx(sum(one["rewards"]) + by_function)
        assert one["completion"].startswith(f"user: row {number}: ")
        scores.append(one["score"])
    final = found["models"]["final"]
    assert final["reward_mean"]["estimate"] == pytest.approx(sum(scores) / len(scores))
    assert final["mean_turns"] > 1
    assert "kl_to_reference" not in final
    text = (tmp_path / "evaluation" / "evaluation.txt").read_text()
    assert "turns" in text
    assert "KL and perplexities are of single answers" in text


def test_games_that_begin_alike_are_told_apart_by_their_rows(playing, tmp_path):
    """The interval is over games: of four rows, three times each, it is over four."""
    (tmp_path / "held.jsonl").write_text(json_lines({"query": "p", "n": i % 4} for i in range(12)))
    options = {item.name: getattr(playing, item.name) for item in fields(playing)}
    found = run_evaluate(EvaluateConfig(**options | {"output_dir": str(tmp_path / "evaluation")}))
    rows = [row["models"]["final"] for row in json_rows(tmp_path / "evaluation" / "samples.jsonl")]
    expected = clustered_mean_interval([row["score"] for row in rows], [i % 4 for i in range(12)])
    assert found["models"]["final"]["reward_mean"] == pytest.approx(expected._asdict())


def test_an_agent_alone_gives_the_scores_and_tools_need_a_judge(playing, tmp_path):
    options = {item.name: getattr(playing, item.name) for item in fields(playing)}
    options |= {"output_dir": str(tmp_path / "evaluation"), "environment": None}
    found = run_evaluate(EvaluateConfig(**{**options, "agent": f"{tmp_path / 'worlds.py'}:agent"}))
    assert found["models"]["final"]["reward_mean"]["estimate"] == pytest.approx(sum(range(22)) / 22)
    tools = {"tools": [f"{tmp_path / 'worlds.py'}:shout"], "output_dir": str(tmp_path / "tools")}
    for changes, message in {
        (("tools", 1),): "give either a reward_model or reward_funcs",
        (("tools", 1), ("reward_model", "m")): "reward_model: got 'm'; must be null with an environment, tools",
        (("tools", 1), ("agent", "a:b")): "agent: got 'something'; must be left out with tools",
        (("max_turns", 2),): "max_turns: got 2; must be given with an environment, tools or an agent, and null without",
    }.items():
        more = {**options, **dict(changes)}
        more |= tools if "tools" in more and more["tools"] == 1 else {}
        with pytest.raises(ConfigError, match=re.escape(message)):
            EvaluateConfig(**more)
    run_generate(replace(playing, environment=None, **tools))
    assert {row["episode"]["metrics"]["turns"] for row in json_rows(tmp_path / "tools" / "final.jsonl")} == {1}


def test_models_that_answer_later_read_the_time_of_the_first(config, tmp_path, make_policy):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    write_model(make_policy(), tokenizer, tmp_path / "dated")
    (tmp_path / "held.jsonl").write_text(
        json_lines([{"query": [{"role": "user", "content": f"p{i}"}]} for i in range(3)])
    )
    config = replace(config, run=None, models={"a": str(tmp_path / "dated")})
    run_generate(config)
    (tmp_path / "generations" / ".started").write_text("1999-12-31T23:59:59")
    run_generate(replace(config, models={"b": str(tmp_path / "dated")}))
    years = [json_rows(tmp_path / "generations" / f"{name}.jsonl")[0]["query"][:4] for name in "ab"]
    assert years == [datetime.now().strftime("%Y"), "1999"]
