"""The judge that compares, against a real server on this machine; win-rates at equal length."""

from __future__ import annotations

import json
import math
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from async_rlhf.commands.evaluation.statistics import length_controlled_win_rate
from async_rlhf.config import ConfigError, JudgeConfig
from async_rlhf.rewards import chat
from async_rlhf.rewards.chat import JudgeError
from async_rlhf.rewards.judge import Pair, PairwiseJudge, verdict


def shown_in(text: str) -> list[str]:
    """The texts that are judged, all but the prompt: those between lines with the mark, as a judge is told."""
    found = re.search(r"lines that say ([0-9a-f]{16})\.", text)
    if found is None:  # a question of one's own
        return text.split("[Answer A]\n")[1].split("\n\nReply")[0].split("\n\n[Answer B]\n")
    return text.split(f"\n{found[1]}\n")[1::2][1:]


class Server:
    """An OpenAI-compatible server whose model is a Python function of the two answers."""

    def __init__(self, prefer):
        self.prefer, self.requests, self.failures, self.headers, self.bodies = prefer, [], [], [], []
        self.open, self.most_open, self.lock = 0, 0, threading.Lock()

    def answer(self, path: str, headers, body: dict) -> tuple[int, dict]:
        with self.lock:
            self.open += 1
            self.most_open = max(self.most_open, self.open)
        try:
            assert path == "/v1/chat/completions"
            self.headers.append(dict(headers))
            self.bodies.append(body)
            if self.failures:
                return self.failures.pop(0), {"error": "not now"}
            text = body["messages"][0]["content"]
            self.requests.append(text)
            reply = self.prefer(*shown_in(text))
            return 200, {"choices": [{"message": {"content": reply}}], "model": "m-1", "usage": {"prompt_tokens": 7}}
        finally:
            with self.lock:
                self.open -= 1


@contextmanager
def serving(server: Server):
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, reply = server.answer(self.path, self.headers, body)
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}/v1"
        http.shutdown()


def more_o(first: str, second: str) -> str:
    return "A" if first.count("o") > second.count("o") else "B"


PAIRS = [Pair("p", "oo", "x"), Pair("q", "x", "ooo"), Pair("r", "same", "same"), Pair("s", "a{second}o", "b")]


@pytest.fixture
def judge(tmp_path):
    def make(url: str, **changes) -> PairwiseJudge:
        return PairwiseJudge(JudgeConfig(url=url, model="m", **changes), tmp_path / "verdicts.jsonl")

    return make


def test_both_orders_are_asked_and_must_agree(judge):
    server = Server(more_o)
    with serving(server) as url:
        outcomes, shares = judge(url).outcomes(PAIRS, "judging")
    assert outcomes == [1.0, 0.0, 0.5, 1.0]
    assert shares == {"inconsistent": 0.0, "unreadable": 0.0}
    assert len(server.requests) == 6  # not for equal answers
    assert sum("a{second}o" in text for text in server.requests) == 2  # an answer is no template


@pytest.mark.parametrize("reply", ["A", "B"])
def test_a_judge_that_looks_at_the_place_alone_finds_ties(judge, reply):
    with serving(Server(lambda *_: reply)) as url:
        outcomes, shares = judge(url).outcomes(PAIRS[:2], "judging")
    assert outcomes == [0.5, 0.5]
    assert shares["inconsistent"] == 1.0


def test_what_cannot_be_read_is_half_a_verdict(judge):
    with serving(Server(lambda first, _: "A" if first == "oo" else "neither of them")) as url:
        outcomes, shares = judge(url).outcomes(PAIRS[:1], "judging")
    assert outcomes == [0.5]
    assert shares == {"inconsistent": 0.0, "unreadable": 0.5}


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("A", "A"), (" B.\n", "B"), ("**A**", "A"), ("Answer: B", "B"), ("[[A]]", "A"), ("A or B?", ""), ("Both", ""),
        ("<think>A is short, B is right.</think>B", "B"), ("<think>A is short", ""), ("A tie.", ""), ("It's a tie.",
        ""),
        ("A good reply needs facts", ""), ("A plus", ""), ("A is better.", "A"), ("A, because it is right", "A"),
        ("The better answer is A.", "A"), ("I would choose A", "A"), ("A is short, B is right.\n\nB", "B"),
        ("B wins", "B"),
        ("Neither A nor B", ""), ("not B", ""), ("A beats B in style.\nFinal verdict: [[B]]", "B"), ("Option B", "B"),
        ("<|channel|>analysis<|message|>A?<|end|><|start|>assistant<|channel|>final<|message|>B", "B"),
    ],
)  # fmt: skip
def test_verdicts(reply, letter):
    assert verdict(reply) == letter


def test_what_was_said_is_not_asked_again(judge, tmp_path):
    server = Server(more_o)
    with serving(server) as url:
        first = judge(url).outcomes(PAIRS[:1], "judging")
        with (tmp_path / "verdicts.jsonl").open("a") as file:
            file.write('{"key": "cut o')  # killed while it wrote
        again = judge(url).outcomes(PAIRS[:1], "judging")
        assert len(server.requests) == 2
        PairwiseJudge(JudgeConfig(url=url, model="other"), tmp_path / "verdicts.jsonl").outcomes(PAIRS[:1], "judging")
        assert judge(url).outcomes(PAIRS[:1], "judging") == first
    assert first == again
    assert len(server.requests) == 4  # another model is another judge


def test_failures_are_retried_and_then_named(judge, monkeypatch, tmp_path):
    waits = []
    monkeypatch.setattr(chat, "_wait", lambda stop, seconds: waits.append(seconds))
    server = Server(more_o)
    server.failures = [503, 429]
    with serving(server) as url:
        assert judge(url, concurrency=1).outcomes(PAIRS[:1], "judging")[0] == [1.0]
        assert waits == [1.0, 2.0]
        server.failures = [500] * 3
        with pytest.raises(JudgeError, match=r"gave no verdict \(status 500: .*not now"):
            judge(url, concurrency=1, max_retries=2).outcomes(PAIRS[1:2], "judging")
        server.failures = [401]
        waits.clear()
        with pytest.raises(JudgeError, match="status 401"):
            judge(url, concurrency=1).outcomes(PAIRS[1:2], "judging")
        assert waits == []  # a wrong key does not become right
    with pytest.raises(JudgeError, match="Connect"):
        judge(url, max_retries=1).outcomes(PAIRS[1:2], "judging")
    # What was under way when the key was refused may have been answered.
    assert 2 <= len((tmp_path / "verdicts.jsonl").read_text().splitlines()) <= 3


def test_requests_run_together_and_carry_the_key(judge, monkeypatch):
    monkeypatch.setenv("THE_KEY", "secret")
    gate = threading.Barrier(4, timeout=20)

    def barrier(first: str, second: str) -> str:
        gate.wait()
        return more_o(first, second)

    server = Server(barrier)
    with serving(server) as url:
        pairs = [Pair(f"p{i}", "o" * (i + 1), "x") for i in range(4)]
        assert judge(url, concurrency=4, api_key_variable="THE_KEY").outcomes(pairs, "judging")[0] == [1.0] * 4
    assert server.most_open == 4
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret"}


def test_what_the_judge_refuses_is_no_verdict(judge):
    """A filter may refuse one text; a judge that has never answered is misconfigured."""
    server = Server(more_o)
    with serving(server) as url:
        one = judge(url, concurrency=1)
        assert one.outcomes(PAIRS[:1], "judging")[0] == [1.0]
        server.failures = [400]
        assert one.outcomes(PAIRS[1:2], "judging") == ([0.5], {"inconsistent": 0.0, "unreadable": 0.5})
        server.failures = [400]
        with pytest.raises(JudgeError, match="status 400"):
            judge(url, concurrency=1).outcomes(PAIRS[3:], "judging")


def test_verdicts_are_asked_for_without_chance_and_survive_any_letter(judge, tmp_path):
    server = Server(lambda first, second: f"\u2028{more_o(first, second)}")
    with serving(server) as url:
        first = judge(url).outcomes(PAIRS, "judging")
        assert judge(url).outcomes(PAIRS, "judging") == first
        assert len(server.requests) == 6
        judge(url, max_tokens=17).outcomes(PAIRS[:1], "judging")
        assert len(server.requests) == 8  # another length of the reply may be another reply
    assert {(body["temperature"], body["model"]) for body in server.bodies} == {(0.0, "m")}


def test_a_question_of_ones_own(judge, tmp_path):
    (tmp_path / "question.txt").write_text("{prompt} [Answer A]\n{first}\n\n[Answer B]\n{second}\n\nReply")
    server = Server(more_o)
    with serving(server) as url:
        judge(url, prompt_file=str(tmp_path / "question.txt")).outcomes(PAIRS[:1], "judging")
    assert sorted(server.requests)[0] == "p [Answer A]\noo\n\n[Answer B]\nx\n\nReply"
    (tmp_path / "question.txt").write_text("{prompt} {first}")
    with pytest.raises(ConfigError, match=r"judge.prompt_file: .* must have \{second\} in it"):
        judge(url, prompt_file=str(tmp_path / "question.txt"))
    with pytest.raises(ConfigError, match=r"judge.prompt_file: .*No such file"):
        judge(url, prompt_file=str(tmp_path / "none.txt"))
    with pytest.raises(ConfigError, match=r"judge.url: got 'localhost:1'; must begin with http"):
        JudgeConfig(url="localhost:1", model="m")
    with pytest.raises(ConfigError, match=r"judge.model: got ''; name the model"):
        JudgeConfig(url="http://localhost:1")


# ---------------------------------------------------------------- length


def by_gradient(won, features) -> np.ndarray:
    """The same posterior mode, by plain gradient ascent."""
    weights = np.zeros(2)
    for _ in range(200_000):
        wins = 1 / (1 + np.exp(-features @ weights))
        weights += 0.01 * (features.T @ (won - wins) - weights / 25)
    return weights


def test_length_control_by_gradient_ascent():
    random = np.random.default_rng(0)
    longer = random.normal(3.0, 10.0, size=60)
    won = random.choice([0.0, 0.5, 1.0], size=60)
    features = np.stack([np.ones(60), np.tanh(longer / longer.std())], axis=1)
    weights = by_gradient(won, features)
    found = length_controlled_win_rate(list(won), list(longer))
    assert found.estimate == pytest.approx(1 / (1 + math.exp(-weights[0])), abs=1e-9)
    wins = 1 / (1 + np.exp(-features @ weights))
    hessian = (features.T * (wins * (1 - wins))) @ features + np.eye(2) / 25
    half = 1.959963984540054 * math.sqrt(np.linalg.inv(hessian)[0, 0])
    assert found.low == pytest.approx(1 / (1 + math.exp(half - weights[0])), abs=1e-9)
    assert found.high == pytest.approx(1 / (1 + math.exp(-half - weights[0])), abs=1e-9)


def test_length_control_where_there_is_nothing_to_control():
    won = [1.0] * 30 + [0.0] * 10
    assert length_controlled_win_rate(won, [0.0] * 40).estimate == pytest.approx(0.75, abs=2e-3)
    assert length_controlled_win_rate([1.0] * 40, [1.0, 2.0] * 20).estimate > 0.9  # and finite
    with pytest.raises(ValueError, match="got 1 and 2"):
        length_controlled_win_rate([1.0, 0.0], [1.0])
