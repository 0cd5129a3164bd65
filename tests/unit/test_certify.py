"""async-rlhf certify: pairs in the order of their seeds, a decision that stays, and what a user may get wrong."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import simulated_certificates
from tiny import PROMPTS, byte_tokenizer, json_rows, new_policy

from async_rlhf.commands.stage import json_lines
from async_rlhf.config import ConfigError
from async_rlhf.config.parsing import parse
from async_rlhf.studies.certify.bets import Question, fewest_pairs, known_of, log_wealth
from async_rlhf.studies.certify.certificate import (
    _odds,
    in_order,
    line_of,
    looks,
    pair_of,
    progress,
    summary_of,
    table,
    verdict_text,
)
from async_rlhf.studies.certify.command import run_certify, trials_of
from async_rlhf.studies.certify.config import CertifyConfig

QUESTION = Question(staleness=4, margin=0.02, error=0.05, min_pairs=5, bound=0.05, breakdown_rate=0.5)
# Mean gold reward of twelve pairs of runs of one recipe at S = 0 and S = 4 whose seeds had much in common.
RECORDED = [
    (0.5121, 0.5087),
    (0.5204, 0.5169),
    (0.4987, 0.5020),
    (0.5060, 0.4991),
    (0.5313, 0.5290),
    (0.5142, 0.5125),
    (0.5009, 0.5036),
    (0.5251, 0.5180),
    (0.5098, 0.5111),
    (0.5177, 0.5102),
    (0.5036, 0.5019),
    (0.5220, 0.5237),
]


def results(gold, prompts=8):
    """What a run leaves, with some spread over prompts."""
    spread = np.linspace(-0.1, 0.1, prompts)
    return {"scores": (gold + spread).tolist(), "kl": {"estimate": 2.0, "low": 1.0, "high": 3.0}}


def arrivals(golds, seeds=None):
    return [
        (which, seed, results(gold))
        for seed, pair in zip(seeds or range(len(golds)), golds, strict=True)
        for which, gold in zip((0, 4), pair, strict=True)
    ]


def decided(runs, question=QUESTION, seeds=range(12)):
    return list(looks(in_order(runs, seeds, 4), question))


def test_pairs_come_in_the_order_of_seeds_whatever_ends_first():
    runs = arrivals(RECORDED)
    expected = decided(runs)
    assert 5 <= len(expected) < 12
    assert expected[-1][1].decision == "non-inferior"
    for seed in range(5):
        np.random.default_rng(seed).shuffle(runs)
        assert decided(runs) == expected
    assert decided(list(reversed(runs))) == expected


def test_it_ends_with_the_run_that_decides():
    taken = []

    def one_by_one():
        for run in arrivals(RECORDED):
            taken.append(run[1])
            yield run

    found = decided(one_by_one())
    assert max(taken) == found[-1][0].seed == len(found) - 1


def test_a_pair_waits_for_both_of_its_runs():
    runs = [run for run in arrivals(RECORDED) if (run[0], run[1]) != (4, 2)]
    assert [pair.seed for pair, _ in decided(runs)] == [0, 1]


@pytest.mark.parametrize(
    ("shift", "pairs", "decision"), [(0.0, 12, "non-inferior"), (-0.1, 12, "inferior"), (-0.017, 12, "undecided")]
)
def test_decisions(shift, pairs, decision):
    found = decided(arrivals([(a, b + shift) for a, b in RECORDED][:pairs]))
    summary = summary_of(found, QUESTION)
    assert summary["decision"] == decision
    low, high = summary["interval"]["low"], summary["interval"]["high"]
    assert {"non-inferior": low > -0.02, "inferior": high < -0.02, "undecided": low < -0.02 < high}[decision]
    assert verdict_text(summary).startswith("S = 4 is " + decision if decision != "undecided" else "Undecided")


def test_the_summary_has_what_the_pairs_have():
    found = decided(arrivals(RECORDED), QUESTION._replace(min_pairs=12))
    summary = summary_of(found, QUESTION)
    a, b = np.array(RECORDED).T
    d = b - a
    assert summary["mean_difference"] == pytest.approx(d.mean())
    assert summary["deviation"] == pytest.approx(d.std(ddof=1))
    assert summary["variance_saved"]["estimate"] == pytest.approx((a.var() + b.var()) / d.var())
    assert summary["worst_pair"] == {"seed": 9, "difference": pytest.approx(-0.0075)}
    assert summary["kl_stale"] == 2.0
    assert summary["interval"]["coverage"] == pytest.approx(0.9)
    text = verdict_text(summary) + table(found, QUESTION)
    assert "12 pairs, seeds 0 to 11" in text
    assert "| 9 | 0.5177 | 0.5102 | -0.0075 |" in text


def test_every_look_can_be_written_and_told():
    """Also the first ones, whose interval has no ends."""
    for golds in (RECORDED, [(0.5, 0.5)] * 12, [(0.5, 1e6)] * 12):
        found = decided(arrivals(golds))
        for count in range(1, len(found) + 1):
            line = json.loads(json_lines([line_of(*found[count - 1])]))
            assert (line["low"] is None) == (count < 4)
            assert math.isfinite(line["log10_evidence_non_inferior"])
            text = verdict_text(summary_of(found[:count], QUESTION)) + progress(*found[count - 1], QUESTION)
            assert "nan" not in text
            assert "inf]" not in text


def test_episodes_have_no_kl():
    """As evaluate leaves it out."""
    without = [{name: value for name, value in results(0.5).items() if name != "kl"}] * 2
    pair = pair_of(0, *without)
    assert (pair.kl_synchronous, pair.kl_stale) == (None, None)
    found = [(pair, decided(arrivals([(0.5, 0.5)] * 4))[-1][1])]
    assert summary_of(found, QUESTION)["kl_stale"] is None
    assert line_of(*found[0])["kl_stale"] is None


def test_a_pair_has_the_same_prompts():
    with pytest.raises(ValueError, match="zip"):
        pair_of(0, results(0.5), results(0.5, prompts=7))


def test_wealth_is_what_bets_win():
    """By a loop: each bet is a share of the largest, and wins (x - null) times itself."""
    x, null, low = [0.2, -0.1, 0.3, -0.3], -0.05, -0.3
    wealth = []
    for share in (0.1, 0.25, 0.5, 0.75, 1.0):
        one = 1.0
        for value in x:
            one *= 1 + share / (null - low) * (value - null)
        wealth.append(one)
    assert wealth[-1] == pytest.approx(0, abs=1e-12)  # the largest bet has lost everything
    assert log_wealth(x, null, low) == pytest.approx(math.log(sum(wealth) / 5))


FIXED = Question(staleness=1, margin=0.03, error=0.05, min_pairs=5, bound=0.3, breakdown_rate=0.1)
WRONG = {
    # Not non-inferior: a mean of -margin within the bound, or breakdowns in one pair of ten.
    "normal at the margin": lambda rng, shape: rng.normal(-0.03, 0.03, shape),
    "skewed down at the margin": lambda rng, shape: 0.0 - rng.exponential(0.03, shape),
    "one in 10 breaks down": lambda rng, shape: rng.normal(0.03, 0.01, shape) - 0.6 * (rng.random(shape) < 0.1),
    "two in 20 lose a third": lambda rng, shape: np.where(rng.random(shape) < 0.1, -0.3, 0.0),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_non_inferior_is_as_rare_as_stated(name):
    """At all looks together, of up to 120 pairs: whatever the differences are distributed like."""
    d_RN = WRONG[name](np.random.default_rng(3), (2000, 120))
    wrong_R = np.zeros(len(d_RN), dtype=bool)
    for _, reached_R in simulated_certificates.bets_at_all_looks(d_RN, FIXED):
        wrong_R |= reached_R
    assert wrong_R.mean() <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / len(d_RN))


def test_the_simulation_is_of_these_bets():
    d_RN = np.random.default_rng(4).normal(0, 0.05, (20, 60))
    for n, reached_R in simulated_certificates.bets_at_all_looks(d_RN, FIXED):
        for d, reached in zip(d_RN, reached_R, strict=True):
            assert reached == (known_of(d[:n].tolist(), FIXED).decision == "non-inferior")


def test_clear_pairs_decide_as_soon_as_can_be_and_breakdowns_forbid_it():
    least = fewest_pairs(FIXED)
    assert least == 40
    assert known_of([0.05] * (least - 1), FIXED).decision == "undecided"
    assert known_of([0.05] * least, FIXED).decision == "non-inferior"
    broken = known_of([0.05] * 17 + [-0.9] * 3 + [0.05] * 40, FIXED)
    assert (broken.decision, broken.breakdowns) == ("undecided", 3)
    assert broken.normal.decision == "undecided"
    assert known_of([-0.2] * 12, FIXED).decision == "inferior"
    assert fewest_pairs(FIXED._replace(min_pairs=50)) == 50


LETTERS = """
def count_letters(prompts, completions, **columns):
    return [sum(c.isascii() and c.isalpha() for c in text) + 0.01 * len(text) for text in completions]
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certify")
    new_policy().save_pretrained(folder / "policy")
    byte_tokenizer().save_pretrained(folder / "policy")
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS), "utf-8")
    (folder / "letters.py").write_text(LETTERS, "utf-8")
    return folder


def config(inputs, output, **changes):
    reward = [f"{inputs / 'letters.py'}:count_letters"]
    values = {
        "base": {
            "model": str(inputs / "policy"),
            "algorithm": "rloo",
            "data": {"train": str(inputs / "prompts.jsonl")},
            "reward_funcs": reward,
            "train": {
                "batches": 3,
                "completions_per_batch": 8,
                "learning_rate": 1e-3,
                "max_prompt_length": 32,
                "non_eos_penalty": False,
                "generation": {"response_length": 8, "placement": "inline"},
            },
        },
        "held_out": {"data": str(inputs / "prompts.jsonl"), "reward_funcs": reward, "response_length": 8, "seed": 7},
        "staleness": 2,
        "margin": 1e-4,
        "error": 0.33,
        "min_pairs": 2,
        "max_pairs": 2,
        "bound": 1e3,
        "breakdown_rate": 0.9,
        "seed": 3,
        "parallel": 2,
        "output_dir": str(output),
    }
    return CertifyConfig(**values | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"margin": 0.0}, "margin: got 0.0; must be above 0"),
        ({"error": 0.5}, "error: got 0.5; must be below 0.5"),
        ({"staleness": 0}, "staleness: got 0; must be at least 1"),
        ({"min_pairs": 3}, "max_pairs: got 2; must be at least min_pairs, which is 3"),
        (
            {"breakdown_rate": 0.1},
            "max_pairs: got 2; must be at least 17: fewer cannot show that less than 0.1 of pairs",
        ),
        ({"bound": 1e-5}, "bound: got 1e-05; must be above the margin, which is 0.0001"),
        ({"seed": 2**32 - 8}, "seed: got 4294967288; must be smaller"),
        ({"base": {"model": "x", "train": {"output_dir": "y"}}}, "base.train.output_dir: got 'y'; must be left out"),
        ({"held_out": {"data": "no.jsonl", "reward_funcs": ["math:sqrt"]}}, "held_out.data: got 'no.jsonl'"),
        ({"held_out": {"data": "x", "judge": {"url": "http://localhost", "model": "m"}}}, "held_out.judge.url: got"),
        ({"held_out": {"data": "x", "temprature": 1}}, "held_out: .*temprature"),
        ({"held_out": {"data": "x", "seed": "y"}}, "held_out.seed: got 'y'; must be a whole number"),
    ],
)
def test_bad_input_is_named_before_a_model_is_loaded(inputs, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        run_certify(config(inputs, tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()


def test_the_margin_must_be_given(tmp_path):
    (tmp_path / "c.yml").write_text("base: {}\nheld_out: {data: x}\nstaleness: 1\noutput_dir: out\n", "utf-8")
    with pytest.raises(ConfigError, match="margin"):
        parse(CertifyConfig, "certify", ["--config", str(tmp_path / "c.yml")])


def test_both_runs_of_a_pair_differ_in_staleness_alone(inputs, tmp_path):
    trials = trials_of(config(inputs, tmp_path))
    assert [(one.run.train.staleness, one.seed, one.held_out.seed) for one in trials] == [
        (0, 3, 10),
        (2, 3, 10),
        (0, 4, 11),
        (2, 4, 11),
    ]
    first, second = (replace(one.run.train, output_dir="x") for one in trials[:2])
    assert replace(first, staleness=2) == second
    assert first.seed == 3
    assert trials[0].held_out == trials[1].held_out


@pytest.mark.rare
def test_a_certificate_of_real_runs_goes_on_and_stays(inputs, tmp_path, capsys):
    """Undecided after two pairs; with a third the first two are read back; another margin is refused."""
    out = tmp_path / "out"
    first = run_certify(config(inputs, out))
    assert first["decision"] == "undecided"
    assert first["seeds"] == [3, 4]
    assert "Undecided" in capsys.readouterr().out
    markers = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/trial.json")}
    assert len(markers) == 4
    lines = (out / "pairs.jsonl").read_text("utf-8")

    second = run_certify(config(inputs, out, max_pairs=3))
    assert second["seeds"] == [3, 4, 5]
    assert {path: path.stat().st_mtime_ns for path in markers} == markers
    assert (out / "pairs.jsonl").read_text("utf-8").startswith(lines)
    assert json.loads((out / "certificate.json").read_text("utf-8")) == second
    rows = json_rows(out / "pairs.jsonl")
    for row in rows:
        golds = [
            json.loads((out / f"runs/staleness={k},seed={row['seed']}/trial.json").read_text("utf-8"))["results"]
            for k in (0, 2)
        ]
        assert row["gold_synchronous"] == pytest.approx(golds[0]["gold"]["estimate"])
        assert row["difference"] == pytest.approx(golds[1]["gold"]["estimate"] - golds[0]["gold"]["estimate"])
    assert len({row["gold_stale"] for row in rows}) == 3
    assert any(row["difference"] != 0 for row in rows)  # staleness does something

    with pytest.raises(ConfigError, match=r"margin: was 0.0001, is 5"):
        run_certify(config(inputs, out, max_pairs=3, margin=5.0))
    assert json.loads((out / "certificate.json").read_text("utf-8")) == second
    changed = config(inputs, out)
    changed = replace(changed, base=changed.base | {"train": changed.base["train"] | {"batches": 4}})
    with pytest.raises(ConfigError, match=r"plan of the certificate: [^\n]*\n  base.train.batches: was 3, is 4"):
        run_certify(changed)


def test_one_held_out_prompt_is_refused_before_the_first_run(inputs, tmp_path):
    (tmp_path / "one.jsonl").write_text(json.dumps(PROMPTS[0]) + "\n", "utf-8")
    known = config(inputs, tmp_path / "out").held_out
    data = known | {"data": str(tmp_path / "one.jsonl")}
    with pytest.raises(ConfigError, match=r"held_out.data: got '.*one.jsonl'; has 1 prompt; must be at least 2"):
        run_certify(config(inputs, tmp_path / "out", held_out=data))
    with pytest.raises(ConfigError, match=r"held_out.max_prompts: got 1; must be at least 2"):
        run_certify(config(inputs, tmp_path / "out", held_out=known | {"max_prompts": 1}))
    assert not (tmp_path / "out").exists()


def test_runs_of_at_most_a_staleness_are_refused(inputs, tmp_path):
    flying = config(inputs, tmp_path / "out")
    flying.base["train"]["generation"] = flying.base["train"].get("generation", {}) | {"in_flight": True}
    with pytest.raises(ConfigError, match=re.escape("base.train.generation.in_flight: got True; must be false")):
        run_certify(flying)


@pytest.mark.parametrize(
    ("error", "evidence", "text"),
    [
        (0.05, 19.6, "19.6"),
        (0.05, 19.4, "19"),
        (0.05, 20.4, "20"),
        (0.05, 0.0199, "0.02"),
        (0.05, 1e-6, "10^-6"),
        (0.1, 9.97, "9.97"),
        (0.03, 33.4, "33.4"),
        (0.33, 3.04, "3.04"),
        (1e-5, 60_000, "10^4.8"),
        (1e-5, 2e5, "10^5"),
    ],
)
def test_evidence_is_shown_on_its_side_of_the_threshold(error, evidence, text):
    """19.6 of 20 is not 20 of 20."""
    assert _odds(math.log(evidence), error) == text


def test_a_run_that_fails_decides_nothing(inputs, tmp_path):
    broken = f"{inputs / 'letters.py'}:missing_function"
    changed = config(inputs, tmp_path / "out")
    changed = replace(changed, base=changed.base | {"reward_funcs": [broken]})
    with pytest.raises(RuntimeError, match=r"seed=3 failed; start the certificate again"):
        run_certify(changed)
    assert not (tmp_path / "out" / "certificate.json").exists()


@pytest.mark.parametrize("gains", [True, False])
def test_margin_and_bound_as_shares_of_what_training_gains(inputs, tmp_path, capsys, gains):
    """The run that says how much that is has the first seed, and is in no pair."""
    out, rate = tmp_path / "out", 1e-2 if gains else 1e-30
    changed = config(inputs, out, of_gain=True, margin=0.1, bound=2.0)
    train = {**changed.base["train"], "batches": 12, "learning_rate": rate, "lr_scheduler_type": "constant"}
    changed = replace(changed, base=changed.base | {"train": train})
    if not gains:
        with pytest.raises(
            ConfigError, match=r"of_gain: got True; must be false: seed 3 goes from a gold reward of (\S+) to \1,"
        ):
            run_certify(changed)
        return
    found = run_certify(changed)
    assert found["seeds"] == [4, 5]
    (started,) = out.glob("start-*/evaluation.json")
    start = json.loads(started.read_text("utf-8"))["results"]["models"]["policy"]["reward_mean"]["estimate"]
    pilot = json.loads((out / "runs/staleness=0,seed=3/trial.json").read_text("utf-8"))["results"]
    assert found["gain"] == pytest.approx(pilot["gold"]["estimate"] - start)
    assert found["margin"] == pytest.approx(0.1 * found["gain"])
    assert found["bound"] == pytest.approx(2 * found["gain"])
    assert (
        f"are 10% and 200% of the {found['gain']:.4f} that training gained at S = 0 with seed 3"
        in capsys.readouterr().out
    )
    assert not (out / "runs/staleness=2,seed=3").exists()
    assert run_certify(changed) == found
