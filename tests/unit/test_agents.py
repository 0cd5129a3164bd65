"""Agents: what they say over HTTP or in the process becomes tokens that were sampled, and tokens that were not."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import PROMPTS, byte_tokenizer, count_letters, new_args, new_policy

from async_rlhf.data.rendering import Renderer
from async_rlhf.generation.episodes.agents import _compared
from async_rlhf.generation.episodes.endpoint import RefusedError, _spoken
from async_rlhf.generation.episodes.playing import EpisodeError
from async_rlhf.generation.episodes.sampler import EpisodeSampler
from async_rlhf.generation.sampling import draw_tokens, sample_uniforms
from async_rlhf.models.chats import as_messages
from async_rlhf.run.trainer import OnlineTrainer
from async_rlhf.studies.explain.ablation import distance
from async_rlhf.studies.explain.update import clones
from async_rlhf.types import Batch, Group, ScoredBatch

TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "!{{ c.function.name }}{{ c.function.arguments }}{% endfor %}{% if m.role == 'assistant' %}<eos>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
STOPS = [256, *range(60)]


@pytest.fixture
def chats():
    tokenizer = byte_tokenizer()  # its own: others share that of the tests
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def sampled(tmp_path, tokenizer, agent, count=4, samples=2, column="query", **generation):
    """The samples of some prompts, by a new policy with an agent."""
    generation = {"response_length": 6, "max_turns": 3, "episode_length": 60, "stop_token_ids": STOPS[1:], **generation}
    args = new_args(
        tmp_path, generation=generation, samples_per_prompt=samples, **({"reward_errors": "skip"} if count < 0 else {})
    )
    rows = [{column: [{"role": "user", "content": f"q{i}"}], "number": i} for i in range(8)]
    policy = new_policy(max_position_embeddings=160)
    trainer = OnlineTrainer(policy, args, rows, agent=agent, processing_class=tokenizer)
    prompts = [trainer.run.prompts.stream.prompt(n) for n in range(abs(count))]
    return prompts, EpisodeSampler(trainer.run.engine).generate(prompts)


def parts(tokenizer, sample):
    """Runs of tokens by whether they were sampled: [(sampled, text), ...]."""
    edges = np.flatnonzero(np.diff(sample.sampled)) + 1
    runs = np.split(np.arange(len(sample)), edges)
    return [(bool(sample.sampled[run[0]]), tokenizer.decode(sample.tokens[run].tolist())) for run in runs]


async def two_questions(client, row):
    chat = [{"role": "user", "content": f"n{row['number']}"}]
    chat.append(await client.chat(chat))
    chat.append({"role": "user", "content": "again"})
    with suppress(RefusedError):  # its first answer was cut off
        await client.chat(chat)
    return row["number"]


def test_an_agent_goes_on_with_the_tokens_that_were_sampled(tmp_path, chats):
    prompts, found = sampled(tmp_path, chats, two_questions)
    both = 0
    for prompt, samples in zip(prompts, found, strict=True):
        for sample in samples:
            asked, *rest = parts(chats, sample)
            assert asked == (False, f"<u>n{prompt.columns['number']}<a>")
            assert sample.rewards.sum() == prompt.columns["number"] == sample.rewards[-1]
            assert sample.metrics["conversations"] == 1
            if sample.metrics["turns"] == 2:
                both += 1
                (first, _), (second, said), (third, _) = rest
                assert (first, second, third) == (True, False, True)
                ended = chats.decode(_run(sample)[-1:].tolist())  # the template's own end of an answer, or another
                assert said == ("" if ended == "<eos>" else "<eos>") + "<u>again<a>"
    assert both >= 3


def _run(sample):
    """The first answer."""
    start = int(sample.sampled.argmax())
    rest = np.flatnonzero(~sample.sampled[start:])
    return sample.tokens[start : start + (rest[0] if len(rest) else len(sample))]


def over_http(client, row):
    """A plain function, which waits for a server in a thread of its own."""
    chat, tools = [{"role": "user", "content": [{"type": "text", "text": "over http"}]}], []
    for _ in range(2):
        body = json.dumps({"model": client.model, "messages": chat, "tools": tools, "temperature": 0.7}).encode()
        head = {"Authorization": f"Bearer {client.api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{client.base_url}/chat/completions", body, head)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as error:
            refused = json.load(error)["error"]["code"]
            return 0.5 if refused == "context_length_exceeded" else -1.0
        (choice,) = found["choices"]
        assert choice["finish_reason"] in ("stop", "length")
        assert found["usage"]["completion_tokens"] <= 6
        chat += [choice["message"], {"role": "user", "content": "more"}]
    return 0.5


def test_over_http_it_is_the_same(tmp_path, chats):
    async def in_the_process(client, row):
        chat = [{"role": "user", "content": "over http"}]
        for _ in range(2):
            with suppress(RefusedError):
                chat += [await client.chat(chat), {"role": "user", "content": "more"}]
        return 0.5

    _, ours = sampled(tmp_path, chats, in_the_process)
    _, theirs = sampled(tmp_path, chats, over_http)
    assert theirs == ours
    assert max(sample.metrics["turns"] for samples in ours for sample in samples) == 2


def streaming(client, row):
    """The same by OpenAI's own client, where there is one: as agents ask that show what is written."""
    from openai import BadRequestError, OpenAI

    chat = [{"role": "user", "content": "over http"}]
    with OpenAI(base_url=client.base_url, api_key=client.api_key) as asked:
        for _ in range(2):
            options = {"model": client.model, "stream": True, "stream_options": {"include_usage": True}}
            try:
                parts = list(asked.chat.completions.create(messages=chat, **options))
            except BadRequestError as error:
                return 0.5 if error.code == "context_length_exceeded" else -1.0
            text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
            reasons = [part.choices[0].finish_reason for part in parts if part.choices]
            assert reasons[-1] in ("stop", "length")
            assert set(reasons[:-1]) == {None}
            assert parts[-1].usage.completion_tokens <= 6
            chat += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
    return 0.5


def test_a_client_that_reads_a_stream_gets_the_same(tmp_path, chats):
    pytest.importorskip("openai", reason="vLLM brings it")
    _, ours = sampled(tmp_path, chats, over_http)
    _, theirs = sampled(tmp_path, chats, streaming)
    assert theirs == ours


def test_a_stranger_gets_no_answer(tmp_path, chats):
    seen = []

    def agent(client, row):
        body = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
        for key in ("", "Bearer ", "Bearer wrong"):
            request = urllib.request.Request(f"{client.base_url}/chat/completions", body, {"Authorization": key})
            with pytest.raises(urllib.error.HTTPError) as found:
                urllib.request.urlopen(request, timeout=60)
            seen.append(found.value.code)
        return over_http(client, row)

    sampled(tmp_path, chats, agent, count=1, samples=2)
    assert seen == [401] * 6


def test_a_history_that_is_rewritten_begins_another_conversation(tmp_path, chats):
    """All conversations are of the sample, in the order of their beginnings; answers are of their own texts alone."""

    async def agent(client, row):
        one, other = ([{"role": "user", "content": text}] for text in ("one", "other"))
        one.append(await client.chat(one))
        await client.chat(other)
        again = await client.chat(other)  # it does not go on from anything
        with suppress(RefusedError):  # the first answer was cut off
            await client.chat([*one, {"role": "user", "content": "two"}])
        return float(again["content"] == "") + 1

    prompts, found = sampled(tmp_path, chats, agent, count=6, max_turns=4)
    policy, turns, different = new_policy(max_position_embeddings=160), set(), 0
    for prompt, samples in zip(prompts, found, strict=True):
        for number, sample in enumerate(samples):
            turns.add(sample.metrics["turns"])
            assert sample.metrics["conversations"] == 3
            assert len(sample.starts) == 2
            assert sample.rewards.sum() == sample.rewards[-1] >= 1
            texts = np.split(np.arange(len(sample)), sample.starts)
            asked = [chats.decode(sample.tokens[text[~sample.sampled[text]]].tolist()) for text in texts]
            assert asked[1:] == ["<u>other<a>"] * 2
            assert asked[0].startswith("<u>one<a>")
            assert asked[0].endswith("<u>two<a>") == (sample.metrics["turns"] == 4)
            first, again = (sample.tokens[text[sample.sampled[text]]].tolist() for text in texts[1:])
            different += first != again  # the same question, with other random numbers
            assert sample.places.tolist() == [place for text in texts for place in range(len(text))]
            uniforms = sample_uniforms(0, prompt.draw, number, sample.positions)
            drawn = []
            for text in texts:
                with torch.no_grad():
                    logits_TV = policy(torch.tensor(sample.tokens[text][None]).long()).logits[0]
                drawn.append(logits_TV[torch.tensor(np.flatnonzero(sample.sampled[text]) - 1)])
            tokens, logprobs = draw_tokens(torch.cat(drawn), torch.from_numpy(uniforms), 0.7)
            assert tokens.tolist() == sample.drawn.tolist()
            np.testing.assert_allclose(logprobs, sample.logprobs[sample.sampled], rtol=0, atol=1e-5)
    assert turns == {3, 4}
    assert different > 6


def each_alone(sample):
    """Its conversations as samples of their own."""
    names = ("tokens", "sampled", "logprobs", "versions", "rewards")
    parts = zip(*(np.split(getattr(sample, name), sample.starts) for name in names), strict=True)
    return [replace(sample, starts=(), **dict(zip(names, part, strict=True))) for part in parts]


@pytest.mark.parametrize("shared", [False, True], ids=["value model", "value head"])
def test_the_learner_computes_each_conversation_by_itself(tmp_path, chats, shared):
    """Everything that it adds to the rows, and what it trains on, is that of rows of their own."""

    async def agent(client, row):
        for text in ("one", "other", "other"):
            await client.chat([{"role": "user", "content": text * (1 + row["number"] % 3)}])
        return 1.0

    prompts, found = sampled(tmp_path, chats, agent)
    options = {"algorithm": "ppo", "shared_trunk": shared, "bootstrap_truncated": True, "non_eos_penalty": False}
    args = new_args(tmp_path, "other", **options, num_epochs=1, num_mini_batches=1)
    trainer = OnlineTrainer(new_policy(max_position_embeddings=160), args, PROMPTS, reward_funcs=count_letters,
                            processing_class=chats)  # fmt: skip
    learner = trainer.run.learner
    (learner.value if shared else learner.value.score).weight.data.normal_()  # it begins with 0

    def annotated(completions, several):
        groups = tuple(Group(prompt, tuple(samples)) for prompt, samples in zip(prompts, completions, strict=True))
        scores_PK = torch.zeros(len(groups), several)
        experience, _ = learner.annotate(ScoredBatch(Batch(1, 0, groups, 0.0), scores_PK, {}))
        return experience

    together = annotated(found, 2)
    assert together.positions_BT is not None
    alone = annotated([[part for sample in each for part in each_alone(sample)] for each in found], 6)
    assert alone.positions_BT is None
    for name in ("reference_logprobs_BT", "old_logprobs_BT", "values_BT", "behaviour_logprobs_BT"):
        mine, theirs = (getattr(rows, name)[rows.sampled_BT > 0] for rows in (together, alone))
        assert mine.abs().max() > 1e-3
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(together.end_values_B, alone.end_values_B[2::3], rtol=1e-5, atol=1e-5)
    update = SimpleNamespace(learner=learner, policy=[*learner.policy.parameters()])
    before = clones(update.policy)
    metrics = learner.update(together, 1)
    mine, theirs = (distance(update, rows, before, clones(update.policy)) for rows in (together, alone))
    assert mine.kl == pytest.approx(theirs.kl, rel=1e-3) != 0
    torch.testing.assert_close(mine.logprobs_B, theirs.logprobs_B.view(-1, 3).sum(dim=1), rtol=1e-4, atol=1e-5)
    assert metrics["policy/approxkl_avg"] < 1e-9  # what is trained is what was before the update
    assert metrics["val/ratio_var"] < 1e-9
    (first,) = together.values_BT[together.sampled_BT > 0].mean().reshape(1).tolist()
    assert metrics["val/value_avg"] == pytest.approx(first, abs=1e-5)


def test_turns_are_limited_and_a_refused_agent_may_end_as_it_likes(tmp_path, chats):
    async def agent(client, row):
        for turn in range(5):
            await client.chat([{"role": "user", "content": f"try {turn}"}])
        return 1.0

    _, found = sampled(tmp_path, chats, agent)
    samples = [sample for each in found for sample in each]
    assert {sample.metrics["turns"] for sample in samples} == {3.0}
    assert {sample.finish_reason for sample in samples} == {"length"}
    assert {float(sample.rewards.sum()) for sample in samples} == {0.0}


async def _raises(client, row):
    await client.chat([{"role": "user", "content": "x"}])
    raise KeyError("no such thing")


async def _exits(client, row):
    await client.chat([{"role": "user", "content": "x"}])
    sys.exit(0)


def _exits_in_a_thread(client, row):
    sys.exit(0)


async def _silent(client, row):
    return 1.0


async def _not_a_number(client, row):
    await client.chat([{"role": "user", "content": "x"}])
    return float("nan")


async def _forgets_to_return(client, row):
    await client.chat([{"role": "user", "content": "x"}])


async def _says_no_message(client, row):
    await client.chat(["x"])


async def _text(client, row):
    await client.chat([{"role": "user", "content": "x"}])
    return "1.0"


async def _hangs(client, row):
    await client.chat([{"role": "user", "content": "x"}])
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("agent", "why"),
    [
        (_raises, r"_raises raised KeyError: 'no such thing' \(row \d+, turn 1\)"),
        (_exits, r"_exits raised ExitError: sys.exit\(0\) was called \(row \d+, turn 1\)"),
        (_exits_in_a_thread, r"_exits_in_a_thread raised ExitError: sys.exit\(0\) was called"),
        (_silent, "raised ValueError: the agent asked the policy nothing"),
        (_not_a_number, "the agent returned nan; must be a finite number"),
        (_text, "the agent returned '1.0'; must be a finite number"),
        (_forgets_to_return, "the agent returned None; must return its reward, a number, as nothing else gives one"),
        (_says_no_message, r"messages\[0\]: got 'x'; must be an object with a role"),
        (_hangs, r"_hangs was not done after 1 s \(generation.step_timeout\)"),
    ],
)
def test_an_agent_that_fails_ends_the_run_or_its_episode(tmp_path, chats, agent, why):
    limit = {"step_timeout": 1.0} if agent is _hangs else {}  # others may take long on a loaded machine
    hint = r".*; reward_errors: skip goes on without the episode's reward( \(.*test_agents\.py, line \d+\))?$"
    with pytest.raises(EpisodeError, match=why + hint):
        sampled(tmp_path, chats, agent, **limit)
    _, found = sampled(tmp_path, chats, agent, count=-2, **limit)
    for samples in found:
        for sample in samples:
            assert np.isnan(sample.rewards).sum() == 1
            assert sample.metrics["failed"] == 1


def test_an_agent_may_leave_the_reward_to_functions(tmp_path, chats):
    args = new_args(tmp_path, generation={"response_length": 6, "max_turns": 3, "stop_token_ids": STOPS[1:]})
    rows = [{"query": [{"role": "user", "content": f"q{i}"}]} for i in range(8)]
    given = {"agent": _forgets_to_return, "processing_class": chats, "reward_funcs": count_letters}
    trainer = OnlineTrainer(new_policy(max_position_embeddings=160), args, rows, **given)
    (samples,) = EpisodeSampler(trainer.run.engine).generate([trainer.run.prompts.stream.prompt(0)])
    assert all(sample.rewards.sum() == 0 for sample in samples)


@pytest.mark.parametrize("count", [4, -4], ids=["error", "skip"])
@pytest.mark.parametrize("catches", [False, True])
def test_an_agent_whose_first_question_is_too_long_has_its_reward(tmp_path, chats, count, catches):
    """0, unless it catches the refusal; one answer to the row's prompt stands for what it did not ask."""

    async def agent(client, row):
        with suppress(*[RefusedError] * catches):
            await client.chat([{"role": "user", "content": "x" * (100 if row["number"] % 2 else 1)}])
        return 0.5

    prompts, found = sampled(tmp_path, chats, agent, count)
    for prompt, samples in zip(prompts, found, strict=True):
        too_long = prompt.columns["number"] % 2
        assert {float(sample.rewards.sum()) for sample in samples} == {0.0 if too_long and not catches else 0.5}
        assert not too_long or {sample.finish_reason for sample in samples} == {"length"}
        assert not too_long or {sample.metrics["turns"] for sample in samples} == {0.0}
        assert all(sample.sampled.any() for sample in samples)


def asked(client, raw=None, **body):
    """The status of a request's answer, and what is wrong with it."""
    head = {"Authorization": f"Bearer {client.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{client.base_url}/chat/completions", (raw or json.dumps(body)).encode(), head)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)["choices"][0]["finish_reason"]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["message"]


SAID = [{"role": "user", "content": "x"}]
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
NO_MESSAGES = {
    "messages: got 'x'": "x",
    "messages: got []": [],
    "messages: got None": None,
    "messages[0]: got 'x'; must be an object with a role": ["x"],
    "messages[0]: got {'content': 'x'}; must be an object with a role": [{"content": "x"}],
    "messages[1]: got {'role': 'user'}; must have a content": [*SAID, {"role": "user"}],
    "messages[0]: got {'role': 'user', 'content': 3}; must have a content that is text": [
        {"role": "user", "content": 3}
    ],
    "must have a content that is text, or parts": [{"role": "user", "content": [{"type": "image_url"}]}],
    "must have tool_calls like": [{"role": "assistant", "tool_calls": ["f"]}],
}
REFUSED = {
    "temperature: got 0; must be 0.7, which the run samples with (generation.temperature)": {"temperature": 0},
    "top_p: got 0.5; must be 1,": {"top_p": 0.5},
    "max_tokens: got 5; must be at least 6": {"max_tokens": 5},
    "max_completion_tokens: got 1; must be at least 6": {"max_completion_tokens": 1},
    "stop: got ['x']; must be left out": {"stop": ["x"]},
    "seed: got 0; must be left out": {"seed": 0},
    "logprobs: got True; must be false": {"logprobs": True},
    "top_logprobs: got 3; must be 0": {"top_logprobs": 3},
    "response_format: got {'type': 'json_object'}; must be": {"response_format": {"type": "json_object"}},
    "tool_choice: got 'required'; must be \"auto\"": {"tool_choice": "required", "tools": [CALL]},
    "tool_choice: got 'none'": {"tool_choice": "none", "tools": [CALL]},
    "parallel_tool_calls: got False": {"parallel_tool_calls": False},
    "logit_bias: got {'5': 1}; must be {}": {"logit_bias": {"5": 1}},
    "presence_penalty: got 0.5; must be 0": {"presence_penalty": 0.5},
    "n: got 2; must be 1": {"n": 2},
    "reasoning_effort: got 'low'; must be left out; what has a meaning here is": {"reasoning_effort": "low"},
    "tools[0]: got {}; must be like": {"tools": [{}]},
}
EQUAL = {
    "temperature": 0.7,
    "top_p": 1,
    "max_tokens": 6,
    "max_completion_tokens": 100,
    "stop": [],
    "seed": None,
    "n": 1,
}
EQUAL |= {"logprobs": False, "response_format": {"type": "text"}, "tool_choice": "auto", "presence_penalty": 0.0}
EQUAL |= {"logit_bias": {}, "user": "me", "metadata": {}, "stop_token_ids": [256], "frequency_penalty": 0}


def test_what_a_request_says_is_what_happens_or_refused_with_what_would_be_right(tmp_path, chats):
    found = {}

    def agent(client, row):
        for right, messages in NO_MESSAGES.items():
            found[right] = asked(client, messages=messages)
        for right, options in REFUSED.items():
            found[right] = asked(client, messages=SAID, **options)
        found["messages"] = asked(client, model="policy")
        found["fine"] = asked(client, messages=SAID, **EQUAL)
        return 1.0

    sampled(tmp_path, chats, agent, count=1, samples=2)
    assert found.pop("fine")[0] == 200
    assert len(found) == len(NO_MESSAGES) + len(REFUSED) + 1
    for right, (status, said) in found.items():
        assert status == 400, right
        assert right in said


DEEP = [900, 940, 980, 5000, 1_000_000]
"""Of lists within each other: such as Python reads and cannot write, and such as it cannot read."""


def test_messages_that_are_nested_too_deeply_for_what_reads_them_are_refused(tmp_path, chats):
    found = []

    def agent(client, row):
        for deep in range(840, 1000, 16):
            lists = "[" * deep + "]" * deep
            call = f'{{"type": "function", "function": {{"name": "f", "arguments": {{"a": {lists}}}}}}}'
            for more in (
                f'"role": "user", "content": "a", "x": {lists}',
                f'"role": "assistant", "tool_calls": [{call}]',
            ):
                found.append(asked(client, f'{{"messages": [{{{more}}}]}}'))
        asked(client, messages=SAID)
        return 1.0

    sampled(tmp_path, chats, agent, count=1, max_turns=500)
    assert {status for status, _ in found} == {400}, {why for status, why in found if status != 400}


def test_a_request_that_is_nested_too_deeply_is_refused(tmp_path, chats):
    found = []
    inner = ['"role": "user", "content": {}', '"role": "assistant", "tool_calls": [{{"function": {}}}]']

    def agent(client, row):
        for deep in DEEP:
            lists = "[" * deep + "]" * deep
            for text in ["[" + lists + "]", *(f"[{{{one.format(lists)}}}]" for one in inner)]:
                found.append(asked(client, f'{{"messages": {text}}}'))
            found.append(asked(client, f'{{"messages": {json.dumps(SAID)}, "metadata": {lists}, "tools": {lists}}}'))
            call = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": lists}}]}]
            found.append(asked(client, messages=call))
        return asked(client, messages=SAID)[0]

    _, (samples,) = sampled(tmp_path, chats, agent, count=1)
    assert {sample.rewards.sum() for sample in samples} == {200}
    assert len(found) == 2 * 5 * len(DEEP)
    assert {status for status, _ in found} == {400}
    assert (400, "ValueError: lists or objects are too deep within each other") in found


def test_messages_that_the_template_refuses_are_refused(tmp_path, chats):
    chats.chat_template = "{% for m in messages %}{{ raise_exception('roles must alternate') }}{% endfor %}"
    found = []

    def agent(client, row):
        found.append(asked(client, messages=[{"role": "user", "content": "x"}]))
        return 1.0

    rows = [{"query": f"q{i}"} for i in range(8)]
    args = new_args(tmp_path, generation={"response_length": 6, "max_turns": 3, "episode_length": 60})
    policy = new_policy(max_position_embeddings=160)
    trainer = OnlineTrainer(policy, args, rows, agent=agent, processing_class=chats)
    with pytest.raises(EpisodeError, match="asked the policy nothing"):
        EpisodeSampler(trainer.run.engine).generate([trainer.run.prompts.stream.prompt(0)])
    assert found[0] == (400, "the chat template cannot write it: roles must alternate")


def test_what_ends_the_run_is_told_once_and_not_by_the_server(tmp_path, chats, caplog, monkeypatch):
    """An agent over HTTP is answered, and aiohttp prints no traceback of its own."""
    found = []

    def fails(*_):
        raise OSError("the engine is gone")

    def agent(client, row):
        found.append(asked(client, messages=SAID))
        return 1.0

    monkeypatch.setattr("async_rlhf.generation.episodes.agents.Episode.add", fails)
    with pytest.raises(OSError, match="the engine is gone"):
        sampled(tmp_path, chats, agent, count=1)
    assert found[0] == (500, "the policy could not answer: OSError: the engine is gone")
    assert [record.name for record in caplog.records if record.name.startswith("aiohttp")] == []


@pytest.mark.parametrize("column", ["query", "prompt"])
def test_an_agent_gets_the_row_as_the_data_has_it_to_itself(tmp_path, chats, column):
    """The chat, not what the template makes of it; and what it changes there changes nothing."""
    rows = []

    async def agent(client, row):
        assert set(row) == {column, "number"}
        rows.append(row[column][0]["content"])
        chat = row[column]
        chat.append(await client.chat(chat))
        chat[-1]["content"] = "changed"
        return 1.0

    prompts, found = sampled(tmp_path, chats, agent, column=column)
    assert sorted(rows) == sorted(f"q{prompt.columns['number']}" for prompt in prompts for _ in range(2))
    for prompt, samples in zip(prompts, found, strict=True):
        assert len(prompt.messages) == 1
        for sample in samples:
            assert parts(chats, sample)[0] == (False, f"<u>q{prompt.columns['number']}<a>")
            assert sample.messages[-1]["content"] != "changed"


@pytest.mark.parametrize("in_flight", [False, True])
def test_what_belongs_to_a_loop_may_be_kept_between_requests(tmp_path, chats, in_flight):
    """As an HTTP client does: a lock of asyncio's knows the loop in which it was first waited for."""
    lock, loops = asyncio.Lock(), set()

    async def agent(client, row):
        loops.add(asyncio.get_running_loop())
        async with lock:  # all of them wait for one
            await asyncio.sleep(0.01)
        await client.chat(SAID)
        return 1.0

    args = new_args(tmp_path, generation={"response_length": 6, "max_turns": 3, "stop_token_ids": STOPS[1:]})
    rows = [{"query": [{"role": "user", "content": f"q{i}"}]} for i in range(8)]
    trainer = OnlineTrainer(new_policy(max_position_embeddings=160), args, rows, agent=agent, processing_class=chats)
    sampler, prompts = EpisodeSampler(trainer.run.engine), trainer.run.prompts.stream
    for batch in range(3):
        if in_flight:
            more = iter([[prompts.prompt(batch)]])
            assert len(list(sampler.stream(lambda places, more=more: next(more, [])))) == 1
        else:
            sampler.generate([prompts.prompt(batch), prompts.prompt(batch + 1)])
    assert len(loops) == 1


def test_in_flight_nobody_waits_for_an_agent_that_waits(tmp_path, chats):
    """What is complete is given, and new prompts begin, though no agent asks for an answer meanwhile."""
    given, waited, asked = set(), [], 0

    async def agent(client, row):
        await client.chat(SAID)
        if row["number"] == 0:
            async with asyncio.timeout(10.0):
                while given != {1, 2}:
                    await asyncio.sleep(0.01)
            waited.append(True)
        await asyncio.sleep(0.1)  # so that it ends when no answer is sampled
        return 1.0

    args = new_args(tmp_path, generation={"response_length": 6, "max_turns": 3, "stop_token_ids": STOPS[1:]})
    rows = [{"query": [{"role": "user", "content": f"q{i}"}], "number": i} for i in range(3)]
    policy = new_policy(max_position_embeddings=160)
    trainer = OnlineTrainer(policy, args, rows, agent=agent, processing_class=chats)
    stream = trainer.run.prompts.stream
    prompts = sorted((stream.prompt(i) for i in range(3)), key=lambda prompt: prompt.columns["number"])

    def more(places):  # two at once, the last when it is asked for the second time since the one was given
        nonlocal asked
        asked += 1 in given
        return [prompts.pop(0) for _ in range(2 if len(prompts) == 3 else len(prompts) * (asked > 1))]

    for number, _ in EpisodeSampler(trainer.run.engine).stream(more):
        given.add(number)
    assert given == {0, 1, 2}
    assert len(waited) == args.samples_per_prompt


def test_an_agent_may_stop_waiting_for_an_answer(tmp_path, chats):
    async def agent(client, row):
        with suppress(TimeoutError):
            await asyncio.wait_for(client.chat(SAID), 1e-6)
        await client.chat(SAID)
        return 1.0

    _, found = sampled(tmp_path, chats, agent)
    for sample in (sample for samples in found for sample in samples):
        assert sample.rewards.sum() == 1
        assert sample.metrics == {"turns": 1, "conversations": 1}


def test_many_that_fail_at_once_are_told_of_once(tmp_path, chats, caplog):
    with pytest.raises(EpisodeError):
        sampled(tmp_path, chats, _raises)
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_what_it_waits_for_the_policy_does_not_count(tmp_path, chats, monkeypatch):
    async def agent(client, row):
        await client.chat([{"role": "user", "content": "x"}])
        return 1.0

    def slow(self, turns, inner=EpisodeSampler._answers):
        import time

        time.sleep(2.2)
        return inner(self, turns)

    monkeypatch.setattr(EpisodeSampler, "_answers", slow)
    _, found = sampled(tmp_path, chats, agent, step_timeout=2.0)
    assert all(sample.rewards.sum() == 1 for samples in found for sample in samples)


@pytest.mark.parametrize("arguments", [{"city": "Rome", "n": None}, {"n": None}, {"a": [None, {"b": None}]}, {}])
def test_a_call_with_nulls_that_comes_back_is_the_call_that_the_policy_wrote(chats, arguments):
    """Else each further request would begin another conversation."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    chats.chat_template = TEMPLATE.replace("!{{ c.function.name }}{{ c.function.arguments }}", (
        "<tool_call>{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>"
    ))  # fmt: skip
    written = f"<tool_call>{json.dumps({'name': 'f', 'arguments': arguments})}</tool_call>"
    message = Renderer(chats, tools).read(written, "")
    (sent,) = as_messages([_spoken(message)], "messages")
    assert sent["tool_calls"][0]["function"]["arguments"] == arguments
    assert _compared(sent) == _compared(message)
