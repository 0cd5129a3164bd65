"""The laws of episodes: what is trained on was sampled, and a run with environments is as exact as any other."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import product
from pathlib import Path

import environments
import numpy as np
import pytest
import torch
from checked_episodes import check_episode, models_of, watch
from environments import Echo, Greeting, Sleepy, forget
from faulty_worker import run_slow_worker
from test_laws import SAMPLES, assert_same_run, metrics_of, sequential_oracle
from tiny import PROMPTS, StopAfter, byte_tokenizer, count_letters, json_rows, new_args, new_policy, rare, rare_unless

from async_rlhf.commands.train import run_train
from async_rlhf.config import ConfigError
from async_rlhf.config.episodes import World
from async_rlhf.config.parsing import parse
from async_rlhf.data.rendering import Renderer
from async_rlhf.generation import process
from async_rlhf.generation.episodes.endpoint import RefusedError
from async_rlhf.generation.episodes.environment import Observation
from async_rlhf.generation.episodes.playing import EpisodeError
from async_rlhf.generation.episodes.sampler import EpisodeSampler
from async_rlhf.generation.episodes.spec import episodes_of
from async_rlhf.generation.protocol import GeneratorError
from async_rlhf.generation.sampling import request_seeds, sample_uniforms
from async_rlhf.models.chats import ChatTemplate
from async_rlhf.models.context_length import with_prompt_cap
from async_rlhf.run.config import DataConfig, RunConfig
from async_rlhf.run.trainer import OnlineTrainer
from async_rlhf.studies.explain.command import run_explain
from async_rlhf.studies.explain.config import ExplainConfig
from async_rlhf.studies.explain.repetition import RepetitionDiffersError

STOPS = list(range(60))
"""So many stop tokens that a tiny model ends most answers by itself."""


def policy_of(seed: int = 0):
    return new_policy(seed, max_position_embeddings=160)


def episode_args(folder, name="run", generation=None, **changes):
    generation = {
        "response_length": 8,
        "max_turns": 3,
        "episode_length": 40,
        "stop_token_ids": STOPS,
        **(generation or {}),
    }
    return new_args(folder, name, generation, **changes)


def run_trainer(tokenizer, prompts, args, environment=Echo, stop_after=None, **more):
    policy = policy_of()
    callbacks = [] if stop_after is None else [StopAfter(stop_after)]
    trainer = OnlineTrainer(
        policy, args, prompts, environment=environment, processing_class=tokenizer, callbacks=callbacks, **more
    )
    with nullcontext() if stop_after is None else pytest.raises(SystemExit, match=r"^0$"):
        trainer.train()
    return policy.state_dict(), metrics_of(args)


def oracle(tokenizer, prompts, args, algorithm, environment=Echo):
    episodes = episodes_of(args, World(environment), ChatTemplate(tokenizer))
    more = {"stop_token_ids": (256, *STOPS), "episodes": episodes}
    return sequential_oracle(policy_of, tokenizer, prompts, args, algorithm, rewards=(), **more)


def draw(policy, contexts, positions, limits, params, prompts):
    """Answers by the definition: all rows together, each token by inverting the cumulative distribution."""
    rows = [list(context) for context in contexts]
    out = [[] for _ in rows]
    alive = list(range(len(rows)))
    while alive:
        with torch.no_grad():
            for row in alive:
                logits = policy(torch.tensor([rows[row]])).logits[0, -1].double() / params.temperature
                probabilities = torch.softmax(logits, -1).cumsum(-1)
                prompt, number = prompts[row]
                place = positions[row] + len(out[row])
                uniform = sample_uniforms(params.seed, prompt.draw, number, np.array([place]))[0]
                token = int(torch.searchsorted(probabilities, uniform * probabilities[-1], right=True))
                rows[row].append(token)
                out[row].append(token)
        alive = [r for r in alive if out[r][-1] not in params.stop_token_ids and len(out[r]) < limits[r]]
    return out


def play_slowly(policy, tokenizer, params, prompts, args, environment):
    """Every episode by itself, token by token, without the engine, the player or the sampler."""
    found = []
    for prompt in prompts:
        samples = []
        for number in range(params.samples_per_prompt):
            world = environment()
            opened = world.reset(prompt.columns, request_seeds(params.seed, [prompt])[0])
            tokens = list(prompt.tokens) + tokenizer("".join(m["content"] for m in opened))["input_ids"]
            start, sampled, rewards, finish = len(tokens), [False] * len(tokens), [0.0] * len(tokens), "length"
            length = args.generation.longest_episode - (start - len(prompt.tokens))
            for turn in range(1, args.generation.max_turns + 1):
                limit = min(params.response_length, length - (len(tokens) - start))
                (answer,) = draw(policy, [tokens], [len(tokens) - start], [limit], params, [(prompt, number)])
                tokens, sampled = tokens + answer, sampled + [True] * len(answer)
                rewards += [0.0] * len(answer)
                if answer[-1] not in params.stop_token_ids:
                    break
                text = tokenizer.decode(answer[:-1])
                observed = asyncio.run(world.step({"role": "assistant", "content": text}))
                rewards[-1] = observed.reward
                if observed.done or turn == args.generation.max_turns:
                    finish = "stop" if observed.done else "length"
                    break
                more = tokenizer("".join(m["content"] for m in observed.messages))["input_ids"]
                if len(tokens) + len(more) - start >= length:
                    break
                tokens, sampled, rewards = tokens + more, sampled + [False] * len(more), rewards + [0.0] * len(more)
            samples.append((tokens, sampled, rewards, finish))
        found.append(samples)
    return found


@pytest.mark.quick
@pytest.mark.parametrize("environment", [Echo, Greeting])
def test_episodes_are_what_playing_them_slowly_gives(tmp_path, tokenizer, prompts, environment):
    args = episode_args(tmp_path, samples_per_prompt=3)
    trainer = OnlineTrainer(policy_of(), args, prompts, environment=environment, processing_class=tokenizer)
    engine = trainer.run.engine
    stream = trainer.run.prompts.stream
    drawn = [stream.prompt(n) for n in range(12)]
    ours = EpisodeSampler(engine).generate(drawn)
    slow = play_slowly(engine.model, tokenizer, engine.params, drawn, args, environment)
    turns = [int(sample.metrics["turns"]) for samples in ours for sample in samples]
    assert len(set(turns)) > 1, turns
    answers = [sample.drawn.tolist() for samples in ours for sample in samples]
    again = [tokenizer(tokenizer.decode(answer), add_special_tokens=False)["input_ids"] for answer in answers]
    assert (
        sum(one != other for one, other in zip(answers, again, strict=True)) > len(answers) / 2
    )  # not its own inverse
    for samples, expected in zip(ours, slow, strict=True):
        for sample, (tokens, sampled, rewards, finish) in zip(samples, expected, strict=True):
            assert sample.tokens.tolist() == tokens
            assert sample.sampled.tolist() == sampled
            assert sample.rewards.tolist() == pytest.approx(rewards)
            assert sample.finish_reason == finish


@pytest.mark.parametrize(
    ("algorithm", "staleness"), rare_unless(lambda i: i % 3 == i // 3 % 3, product(SAMPLES, [0, 1, 2]))
)
def test_a_run_with_an_environment_is_its_sequential_oracle(tmp_path, tokenizer, prompts, algorithm, staleness):
    """Inline and in processes; also when it is stopped after batch 2 and resumed."""
    samples = SAMPLES[algorithm]
    args = episode_args(
        tmp_path,
        algorithm=algorithm,
        staleness=staleness,
        samples_per_prompt=samples,
        completions_per_batch=8 * samples,
        total_episodes=32,
    )
    run_trainer(tokenizer, prompts, args, stop_after=2)
    ours = run_trainer(tokenizer, prompts, replace(args, resume=True))
    assert len(ours[1]) == 4
    assert_same_run(ours, oracle(tokenizer, prompts, args, algorithm))
    assert ours[1][-1]["grad_norm"] > 0
    assert ours[1][-1]["episode/turns"] > 1


def as_command(folder, environment, name="run", **changes) -> RunConfig:
    """A run of files, as the command has it."""
    policy_of().save_pretrained(folder / "policy")
    byte_tokenizer().save_pretrained(folder / "policy")
    for name_of_file in ("prompts.jsonl", "held_out.jsonl"):
        (folder / name_of_file).write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    data = DataConfig(str(folder / "prompts.jsonl"), eval=str(folder / "held_out.jsonl"))
    train = episode_args(folder, name, algorithm="grpo", samples_per_prompt=2, total_episodes=24, **changes)
    world = f"{Path(environments.__file__)}:{environment}"
    return RunConfig(str(folder / "policy"), data, environment=world, train=train, algorithm="grpo")


def repeat(folder: Path, name: str) -> Path:
    """The folder of the run in ``folder/run``, which is run again with the replies that it had."""
    config, _ = parse(RunConfig, "train", ["--config", str(folder / "run" / "run.yml")])
    generation = replace(config.train.generation, replies_from=str(folder / "run" / "episodes.jsonl"))
    train = replace(config.train, output_dir=str(folder / name), generation=generation)
    run_train(replace(config, train=train))
    return folder / name


def measured(folder: Path) -> list[dict]:
    """The metrics of a run and of its evaluations, without times."""
    rows = json_rows(folder / "metrics.jsonl")
    return [{name: x for name, x in row.items() if "time/" not in name and name != "eps"} for row in rows]


@pytest.mark.parametrize("staleness", [rare(0), 1])
def test_a_run_with_a_fickle_environment_is_repeated_and_explained(tmp_path, staleness):
    """By what it said, which is in the run's folder; in evaluations too."""
    run_train(as_command(tmp_path, "Fickle", staleness=staleness, eval_steps=2))
    run = tmp_path / "run"
    episodes = json_rows(run / "episodes.jsonl")
    assert sum(row["evaluated"] is None for row in episodes) == 24 * 2
    assert sum(row["evaluated"] is not None for row in episodes) == 20 * 2
    assert len({row["metrics"].get("number") for row in episodes}) > 10
    again = repeat(tmp_path, "again")
    assert measured(again) == measured(run)
    assert (again / "episodes.jsonl").read_bytes() == (run / "episodes.jsonl").read_bytes()
    run_explain(ExplainConfig(str(run), batch=2))
    first = json.loads((run / "episodes.jsonl").read_text().splitlines()[0])
    said = next(message for message in first["messages"] if message["role"] == "assistant")
    said["content"] += "!"
    others = (run / "episodes.jsonl").read_text().partition("\n")[2]
    (run / "episodes.jsonl").write_text(json.dumps(first) + "\n" + others)
    with pytest.raises(
        (EpisodeError, GeneratorError), match="in the recorded run the policy wrote something else here"
    ):
        repeat(tmp_path, "changed")
    (run / "episodes.jsonl").rename(run / "elsewhere.jsonl")
    with pytest.raises((RepetitionDiffersError, EpisodeError)):
        run_explain(ExplainConfig(str(run), batch=2, overwrite=True))


def test_what_another_score_would_have_done_in_a_run_with_an_environment(tmp_path):
    """Its environment repeats by itself, so it can be asked anew; one that does not is told by what it says."""
    run_train(as_command(tmp_path, "Echo", staleness=1))
    found = run_explain(ExplainConfig(str(tmp_path / "run"), batch=1, top=0, after=2, what_if={"1": 50.0}))["what_if"]
    assert found["changes"][0]["is"] == 50.0
    assert found["batches"][0]["update"]["change"] > 0
    run_train(as_command(tmp_path / "other", "Fickle", staleness=1))
    with pytest.raises((RepetitionDiffersError, EpisodeError)):
        run_explain(ExplainConfig(str(tmp_path / "other" / "run"), batch=2, top=0, what_if={"1": 50.0}))


def test_a_run_with_conversations_is_repeated_and_explained(tmp_path):
    agent = {"environment": None, "agent": f"{environments.__file__}:forget"}
    run_train(replace(as_command(tmp_path, "Echo", staleness=1), **agent))
    assert measured(repeat(tmp_path, "again")) == measured(tmp_path / "run")
    step = run_explain(ExplainConfig(str(tmp_path / "run"), batch=2))["step"]["contributions"]
    assert step["sum_of_units"] == pytest.approx(step["of_the_whole_batch"], rel=1e-4)


def test_samples_have_conversations_and_the_rewards_of_their_turns(tmp_path):
    config = as_command(tmp_path, "Greeting", num_samples_logged=100)
    run_train(config)
    rows = json_rows(tmp_path / "run" / "samples.jsonl")
    assert len(rows) == 24 * 2
    for row in rows:
        assert row["messages"][0] == {"role": "user", "content": "hello "}
        answered = sum(message["role"] == "assistant" for message in row["messages"])
        assert len(row["rewards"]) == row["metrics"]["turns"]
        assert answered in (len(row["rewards"]), len(row["rewards"]) - 1)  # one that was cut off is no message
        assert row["score"] == pytest.approx(sum(row["rewards"]))
    names = {"episode/turns", "episode/observed_tokens", "episode/reward", "episode/failed", "time/environment"}
    batches = [metrics for metrics in metrics_of(config.train) if "completions" in metrics]
    assert len(batches) == 3
    assert all(names <= metrics.keys() for metrics in batches)


def test_reward_functions_get_the_messages_and_the_metrics(tmp_path, tokenizer, prompts):
    seen = []

    def reward(prompts, completions, messages, completion_messages, metrics, name, **columns):
        assert messages == completion_messages  # the prompts are texts
        seen.extend(zip(messages, metrics, strict=True))
        return [one["turns"] for one in metrics]

    args = episode_args(tmp_path, total_episodes=8)
    _, metrics = run_trainer(tokenizer, prompts, args, reward_funcs=reward)
    assert len(seen) == 16
    assert all(sum(one["role"] == "assistant" for one in messages) <= m["turns"] for messages, m in seen)
    assert metrics[0]["reward/reward"] == pytest.approx(metrics[0]["episode/turns"])
    total = metrics[0]["reward/reward"] + metrics[0]["episode/reward"]
    assert metrics[0]["objective/scores"] == pytest.approx(total)


@pytest.mark.parametrize("workers", [1, 2])
def test_neither_slow_steps_nor_the_number_of_workers_change_a_run(tmp_path, tokenizer, prompts, workers):
    requests = {"prompts_per_request": 4, "batch_size": 5}  # which turns are decoded together depends on their order
    args = episode_args(tmp_path, "fast", requests, staleness=1, total_episodes=24)
    ours = run_trainer(tokenizer, prompts, args)
    args = episode_args(tmp_path, "slow", {**requests, "workers": workers}, staleness=1, total_episodes=24)
    assert_same_run(run_trainer(tokenizer, prompts, args, Sleepy), ours)
    for metrics in metrics_of(args):  # of an episode's answers all but the last were answered, each in 20 ms or more
        assert metrics["time/environment"] >= 0.02 * 16 * (metrics["episode/turns"] - 1) > 0.1


WORLDS: list[Echo] = []


class Broken(Echo):
    """Fails in the first step of every other row; how is the value of ``how``."""

    how = "raises"

    def reset(self, row, seed):
        self.breaks = int(row["name"][1:]) % 2 == 1
        WORLDS.append(self)
        return super().reset(row, seed)

    async def step(self, message):
        if not self.breaks:
            return await super().step(message)
        if self.how == "raises":
            raise KeyError("x")
        if self.how == "hangs":
            await asyncio.sleep(60)
        return {
            "nonsense": Observation,
            "nan": Observation(reward=float("nan")),
            "silent": Observation(),
            "text": Observation(reward="1.0", done=True),
            "metrics": Observation(done=True, metrics={"right", 1.0}),
            "no message": Observation({"role": "user", "content": "one, not a list"}),
        }[self.how]


def assert_closed(worlds: list[Echo]) -> None:
    """Each in a thread, which a loaded machine may run after its time limit."""
    deadline = time.monotonic() + 60
    while not all(world.closed for world in worlds) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all(world.closed for world in worlds)


WAYS = ["raises", "hangs", "nonsense", "nan", "silent", "text", "metrics", "no message"]


@pytest.mark.parametrize("how", WAYS)
def test_an_environment_that_fails_follows_reward_errors_and_is_closed(tmp_path, tokenizer, prompts, how, monkeypatch):
    monkeypatch.setattr(Broken, "how", how)
    monkeypatch.setattr("cloudpickle.dumps", None)  # inline nothing is sent
    WORLDS.clear()
    generation = {"step_timeout": 1.0} if how == "hangs" else {}
    args = episode_args(tmp_path, "skip", generation, reward_errors="skip", total_episodes=16)
    _, metrics = run_trainer(tokenizer, prompts, args, environment=Broken)
    assert all(m["episode/failed"] > 0 for m in metrics)
    assert all(m["reward/skipped"] == m["episode/failed"] for m in metrics)
    assert len(WORLDS) == 32
    assert_closed(WORLDS)
    WORLDS.clear()
    args = episode_args(tmp_path, "error", generation, total_episodes=16)
    with pytest.raises(EpisodeError, match=r"the environment Broken .* \(row \d+, turn 1\)"):
        run_trainer(tokenizer, prompts, args, environment=Broken)
    assert_closed(WORLDS)


class NeverBegins(Echo):
    async def reset(self, row, seed):
        raise KeyError("x")


class BreaksAfterTheFirstBatch(Echo):
    begun = 0

    def reset(self, row, seed):
        type(self).begun += 1
        if self.begun > 16:
            raise KeyError("x")
        return super().reset(row, seed)


async def raises(client, row):
    raise KeyError("x")


async def gives_nan(client, row):
    await client.chat([{"role": "user", "content": "x"}])
    return float("nan")


async def asks_nothing(client, row):
    return 1.0


FAILING = [
    {"environment": NeverBegins},
    {"environment": None, "agent": raises},
    {"environment": None, "agent": gives_nan},
    {"environment": None, "agent": asks_nothing},
]


@pytest.mark.parametrize("world", FAILING, ids=["reset", "raises", "nan", "nothing"])
def test_a_run_whose_episodes_all_fail_ends_as_one_that_has_not_learnt(tmp_path, tokenizer, prompts, world, caplog):
    args = episode_args(tmp_path, reward_errors="skip", total_episodes=16)
    run_trainer(tokenizer, prompts, args, **world)
    lines = [json.loads(line) for line in Path(args.output_dir, "metrics.jsonl").read_text().splitlines()]
    assert [line["episode/failed"] for line in lines if "episode/failed" in line] == [16.0, 16.0]
    assert not any("episode/reward" in line or "objective/scores" in line for line in lines)
    assert "no optimiser step in all 2 batches" in caplog.text


def test_a_batch_whose_episodes_all_fail_is_left_out_and_the_run_goes_on(tmp_path, tokenizer, prompts, monkeypatch):
    monkeypatch.setattr("cloudpickle.dumps", None)  # inline nothing is sent
    args = episode_args(tmp_path, reward_errors="skip", total_episodes=16)
    _, metrics = run_trainer(tokenizer, prompts, args, environment=BreaksAfterTheFirstBatch)
    assert [line["episode/failed"] for line in metrics] == [0.0, 16.0]
    assert ["episode/reward" in line for line in metrics] == [True, False]
    assert [bool(line.get("optimizer_steps")) for line in metrics] == [True, False]


def calculate(expression: str) -> str:
    """
    Compute.

    Args:
        expression: What to compute.
    """
    return str(len(expression))


async def talk(client, row):
    """An agent that asks once or twice."""
    chat = [{"role": "user", "content": f"{row['name']}: "}]
    chat.append(await client.chat(chat))
    with suppress(RefusedError):
        await client.chat([*chat, {"role": "user", "content": "more "}])
    return float(len(chat[-1]["content"]) % 3)


PLAYED = {"agent": World(agent=talk), "tools": World(tools=[calculate]), "conversations": World(agent=forget)}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("world", "algorithm", "staleness"),
    [rare("agent", "grpo", 0), ("agent", "grpo", 1), rare("tools", "grpo", 0), ("tools", "grpo", 1),
     rare("conversations", "ppo", 0), ("conversations", "online_dpo", 1), ("conversations", "grpo", 2)],
)  # fmt: skip
def test_tools_and_agents_are_as_exact(tmp_path, tokenizer, prompts, world, algorithm, staleness):
    """Also when a run is stopped after batch 1 and resumed."""
    world, sizes = PLAYED[world], {"staleness": staleness, "total_episodes": 24}
    args = episode_args(tmp_path, "run", {"mismatch_steps": 1}, algorithm=algorithm, **sizes)
    rewards = () if world.agent else (count_letters,)
    given = {"agent": world.agent, "tools": world.tools, "reward_funcs": rewards, "environment": None}
    run_trainer(tokenizer, prompts, args, stop_after=1, **given)
    ours = run_trainer(tokenizer, prompts, replace(args, resume=True), **given)
    more = {"stop_token_ids": (256, *STOPS), "episodes": episodes_of(args, world, ChatTemplate(tokenizer))}
    assert_same_run(ours, sequential_oracle(policy_of, tokenizer, prompts, args, algorithm, rewards=rewards, **more))
    assert ours[1][-1]["grad_norm"] > 0
    found = metrics_of(args)
    assert max(row["engine/logprob_difference"] for row in found) < 1e-5
    if world.agent is forget:
        assert {row["episode/conversations"] for row in found} == {2}


@pytest.mark.quick
def test_one_of_them_at_most_and_its_turns_must_be_said(tmp_path, tokenizer, prompts):
    args = episode_args(tmp_path)
    with pytest.raises(ConfigError, match=r"agent: got .* only one of environment, tools and agent"):
        run_trainer(tokenizer, prompts, args, agent=talk)
    with pytest.raises(ConfigError, match=r"generation.max_turns: got 3; must be given with an environment"):
        run_trainer(tokenizer, prompts, args, environment=None, reward_funcs=count_letters)
    with pytest.raises(ConfigError, match=r"generation.max_turns: got None; must be given with an environment"):
        run_trainer(tokenizer, prompts, new_args(tmp_path))


THINKING = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content if loop.last or m.role != 'assistant' else "
    "m.content.split('</think>')[-1] }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.mark.quick
@pytest.mark.parametrize("role", ["user", "tool"])
def test_what_was_sampled_stays_although_the_template_drops_earlier_thoughts(tmp_path, prompts, role, monkeypatch):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = THINKING
    chats = [{**row, "query": [{"role": "user", "content": row["query"]}]} for row in prompts]
    tools = {"environment": None, "tools": [calculate], "reward_funcs": count_letters} if role == "tool" else {}
    batches, _ = watch(monkeypatch)
    run_trainer(tokenizer, chats, episode_args(tmp_path, staleness=1), **tools)
    several = [sample for batch in batches for sample in batch.samples if sample.metrics["turns"] > 1]
    for sample in several:  # every token after the prompt was drawn, or says what was answered
        parts = np.split(sample.tokens, np.flatnonzero(np.diff(sample.sampled.astype(int))) + 1)
        assert all(tokenizer.decode(part).endswith("<a>") for part in parts[::2])
    assert several or role == "tool"


FLYING = {"response_length": 30, "max_turns": 4, "episode_length": 110, "stop_token_ids": STOPS[:10]}


def fly(tmp_path, tokenizer, prompts, monkeypatch, generation, **changes):
    """A run in flight whose environments and forward passes take their time; every episode is checked.

    Returns its metrics, and how many episodes have tokens of several versions.
    """
    monkeypatch.setattr(process, "run_worker", run_slow_worker)
    batches, weights = watch(monkeypatch)
    options = {"staleness": 2, "total_episodes": 64, **changes}
    generation = {**FLYING, "placement": "process", "in_flight": True, "mismatch_steps": 1, **generation}
    args = episode_args(tmp_path, generation=generation, **options)
    _, metrics = run_trainer(tokenizer, prompts, args, Sleepy)
    models, several = models_of(weights, policy_of), 0
    assert [batch.index for batch in batches] == list(range(1, args.num_batches + 1))
    for batch in batches:
        assert len(batch.samples) == 8 * args.samples_per_prompt
        for group in batch.groups:
            for sample in group.samples:
                check_episode(group.prompt, sample, tokenizer, models, FLYING)
                versions = sample.versions[sample.sampled]
                assert max(0, batch.index - 3) <= versions[0] <= versions[-1] < batch.index
                several += len(set(versions)) > 1
    return metrics, several


@pytest.mark.parametrize("workers", [rare(1), 2])
def test_in_flight_a_slow_environment_keeps_the_bound(tmp_path, tokenizer, prompts, monkeypatch, workers):
    """New weights come between two turns and between two tokens: each token is of those that it names."""
    metrics, several = fly(tmp_path, tokenizer, prompts, monkeypatch, {"workers": workers})
    assert several > 0
    for row in metrics:
        assert row["engine/logprob_difference_max"] < 1e-4
        assert row["schedule/lag"] <= 2
        assert row["episode/turns"] > 1


@pytest.mark.timeout(60)
def test_in_flight_there_may_be_fewer_places_than_samples(tmp_path, tokenizer, prompts, monkeypatch):
    """The samples of a prompt then take turns with the places, as they do without an environment."""
    changes = {"algorithm": "rloo", "samples_per_prompt": 4, "completions_per_batch": 32, "total_episodes": 8}
    metrics, _ = fly(tmp_path, tokenizer, prompts, monkeypatch, {"batch_size": 2}, **changes)
    assert [row["batch"] for row in metrics] == [1]


def test_an_answer_that_is_cut_off_is_the_last_message(tmp_path, tokenizer, prompts):
    """Reward functions and files of samples see all that the policy wrote."""
    args = episode_args(tmp_path, samples_per_prompt=3)
    trainer = OnlineTrainer(policy_of(), args, prompts, environment=Echo, processing_class=tokenizer)
    stream = trainer.run.prompts.stream
    found = EpisodeSampler(trainer.run.engine).generate([stream.prompt(n) for n in range(12)])
    cut = [s for group in found for s in group if s.tokens[-1] not in (256, *STOPS)]
    assert {len(sample.messages) for sample in cut} >= {1, 3}
    for sample in cut:
        answer = sample.tokens[len(sample) - int(sample.sampled[::-1].argmin()) :]
        assert sample.messages[-1] == {"role": "assistant", "content": tokenizer.decode(answer.tolist())}


def test_environments_do_not_account_for_the_time_of_others(tmp_path, tokenizer, prompts, monkeypatch):
    """A plain function is done long before its episode has its turn again."""

    class Plain:
        def reset(self, row, seed):
            pass

        def step(self, message):
            return Observation([{"role": "user", "content": "go on"}])

        def close(self):
            pass

    def slow_message(self, tokens, before):
        time.sleep(0.01)
        return {"role": "assistant", "content": "x"}

    monkeypatch.setattr(Renderer, "message", slow_message)
    args = episode_args(tmp_path, samples_per_prompt=3)
    trainer = OnlineTrainer(policy_of(), args, prompts, environment=Plain, processing_class=tokenizer)
    sampler = EpisodeSampler(trainer.run.engine)
    started = time.monotonic()
    sampler.generate([trainer.run.prompts.stream.prompt(n) for n in range(12)])
    # On a loaded machine both grow, and functions that wait for a core do so at the same time. With the waits of all 36
    # episodes for each other it would be many times as long.
    assert sampler.take_seconds() < 4 * (time.monotonic() - started)


class Talks:
    """Says as much as a rulebook, and is done after the second answer."""

    def reset(self, row, seed):
        self.left = 2

    def step(self, message):
        self.left -= 1
        rules = {"role": "user", "content": "the rules are: " + "say it " * 5}
        return Observation([rules], reward=float(len(message["content"])), done=not self.left)

    def close(self):
        pass


@pytest.mark.parametrize("room", [None, 20])
def test_an_environment_has_the_models_room_and_a_run_says_if_that_is_not_enough(
    tmp_path, tokenizer, prompts, room, caplog
):
    """By default, although what it says is many times what the policy may; and with the right key."""
    generation = {"episode_length": room, "response_length": 4, "max_turns": 3, "stop_token_ids": list(range(200))}
    args = new_args(tmp_path, "roomy", generation, total_episodes=16, max_prompt_length=None)
    _, metrics = run_trainer(tokenizer, prompts, args, environment=Talks)
    assert [row["episode/out_of_turns"] for row in metrics] == [0, 0]
    said = "ended for want of room: with what the environment says, they may have 20 tokens after the prompt "
    said += f"(generation.episode_length, of which the model leaves {96 - 76} beside a prompt)"
    if room is None:
        assert all(row["episode/out_of_room"] == 0 for row in metrics)
        assert all(row["episode/turns"] > 1.3 for row in metrics)
    else:
        assert all(row["episode/out_of_room"] > 0.5 for row in metrics)
    assert (said in caplog.text) == (room is not None)
    assert "ended with an answer that was cut off" not in caplog.text


def test_a_run_says_how_many_episodes_end_with_an_answer_that_is_cut_off(tmp_path, tokenizer, prompts, caplog):
    generation = {"response_length": 2, "max_turns": 3, "stop_token_ids": list(range(128))}
    args = new_args(tmp_path, "cut", generation, total_episodes=16, max_prompt_length=None)
    _, metrics = run_trainer(tokenizer, prompts, args, environment=Talks)
    first = metrics[0]
    cut = round(16 * (1 - first["val/ended_share"] - first["episode/out_of_turns"] - first["episode/out_of_room"]))
    said = [record.message for record in caplog.records if "ended with an answer that was cut off" in record.message]
    assert 0 < cut < 16
    assert [line.split(" (")[0] for line in said] == [
        f"WARNING: {cut} of the first batch's 16 episodes ended with an answer that was cut off at 2 tokens"
    ]


def test_prompts_and_episodes_share_the_models_positions(tmp_path):
    def lengths(positions, generation, **changes):
        model = new_policy(max_position_embeddings=positions)
        found = with_prompt_cap(new_args(tmp_path, generation=generation, **changes), model)
        return found.prompt_cap, found.generation.longest_episode, found.generation.longest_written

    turns = {"max_turns": 3, "response_length": 12}
    assert lengths(96, turns) == (32, 64, 36)
    assert lengths(96, turns, max_prompt_length=None) == (48, 48, 36)
    assert lengths(2048, turns, max_prompt_length=None) == (512, 1536, 36)
    assert lengths(9000, turns, max_prompt_length=None) == (512, 4096, 36)
    assert lengths(9000, {"max_turns": 5, "response_length": 1000}, max_prompt_length=None) == (512, 5000, 5000)
    assert lengths(96, {**turns, "episode_length": 40}, max_prompt_length=None) == (56, 40, 36)
    assert lengths(96, {"response_length": 12}, max_prompt_length=None) == (84, 12, 12)
