"""``rollouts: all`` keeps every sample of a run, with what the learner used of it, and changes nothing else."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from timeit import repeat
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from documented import ROOT
from environments import Greeting, forget
from pyarrow.parquet import read_table
from test_resume import logs_of
from tiny import StopAfter, byte_tokenizer, count_letters

from async_rlhf.commands.relabel import run_relabel
from async_rlhf.commands.sft import encode_rows, run_sft
from async_rlhf.config import ConfigError, KLConfig, RelabelConfig, SFTConfig
from async_rlhf.data.formats import RowReader
from async_rlhf.data.held_out import hold_out
from async_rlhf.data.loading import load_rows
from async_rlhf.data.ratings import best_rows, pairs_of_rollouts
from async_rlhf.data.templates import CHATML, use_template
from async_rlhf.data.tokenizer import encode_prompts
from async_rlhf.models.chats import ChatTemplate
from async_rlhf.run.rollouts import write_rollouts
from async_rlhf.run.trainer import OnlineTrainer
from async_rlhf.system.files import write_file
from async_rlhf.types import Batch, Experience, Group, Prompt, Sample, ScoredBatch

EPISODE = {"max_turns": 3, "episode_length": 40, "response_length": 8, "stop_token_ids": list(range(60))}
FLIGHT = {"in_flight": True, "placement": "process"}
RUNS = {
    "grpo": {"samples_per_prompt": 3, "kl": KLConfig(coef=0.02), "num_epochs": 2},
    "ppo": {"samples_per_prompt": 1},
    "online_dpo": {"samples_per_prompt": 3},
    "best_of_k": {"samples_per_prompt": 3, "trained_prompts": 4},
    "episodes": {"algorithm": "grpo", "generation": EPISODE, "world": {"environment": Greeting}},
    "agent": {"algorithm": "rloo", "generation": EPISODE, "world": {"agent": forget}},
    "in_flight": {"algorithm": "rloo", "generation": FLIGHT},
}
MANY = {"num_samples_logged": 100, "staleness": 1, "samples_per_prompt": 2}


@pytest.fixture
def run(make_policy, tokenizer, prompts, make_args):
    """A run of six batches of 8 prompts: its folder, and what was scored and trained on in each."""

    def run(folder, kind="online_dpo", *callbacks, reads=tokenizer, rows=prompts, **options):
        known = {"algorithm": kind, **MANY, **RUNS[kind], **options}
        world = known.pop("world", {"reward_funcs": count_letters})
        policy = make_policy(vocab_size=300, max_position_embeddings=160)
        args = make_args(folder, {"num_threads": 1, **known.pop("generation", {})}, **known)
        trainer = OnlineTrainer(policy, args, rows, processing_class=reads, callbacks=callbacks, **world)
        annotate, update, seen = trainer.learner.annotate, trainer.learner.update, {}
        trainer.learner.annotate = lambda scored: seen.setdefault("scored", []).append(scored) or annotate(scored)
        trainer.learner.update = lambda e, batch: seen.setdefault("trained", []).append(e) or update(e, batch)
        with pytest.raises(SystemExit) if callbacks else nullcontext():
            trainer.train()
        return Path(args.output_dir), seen

    return run


def tables(folder):
    return {path.name: read_table(path) for path in sorted((folder / "rollouts").iterdir())}


def logs(folder):
    return logs_of(SimpleNamespace(output_dir=folder))


@pytest.mark.parametrize("kind", RUNS)
def test_every_number_is_the_learners_and_the_run_is_the_one_without(run, kind):
    out, seen = run("all", kind, rollouts="all")
    if kind != "in_flight":  # whose versions depend on timing
        assert logs(out) == logs(run("plain", kind)[0])
    files = tables(out)
    assert [*files] == [f"batch-{number:08}.parquet" for number in range(1, 7)]
    for table, scored, trained in zip(files.values(), seen["scored"], seen["trained"], strict=True):
        rows, samples = table.to_pylist(), scored.batch.samples
        for row, sample in zip(rows, samples, strict=True):
            for name in ("tokens", "sampled", "versions", "logprobs", "starts"):
                assert row[name] == np.asarray(getattr(sample, name)).tolist()
            assert row["environment_rewards"] == (None if sample.rewards is None else sample.rewards.tolist())
            assert (row["messages"] is not None) == (kind in ("episodes", "agent"))
        assert {row["number"]: row["score"] for row in rows} == dict(enumerate(scored.scores_PK.flatten().tolist(), 1))
        judged = {f"reward/{name}": rewards_R.tolist() for name, rewards_R in scored.rewards.items()}
        assert {name: table[name].to_pylist() for name in judged} == judged
        used = set()
        for b, length in enumerate(trained.lengths_B.tolist()):
            held = [x_BT[b, :length].tolist() for x_BT in (trained.tokens_BT, trained.behaviour_logprobs_BT)]
            number = next(n for n, row in enumerate(rows) if [row["tokens"], row["logprobs"]] == held)
            used.add(number)
            assert rows[number]["loss_weight"] == trained.loss_weights_U[b // trained.rows_per_unit].item()
            for name in ("advantages", "old_logprobs", "reference_logprobs"):
                values_BT = getattr(trained, f"{name}_BT")
                assert rows[number][name] == (None if values_BT is None else values_BT[b, :length].tolist())
        left = [row for n, row in enumerate(rows) if n not in used]
        assert all(row["loss_weight"] is row["advantages"] is None for row in left)
        assert kind != "online_dpo" or all(row["reference_logprobs"] for row in left)
        assert len(left) >= {"online_dpo": 8, "best_of_k": 20}.get(kind, 0)


def test_equal_samples_are_told_apart_by_their_scores(tmp_path, tokenizer):
    """A judge that says something else each time; the second of the three is trained on."""
    sample = Sample.answer([5], [6, 256], [-1.0, -2.0], [0, 0], "stop")
    batch = Batch(1, 0, (Group(Prompt(0, 0, (5,), {"query": "\x05"}), (sample,) * 3),), 0.0)
    scored = ScoredBatch(batch, torch.tensor([[1.0, 2.0, 3.0]]), {}, {"f": torch.tensor([1.0, torch.nan, 3.0])})
    made, two_B = torch.tensor([[0.0, -1.0, -2.0]]), torch.tensor([2.0])
    rows = Experience(torch.tensor([[5, 6, 256]]), torch.tensor([3]), made != 0, made, made, two_B, two_B / 4)
    write_rollouts(fake_run(tmp_path, tokenizer), scored, rows)
    (table,) = tables(tmp_path).values()
    assert table["loss_weight"].to_pylist() == [None, 0.5, None]
    assert table["reward/f"].to_pylist() == [1.0, None, 3.0]


def fake_run(folder, tokenizer):
    known = {"tokenizer": tokenizer, "scorer": SimpleNamespace(prompt_field="query")}
    return SimpleNamespace(learner=SimpleNamespace(annotated=None), folder=SimpleNamespace(path=folder), **known)


def test_a_batch_is_written_in_a_fraction_of_a_second(tmp_path, tokenizer):
    """512 samples of 500 tokens after prompts of 100, with all columns; -s shows how long it takes."""
    draw = np.random.default_rng(0)
    texts, numbers = {"query": "word " * 100}, [draw.integers(0, 256, 500) for _ in range(512)]
    answers = [Sample.answer([5] * 100, tokens, draw.normal(size=500), [7] * 500, "length") for tokens in numbers]
    groups = [Group(Prompt(n, n, (5,) * 100, texts), tuple(answers[n * 8 :][:8])) for n in range(64)]
    made, tokens_BT = (
        torch.from_numpy(np.stack([getattr(s, name) for s in answers])) for name in ("logprobs", "tokens")
    )
    more = dict.fromkeys(("advantages_BT", "old_logprobs_BT", "reference_logprobs_BT"), made)
    rows = Experience(tokens_BT, torch.full((512,), 600), made != 0, made, made, made[:, 200], made[:, 200], **more)
    scored = ScoredBatch(Batch(1, 0, tuple(groups), 0.0), rows.scores_B.view(64, 8), {})
    seconds = min(repeat(lambda: write_rollouts(fake_run(tmp_path, tokenizer), scored, rows), number=1, repeat=3))
    (file,) = (tmp_path / "rollouts").iterdir()
    print(f"{seconds:.2f} s, {file.stat().st_size / 1e6:.1f} MB")
    assert seconds < 2


def test_the_page_has_all_columns_with_their_types(run):
    page = (ROOT / "docs" / "rollouts.md").read_text("utf-8")
    said = {}
    for names, kind in re.findall(r"^\| (`.+?) \| ([a-z0-9 ]+?) \|", page, re.MULTILINE):
        said |= {name.replace("NAME", "count_letters"): kind for name in re.findall(r"`([^`]+)`", names)}
    schema = tables(run("all", rollouts="all", total_episodes=8)[0])["batch-00000001.parquet"].schema
    kinds = {"float": "float32", "double": "float64", "string": "text"}
    found = {field.name: str(getattr(field.type, "value_type", field.type)) for field in schema}
    lists = {field.name for field in schema if hasattr(field.type, "value_type")}
    assert said == {name: kinds.get(kind, kind) + (" list" if name in lists else "") for name, kind in found.items()}


# ---------------------------------------------------------------- the folder


def test_the_key_may_change_on_resume_and_none_logs_no_samples(run):
    out, _ = run("out", "ppo", StopAfter(3), rollouts="all")
    (out / "rollouts" / "batch-00000004.parquet").write_text("cut")
    run("out", "ppo", resume=True)
    assert len(tables(out)) == 3
    plain, _ = run("plain", "ppo")
    assert logs(out) == logs(plain)
    silent, _ = run("silent", "ppo", rollouts="none", num_samples_logged=4)
    assert logs(silent) == (logs(plain)[0], [])


def test_only_what_a_run_has_written_is_deleted(run):
    out, _ = run("out", "ppo", rollouts="all", total_episodes=16)
    (out / "rollouts" / "notes.txt").write_text("mine")
    run("out", "ppo", rollouts="none", num_samples_logged=4, overwrite_output_dir=True)
    assert [path.name for path in (out / "rollouts").iterdir()] == ["notes.txt"]
    write_file(out.parent / "other" / "rollouts" / "batch-00000009.parquet", "mine")
    with pytest.raises(ConfigError, match=r"holds 'rollouts/batch-00000009.parquet', .* which no run has written"):
        run("other", "ppo", overwrite_output_dir=True)


# ---------------------------------------------------------------- as data


CHATS = [{"query": [{"role": "user", "content": f"f{i}"}], "name": f"f{i}", "odd": {1}} for i in range(20)]


@pytest.mark.parametrize("kind", ["grpo", "episodes"])
@pytest.mark.parametrize("chats", [False, True])
def test_sft_reads_the_tokens_of_the_run(run, prompts, kind, chats):
    chat_tokenizer = byte_tokenizer()
    use_template(chat_tokenizer, CHATML)
    out, seen = run("all", kind, reads=chat_tokenizer, rollouts="all", rows=CHATS if chats else prompts)
    read, chat = load_rows(str(out / "rollouts"), key="train"), ChatTemplate(chat_tokenizer)
    samples = [sample for scored in seen["scored"] for sample in scored.batch.samples]
    examples, _ = encode_rows(read, chat, completion_only=True, longest=400, key="train", last=False)
    for example, sample in zip(examples, samples, strict=True):
        drawn = np.flatnonzero(sample.sampled)
        assert [*example.tokens] == sample.tokens[: drawn[-1] + 1].tolist()
        mask = example.learnt or (1,) * (len(example.tokens) - example.start)
        assert [0] * (len(example.tokens) - len(mask)) + [*mask] == sample.sampled[: drawn[-1] + 1].astype(int).tolist()
    for example, sample in zip(encode_rows(read, chat, True, 400, "train", last=True)[0], samples, strict=True):
        others = np.flatnonzero(~sample.sampled[: np.flatnonzero(sample.sampled)[-1]])
        assert (example.start, example.learnt) == (others[-1] + 1, ())
    texts = [RowReader(chat_tokenizer, "train").prompt(row["prompt"], "prompt", row) for row in read]
    asked = [group.prompt.tokens for scored in seen["scored"] for group in scored.batch.groups for _ in group.samples]
    assert [*encode_prompts(chat_tokenizer, texts)] == asked
    train, held = hold_out(read, 0.2, "train")
    assert not {row["row"] for row in train} & {row["row"] for row in held}
    assert all({"name": f"f{row['row']}"}.items() <= json.loads(row["columns"]).items() for row in read)


def test_the_best_of_a_prompt_and_those_above_a_score():
    rows = [{"prompt": p, "completion": "x", "score": s} for p, s in zip("abaab", (1, 5, 3, 3, None), strict=True)]
    assert best_rows(rows, None, True, "train") == [rows[1], rows[2]]
    assert best_rows(rows, 3.0, False, "train") == [rows[1], rows[2], rows[3]]
    with pytest.raises(ConfigError, match=r"min_score: got 9.0; none of the 5 rows of train has such a score"):
        best_rows(rows, 9.0, True, "train")


def test_relabel_makes_pairs_of_the_best_and_the_worst(run, tokenizer):
    out, seen = run("all", "online_dpo", rollouts="all", total_episodes=16)
    pairs = pairs_of_rollouts(load_rows(str(out / "rollouts")), "data")
    scores = torch.cat([scored.scores_PK for scored in seen["scored"]])
    ranges = zip(scores.amax(dim=1).tolist(), scores.amin(dim=1).tolist(), strict=True)
    assert [(pair["chosen_score"], pair["rejected_score"]) for pair in pairs] == [*ranges]
    place, judge = out.parent, {"reward_funcs": ["tiny:count_letters"]}
    done = run_relabel(RelabelConfig(str(out / "rollouts"), str(place / "pairs"), **judge))
    assert (done["train"]["pairs"], done["train"]["swapped"]) == (16, 0)
    best = SFTConfig(train=str(out / "rollouts"), output_dir=str(place / "sft"), best_of_prompt=True)
    assert run_sft(best)["rows"] == 16  # a new tokenizer reads other tokens, so the texts are taken
    played, _ = run("played", "episodes", rollouts="all", total_episodes=8)
    with pytest.raises(ConfigError, match=r"data: row [12] is an episode; must be one answer to a prompt, to make"):
        pairs_of_rollouts(load_rows(str(played / "rollouts"), key="data"), "data")
    asked, _ = run("asked", "agent", rollouts="all", total_episodes=8)
    with pytest.raises(ConfigError, match="train: row 1 has several conversations of an agent; must have one"):
        encode_rows(load_rows(str(asked / "rollouts")), ChatTemplate(tokenizer), True, 400, "train")
