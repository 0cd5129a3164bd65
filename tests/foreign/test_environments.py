"""Environments and tools of other libraries, really played: what they say and their rewards arrive as they are."""

from __future__ import annotations

import asyncio
import copy
import json
import socket
import subprocess
import time
from pathlib import Path

import pytest
from checked_episodes import answers_of, check_episode, models_of, watch
from conftest import LINES, apart, beside, examples, taught
from tiny import count_letters, new_args

from async_rlhf import GRPOTrainer
from async_rlhf.config.import_by_name import load_attribute
from async_rlhf.generation.episodes.sampler import EpisodeSampler
from async_rlhf.rewards.reasoning_gym import make_rows, score

pytestmark = pytest.mark.foreign

SAMPLES = 4
LIMITS = {"response_length": 90, "max_turns": 3}


def test_the_examples_are_short():
    for name, text in examples().items():
        code = [line for line in text.splitlines()[1:] if line.strip()]
        assert len(code) <= LINES, (name, len(code))


def trainer_of(folder, tokenizer, policy, rows, samples=SAMPLES, room=380, sizes=None, **world):
    sizes = {"completions_per_batch": 8 * samples, "total_episodes": 16, **(sizes or {})}
    generation = {**LIMITS, "episode_length": room, "mismatch_steps": 1, "step_timeout": 120.0}
    args = new_args(folder, "run", generation, "grpo", max_prompt_length=120, samples_per_prompt=samples, **sizes)
    return GRPOTrainer(policy, args, rows, processing_class=tokenizer, **world)


def metrics_of(trainer):
    """Of each batch."""
    return [json.loads(line) for line in (Path(trainer.args.output_dir) / "metrics.jsonl").read_text().splitlines()]


def play(folder, tokenizer, policy, rows, prompts=8, **more):
    """Episodes of a policy, and then two batches of training on more: the samples, and the metrics of each batch."""
    trainer = trainer_of(folder, tokenizer, policy, rows, **more)
    stream = trainer.run.prompts.stream
    found = EpisodeSampler(trainer.run.engine).generate([stream.prompt(n) for n in range(prompts)])
    again = EpisodeSampler(trainer.run.engine).generate([stream.prompt(n) for n in range(prompts)])
    assert found == again
    trainer.train()
    metrics = metrics_of(trainer)
    assert [row["batch"] for row in metrics] == [1, 2]
    assert max(row["engine/logprob_difference"] for row in metrics) < 1e-4
    assert max(row["episode/turns"] for row in metrics) > 1
    return [sample for samples in found for sample in samples], metrics


def turns_of(tokenizer, sample) -> list[tuple[str, str, float]]:
    """Of each answer: what was read before it, what was written, and the reward."""
    found, place = [], 0
    for answer in answers_of(sample):
        before, own = sample.tokens[place : answer.start], sample.tokens[answer]
        found.append((tokenizer.decode(before), tokenizer.decode(own), float(sample.rewards[answer.stop - 1])))
        place = answer.stop
    return found


def test_reasoning_gym_gives_a_second_try(tmp_path, tokenizer, example):
    pytest.importorskip("reasoning_gym", reason="pip install async-rlhf[reasoning-gym]")
    rows = list(make_rows("chain_sum", 4, 1, {"max_terms": 2, "max_digits": 1}, instruction=""))
    rows = [{**row, "query": row["query"].rpartition(":")[2]} for row in rows]
    again, wrong = "That is wrong. Try again.\n", "<answer>99</answer><eos>"
    right = [f"<answer>{row['answer']}</answer><eos>" for row in rows]
    asked = [row["query"] for row in rows]
    texts = [q + said for q, yes in zip(asked, right, strict=True) for said in (yes, wrong + again + yes)]
    policy = taught(tokenizer, texts)
    environment = load_attribute(example("second_try.py"), "SecondTry", "environment", "class")
    samples, metrics = play(tmp_path, tokenizer, policy, rows, environment=environment)
    seen = set()
    for sample in samples:
        turns = turns_of(tokenizer, sample)
        rewards = [reward for *_, reward in turns]
        assert all(read == again for read, *_ in turns[1:])
        assert len(turns) == (1 if rewards[0] == 1 else 2) or sample.finish_reason == "length"
        for number, (_, wrote, reward) in enumerate(turns):
            row = rows[asked.index(turns[0][0])]
            known = {name: [row[name]] for name in ("task", "answer", "metadata")}
            (own,) = score([row["query"]], [wrote.removesuffix("<eos>")], **known)
            assert reward == pytest.approx(own / (number + 1) if wrote.endswith("<eos>") else 0)
        seen.add(tuple(rewards))
    assert {(1.0,), (0.0, 0.5)} <= seen
    assert 0 < metrics[0]["episode/right"] <= 1


def test_gymnasium_plays_blackjack(tmp_path, tokenizer, example):
    beside("gymnasium", "gymnasium==1.4.0", "farama-notifications==0.0.6")
    texts = [
        f"Play.You have {mine}, the dealer {theirs}. hit or stick?\n{said}<eos>"
        for mine in range(5, 22, 4)
        for theirs in range(1, 11, 3)
        for said in ("hit", "stick")
    ]
    policy = taught(tokenizer, texts)
    environment = load_attribute(example("blackjack.py"), "Blackjack", "environment", "class")
    rows = [{"query": "Play.", "number": number} for number in range(8)]
    samples, _ = play(tmp_path, tokenizer, policy, rows, environment=environment, prompts=24)
    rewards, starts = [], []
    for number, sample in enumerate(samples):
        turns = turns_of(tokenizer, sample)
        starts.append(turns[0][0])
        assert starts[-1] == starts[number // SAMPLES * SAMPLES]  # a prompt's episodes have one seed
        for one, (read, wrote, reward) in enumerate(turns):
            assert read.endswith("hit or stick?\n")
            last = one == len(turns) - 1
            assert reward in ((-1, 0, 1) if last else (0,))
            assert last or "hit" in wrote
        rewards.append(turns[-1][2])
    assert {-1.0, 1.0} <= set(rewards)
    assert max(sample.metrics["turns"] for sample in samples) > 1
    assert len(set(starts)) > 4


def test_textarena_says_what_is_new(tmp_path, tokenizer, example):
    needs = ["textarena==0.7.4", "nltk==3.10.4", "chess==1.11.2", "python-dotenv==1.2.4"]
    pytest.importorskip("openai", reason="TextArena imports it; vLLM brings it")
    beside("textarena", *needs)
    policy = taught(tokenizer, [f"Guess.[{number}]<eos>" for number in range(1, 21)], steps=100, positions=1400)
    environment = load_attribute(example("guess.py"), "Guess", "environment", "class")
    samples, _ = play(tmp_path, tokenizer, policy, [{"query": "Guess."}], environment=environment, prompts=4, room=1200)
    told, rewards = [], []
    for sample in samples:
        (opening, *_), *later = turns_of(tokenizer, sample)
        assert opening.startswith("Guess.You are Player 0. You are playing Guess The Number.")
        told += [read for read, *_ in later]
        rewards.append(float(sample.rewards.sum()))
    assert any("The target number is higher." in text for text in told)
    assert any("The target number is lower." in text for text in told)
    assert not any("You are Player 0" in text for text in told)
    assert len(told) > 8


SERVER = """
from mcp.server import MCPServer

server = MCPServer("calculator")


@server.tool(description="Add two numbers.")
def add(a: int, b: int) -> str:
    return f"the sum is {a + b}"


@server.tool(description="Fail.")
def fail(why: str) -> str:
    raise ValueError(why)


server.run()
"""


def test_the_tools_of_an_mcp_server(tmp_path, tokenizer, example):
    """Its program is started by its client, over stdio, as often as the policy calls."""
    pytest.importorskip("mcp", reason="vLLM brings it")
    (tmp_path / "server.py").write_text(SERVER)
    tools = asyncio.run(load_attribute(example("mcp_tools.py"), "tools", "tools", "function")())
    assert [tool.__name__ for tool in tools] == ["add", "fail"]
    call = '<tool_call>{"name": "add", "arguments": {"a": 20, "b": 3}}</tool_call>'
    policy = taught(tokenizer, [f"20+3={call}<eos>the sum is 23It is 23<eos>"], steps=150)
    rows = [{"query": "20+3="}]
    samples, metrics = play(tmp_path, tokenizer, policy, rows, prompts=1, tools=tools, reward_funcs=count_letters)
    right = 0
    for sample in samples:
        turns = turns_of(tokenizer, sample)
        if turns[0][1] == f"{call}<eos>":
            assert turns[1][0] == "the sum is 23"
            assert sample.metrics["tool_calls"] >= 1
            right += 1
    assert right > 0
    assert metrics[0]["episode/tool_calls"] > 0


def test_verifiers_asks_by_the_endpoint(tmp_path, tokenizer, example, monkeypatch):
    """Its task, harness and reward run in a Python of their own; a run trains on the very tokens that the policy wrote,
    with the version that is in the endpoint's generator at the time. Batch 3 is sampled by weights that have moved.
    """
    python = Path(apart("verifiers", "verifiers==0.4.0", "uv"))
    example("one_task.py")
    (tmp_path / "verifiers").symlink_to(python.parents[1])
    monkeypatch.syspath_prepend(tmp_path)  # the generator's process imports it, too
    agent = load_attribute(example("by_verifiers.py"), "agent", "agent", "function")
    texts = ["20+3=It is 23<eos>", "20+3=Dunno<eos>Try again.It is 23<eos>", "20+3=Dunno<eos>Try again.No<eos>"]
    policy = taught(tokenizer, texts, steps=150)
    first, (batches, weights) = copy.deepcopy(policy), watch(monkeypatch)
    sizes = {"staleness": 1, "completions_per_batch": 6, "total_episodes": 6}
    limits = {**LIMITS, "episode_length": 380, "stop_token_ids": []}
    rows = [{"query": "20+3=", "answer": "23"}]
    trainer = trainer_of(tmp_path, tokenizer, policy, rows, samples=3, sizes=sizes, agent=agent)
    trainer.train()
    seen, models = set(), models_of(weights, lambda: copy.deepcopy(first))
    for batch, logged in zip(batches, metrics_of(trainer), strict=True):
        assert batch.version == logged["schedule/version"] == max(0, batch.index - 2)
        assert logged["engine/logprob_difference"] < 1e-4
        totals = [float(sample.rewards.sum()) for sample in batch.samples]
        assert logged["objective/scores"] == pytest.approx(sum(totals) / 6)
        for group in batch.groups:
            for sample in group.samples:
                check_episode(group.prompt, sample, tokenizer, models, limits)
                assert set(sample.versions[sample.sampled].tolist()) == {batch.version}
                turns = turns_of(tokenizer, sample)
                assert [read for read, *_ in turns] == ["20+3="] + ["Try again."] * ("23" not in turns[0][1])
                assert [reward for *_, reward in turns] == [0.0] * (len(turns) - 1) + [float("23" in turns[-1][1])]
                assert (sample.metrics["conversations"], sample.metrics["turns"]) == (1, len(turns))
                seen.add((len(turns), turns[-1][2]))
    assert [batch.index for batch in batches] == [1, 2, 3]
    assert len(seen) > 1
    assert max((weights[1][name] - tensor).abs().max() for name, tensor in weights[0].items()) > 1e-4


GUESSING = """
import random, sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    text: str


class Told(Observation):
    text: str


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    number, tries = 0, 0

    def reset(self, seed=None, episode_id=None, **more):
        self.number, self.tries = random.Random(seed).randint(1, 3), 0
        return Told(text="Guess.")

    def step(self, action, timeout_s=None, **more):
        self.tries += 1
        right = action.text.strip() == str(self.number)
        text = "Right." if right else f"{action.text} is wrong."
        return Told(text=text, reward=1.0 if right else -0.25, done=right or self.tries == 3)

    @property
    def state(self):
        return State(step_count=self.tries)


app = create_fastapi_app(Guessing, Guess, Told, max_concurrent_envs=100)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""


def answers(port: int) -> bool:
    with socket.socket() as asked:
        return asked.connect_ex(("127.0.0.1", port)) == 0


def test_a_server_of_openenv(tmp_path, tokenizer, example):
    """A session for each episode, all at the same time; its seed, its words and its rewards arrive."""
    python = apart("openenv", "openenv==0.10.0")
    (tmp_path / "guessing.py").write_text(GUESSING)
    environment = load_attribute(example("by_openenv.py"), "ByOpenEnv", "environment", "class")
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    environment.url = f"http://127.0.0.1:{port}/ws"
    policy = taught(tokenizer, [f"Play:Guess.{a}<eos>{a} is wrong.{b}<eos>" for a in "123" for b in "123"])
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen([python, "guessing.py", str(port)], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 90
        while not answers(port):
            assert server.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        samples, _ = play(tmp_path, tokenizer, policy, [{"query": "Play:"}], environment=environment)
    finally:
        server.kill()
        server.wait()
    lengths = []
    for number, sample in enumerate(samples):
        turns = turns_of(tokenizer, sample)
        assert turns[0][0] == "Play:Guess."
        wrote = [text.removesuffix("<eos>") for _, text, _ in turns]
        assert [read for read, *_ in turns[1:]] == [f"{text} is wrong." for text in wrote[:-1]]
        assert [reward for *_, reward in turns[:-1]] == [-0.25] * (len(turns) - 1)
        assert turns[-1][2] in (1.0, -0.25) or sample.finish_reason == "length"
        if turns[-1][2] == 1.0:  # the others of its prompt have the same number to guess
            others = samples[number // SAMPLES * SAMPLES :][:SAMPLES]
            known = {turns_of(tokenizer, each)[-1][1] for each in others if each.rewards[-1] == 1.0}
            assert known == {turns[-1][1]}
        lengths.append(len(turns))
    assert {1, 2} <= set(lengths)
    assert any(sample.rewards[-1] == 1.0 for sample in samples)
