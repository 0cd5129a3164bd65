"""What people are asked, what counts as an answer, which batch is next; the page, the interface, and the exports."""

from __future__ import annotations

import errno
import itertools
import json
import random
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from annotators import say
from browser import browser
from tiny import byte_tokenizer, json_rows, new_args, rare_unless

from async_rlhf.cli import main
from async_rlhf.config import ConfigError, FeedbackConfig
from async_rlhf.run.feedback import ANSWERS, QUESTIONS, Answers, Feedback, Question, fingerprint, read_labels
from async_rlhf.run.schedule import RolloutSchedule, version_for
from async_rlhf.studies.feedback.people import (
    People,
    WrongAnswerError,
    agreement,
    krippendorff,
    label_studio_tasks,
    said_by_all,
    shown_order,
)
from async_rlhf.studies.feedback.server import make_server
from async_rlhf.system.trace import Trace
from async_rlhf.types import Batch, Group, Labels, Prompt, Sample

TOKENIZER = byte_tokenizer()
NOTHING = {"batch_size": 1}


def group(*texts: str, draw: int = 0, prompt="Say:") -> Group:
    samples = [
        Sample.answer((1,), [*TOKENIZER.encode(text), 256], [0.0] * (len(text) + 1), [0] * (len(text) + 1), "stop")
        for text in texts
    ]
    return Group(Prompt(draw, draw, (1,), {"query": prompt}), tuple(samples))


def feedback(folder: Path, staleness=1, prompts=1, recorded=None, **keys) -> Feedback:
    config = FeedbackConfig(**{"ask": "compare", **keys})
    return Feedback(config, folder, staleness, prompts, TOKENIZER, "query", recorded or {})


def batch(index: int, *groups: Group) -> Batch:
    return Batch(index, 0, groups, 0.0)


def open_now(folder: Path) -> list[Question]:
    return [Question.of(json.loads(line)) for line in (folder / QUESTIONS).read_text().splitlines()]


# ---------------------------------------------------------------- questions and answers


def test_the_reward_is_the_share_of_the_others_that_a_completion_beats(tmp_path):
    one = feedback(tmp_path, answers=2)
    waiting = {1: batch(1, group("a", "b", "a"))}
    assert one.next(1, waiting) is None
    asked = open_now(tmp_path)
    assert [q.completions for q in asked] == [("a", "b"), ("b", "a")]  # equal texts are no question
    say(tmp_path, asked[0], 0, "ada")
    say(tmp_path, asked[0], "tie", "bob")
    say(tmp_path, asked[1], 0, "ada")
    assert one.next(1, waiting) is None  # two have to answer each
    say(tmp_path, asked[1], 1, "ada")  # changes her mind
    say(tmp_path, asked[1], 1, "bob")
    labels = one.next(1, waiting)
    # a against b: 3/4; b against a: 0; a against a: 1/2.
    assert labels is not None
    assert labels.rewards_PK == ((0.625, 0.125, 0.75),)
    assert open_now(tmp_path) == []


def test_stars_become_rewards_from_0_to_1(tmp_path):
    one = feedback(tmp_path, ask="rate")
    waiting = {1: batch(1, group("a", "b"))}
    assert one.next(1, waiting) is None
    for question, stars in zip(open_now(tmp_path), (1, 4), strict=True):
        say(tmp_path, question, stars)
    assert one.next(1, waiting).rewards_PK == ((0.0, 0.75),)


def test_completions_that_are_all_the_same_need_nobody(tmp_path):
    assert feedback(tmp_path).next(1, {1: batch(1, group("a", "a"))}).rewards_PK == ((0.5, 0.5),)


def test_a_chat_is_shown_as_one(tmp_path):
    one = feedback(tmp_path)
    one.next(1, {1: batch(1, group("a", "b", prompt=[{"role": "user", "content": "Hello?"}]))})
    assert open_now(tmp_path)[0].prompt == "user: Hello?"


@pytest.mark.parametrize(
    "line", ["{", "[]", "3", '{"id": 1}', "null", '"x"', "[" * 5000, '{"id": [], "annotator": 1, "answer": 0}']
)
def test_lines_that_are_no_answers_are_passed_over(tmp_path, caplog, line):
    question = Question("compare", "p", ("a", "b"))
    path = tmp_path / ANSWERS
    path.parent.mkdir()
    path.write_text(f"{line}\n")
    say(tmp_path, question, 1)
    answers = Answers(path)
    answers.refresh()
    assert answers.of(question) == {"ada": 1}
    assert "line 1" in caplog.text


def test_half_a_line_is_read_when_it_is_whole(tmp_path):
    question = Question("rate", "p", ("a",))
    path = tmp_path / ANSWERS
    path.parent.mkdir()
    text = json.dumps({"id": question.id, "annotator": "ada", "answer": 3}) + "\n"
    answers = Answers(path)
    answers.refresh()
    for end in (10, len(text)):
        path.write_text(text[:end])
        answers.refresh()
        assert answers.of(question) == ({} if end == 10 else {"ada": 3})


@pytest.mark.parametrize("said", [2, -1, True, "first", None, 0.0, [0]])
def test_what_cannot_be_an_answer_does_not_count(tmp_path, caplog, said):
    question = Question("compare", "p", ("a", "b"))
    say_anything(tmp_path, question, said)
    answers = Answers(tmp_path / ANSWERS)
    answers.refresh()
    for _ in range(2):
        assert answers.missing([question]) == [question]
    assert caplog.text.count('must be 0, 1 or "tie"') == 1
    with pytest.raises(WrongAnswerError, match="must be 0, 1"):
        asking(tmp_path, question).answer({"id": question.id, "annotator": "ada", "answer": said})


def test_what_cannot_be_an_answer_leaves_the_one_before(tmp_path):
    question = Question("compare", "p", ("a", "b"))
    for said in (1, "0"):
        say_anything(tmp_path, question, said)
    answers = Answers(tmp_path / ANSWERS)
    answers.refresh()
    assert answers.of(question) == {"ada": 1}
    (tmp_path / ANSWERS).write_text("")  # by hand
    answers.refresh()
    assert answers.of(question) == {}


def say_anything(folder: Path, question: Question, said: object) -> None:
    (folder / ANSWERS).parent.mkdir(exist_ok=True)
    say(folder, question, said)


# ---------------------------------------------------------------- which batch is next


@pytest.mark.parametrize(
    ("staleness", "max_lag"), rare_unless(lambda i: i in (1, 6, 11), itertools.product([0, 1, 2], [2, 3, 5, None]))
)
def test_every_batch_is_trained_on_once_never_too_old_and_the_oldest_labelled_one_first(tmp_path, staleness, max_lag):
    """Random people: at each look some batches get their labels."""
    drawn = random.Random(staleness)
    for number in range(20):
        folder = tmp_path / str(number)
        one = feedback(folder, staleness=staleness, max_lag=max_lag)
        labelled: set[int] = set()
        waiting: dict[int, Batch] = {}
        trained = []
        for step in range(1, 13):
            last = min(step + staleness, 12)
            waiting |= {i: batch(i, group(f"a{i}", "b")) for i in range(1, last + 1) if i not in {*waiting, *trained}}
            while (labels := one.next(step, waiting)) is None:
                for question in open_now(folder):
                    if drawn.random() < 0.3:
                        say(folder, question, 0)
                        labelled.add(question.batch)
            took = labels.sampled_as
            trained.append(took)
            lag = step - 1 - version_for(took, staleness)
            assert max_lag is None or lag <= max_lag
            assert labels.rewards_PK == (((1.0, 0.0),) if took in labelled else ((None, None),))
            older = [i for i in waiting if i < took and i in labelled]
            if max_lag is None:
                assert took in labelled
                assert not older
            del waiting[took]
        assert sorted(trained) == list(range(1, 13))


def test_a_batch_that_is_still_being_sampled_is_not_taken(tmp_path):
    one = feedback(tmp_path, prompts=2)
    one.arrived(1, 1, [group("a", "b")])
    assert one.next(1, {1: None, 2: None}) is None
    assert open_now(tmp_path) == []
    one.arrived(1, 0, [group("c", "c")])
    say(tmp_path, open_now(tmp_path)[0], 0)
    assert one.next(1, {1: None, 2: None}) is None  # to be collected, which checks it
    sampled = batch(1, group("c", "c"), group("a", "b"))
    assert one.next(1, {1: sampled, 2: None}).rewards_PK == ((0.5, 0.5), (1.0, 0.0))
    assert [q.completions for q in open_now(tmp_path)] == []
    one.arrived(1, 1, [group("a", "b")])  # of a run that goes on, and has been there
    assert open_now(tmp_path) == []


def test_labels_are_taken_for_the_completions_that_got_them_alone(tmp_path, caplog):
    labelled = batch(1, group("a", "b"))
    recorded = {1: Labels(1, ((1.0, 0.0),), fingerprint(labelled), is_logged=True), 2: Labels(2, ((0.0, 1.0),), "?")}
    one = feedback(tmp_path / "1", recorded=recorded)
    assert one.next(1, {1: None, 2: None}) is None
    assert one.next(1, {1: labelled, 2: None}) == recorded[1]
    other = feedback(tmp_path / "2", recorded=recorded)
    assert other.next(1, {1: batch(1, group("a", "c")), 2: None}) is None
    assert "batch 1 was labelled with other completions; people are asked again" in caplog.text
    assert [question.completions for question in open_now(tmp_path / "2")] == [("a", "c")]
    replayed = feedback(tmp_path / "3", recorded=recorded, labels_from="feedback.jsonl")
    with pytest.raises(RuntimeError, match="has labels of other completions for batch 1"):
        replayed.next(1, {1: batch(1, group("a", "c"))})
    with pytest.raises(RuntimeError, match="has no labels for batch 3"):
        replayed.next(3, {3: batch(3, group("a", "c"))})


def test_a_batch_that_was_trained_on_otherwise_ends_what_followed_it(tmp_path):
    rows = [(1, 1), (2, 3), (3, 2), (2, 2)]
    lines = [{"batch": b, "sampled_as": n, "completions": "x", "labels": [[n, 0]]} for b, n in rows]
    (tmp_path / "feedback.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"bat')
    assert read_labels(tmp_path / "feedback.jsonl") == {1: Labels(1, ((1, 0),), "x"), 2: Labels(2, ((2, 0),), "x")}


def test_a_run_that_is_made_longer_asks_for_the_batches_that_it_had_not():
    """At the end of the shorter one, fewer than S + 1 were under way."""
    asked: list[int] = []
    generator = SimpleNamespace(
        at_once=False,
        publish=lambda policy, version: None,
        submit=lambda index, version, prompts: asked.append(index),
        collect=lambda index: batch(index),
    )
    said = iter(range(7, 13))
    schedule = RolloutSchedule(
        generator, SimpleNamespace(batch=lambda index, size: ()), batch_size=1, num_batches=12, staleness=2,
        trace=Trace(), start=6, is_main=False, labelled=lambda step, waiting: Labels(next(said), ()),
    )  # fmt: skip
    schedule.publish(None, 6)
    for each in schedule:
        schedule.publish(None, each.index)
    assert asked == [7, 8, 9, 10, 11, 12]


def test_questions_that_could_not_be_written_are_written_later(tmp_path, monkeypatch, caplog):
    """As a batch arrives there is nobody to tell; where it is collected, the run is told."""
    one = feedback(tmp_path)
    full = OSError(errno.ENOSPC, "No space left on device")

    def fails(path, text):
        raise full

    with monkeypatch.context() as patch:
        patch.setattr("async_rlhf.run.feedback.write_file", fails)
        one.arrived(1, 0, [group("a", "b")])
        with pytest.raises(OSError, match="No space left"):
            one.next(1, {1: batch(1, group("a", "b"))})
    again = feedback(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("async_rlhf.run.feedback.write_file", fails)
        again.arrived(1, 0, [group("a", "b")])
    assert open_now(tmp_path) == []
    assert again.next(1, {1: batch(1, group("a", "b"))}) is None
    assert [question.completions for question in open_now(tmp_path)] == [("a", "b")]


def test_it_says_once_who_is_waited_for(tmp_path, caplog):
    caplog.set_level("INFO")
    one = feedback(tmp_path)
    for _ in range(3):
        one.next(1, {1: batch(1, group("a", "b"))})
    assert caplog.text.count("batch 1 waits for people: 1 of 1 questions have no answer yet") == 1


def test_a_file_that_is_none_of_a_run_is_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"batch": 1}\n')
    with pytest.raises(ConfigError, match=r"feedback\.labels_from: got .*must be the feedback\.jsonl of a run"):
        read_labels(tmp_path / "x.jsonl")


@pytest.mark.parametrize(
    ("keys", "changes", "told"),
    [
        ({"answers": 2}, {}, r"feedback\.answers: got 2; must be left out without feedback\.ask"),
        ({"max_lag": 2}, {}, r"feedback\.max_lag: got 2; must be left out"),
        (
            {"ask": "compare"},
            {"algorithm": "ppo", "samples_per_prompt": 1},
            "samples_per_prompt: got 1; must be at least 2",
        ),
        ({"ask": "rate", "max_lag": 1}, {"staleness": 2}, r"feedback\.max_lag: got 1; must be at least the staleness"),
        ({"ask": "rate"}, {"staleness": 1, "staleness_mode": "bounded"}, 'staleness_mode: got .*must be "exact"'),
        ({"ask": "stars"}, {}, r"ask: got 'stars'; must be one of 'compare', 'rate' or null"),
    ],
)
def test_what_cannot_be_asked_is_refused(tmp_path, keys, changes, told):
    with pytest.raises(ConfigError, match=told):
        new_args(tmp_path, feedback=FeedbackConfig(**keys), **changes)


def test_held_out_prompts_need_another_reward(capsys):
    words = ["--model", "m", "--data.train", "p.jsonl", "--data.eval", "q.jsonl", "--train.feedback.ask", "compare"]
    assert run_command(*words, "--dry-run", command="train") == 2
    assert "about which nobody is asked" in capsys.readouterr().err
    assert run_command(*words[:4], *words[6:], "--train.total_episodes", "80", "--dry-run", command="train") == 0


# ---------------------------------------------------------------- people


def asking(folder: Path, *questions: Question) -> People:
    (folder / QUESTIONS).parent.mkdir(exist_ok=True)
    (folder / QUESTIONS).write_text("".join(json.dumps(question.row()) + "\n" for question in questions))
    return People(folder)


COMPARED = [Question("compare", f"p{i}", (f"a{i}", f"b{i}"), 2, i) for i in range(1, 4)]


def test_each_person_gets_each_question_once_until_enough_have_answered(tmp_path):
    people = asking(tmp_path, *COMPARED)
    seen = []
    while (found := people.next("ada"))[0] is not None:
        seen.append(found[0])
        people.answer({"id": found[0].id, "annotator": "ada", "answer": 0})
    assert seen == COMPARED
    people.answer({"id": COMPARED[0].id, "annotator": "bob", "answer": "tie"})
    assert people.next("carl") == (COMPARED[1], 2)
    assert people.next("carl", [COMPARED[1].id]) == (COMPARED[2], 2)
    assert people.next("carl", [q.id for q in COMPARED]) == (COMPARED[1], 2)
    assert people.open() == COMPARED[1:]


def test_somebody_may_still_answer_what_is_no_longer_asked(tmp_path):
    people = asking(tmp_path, *COMPARED)
    people.open()
    (tmp_path / QUESTIONS).write_text("")
    people.answer({"id": COMPARED[0].id, "annotator": "ada", "answer": 1})
    assert [(q.prompt, who, said) for q, who, said in said_by_all(tmp_path)] == [("p1", "ada", 1)]


def test_an_answer_is_whole_behind_a_line_that_was_cut_off(tmp_path):
    people = asking(tmp_path, *COMPARED)
    (tmp_path / ANSWERS).write_text('{"id": "x", "ann')
    people.answer({"id": COMPARED[0].id, "annotator": "ada", "answer": 1})
    people.answer({"id": COMPARED[1].id, "annotator": "ada", "answer": 0})
    assert [(q.prompt, said) for q, _, said in said_by_all(tmp_path)] == [("p1", 1), ("p2", 0)]


def test_answers_of_other_tools_are_exported_when_their_batch_is_long_trained_on(tmp_path):
    one = feedback(tmp_path)
    waiting = {1: batch(1, group("a", "b"))}
    one.next(1, waiting)
    say(tmp_path, open_now(tmp_path)[0], 1)
    with (tmp_path / ANSWERS).open("ab") as file:
        for line in (
            b"[" * 5000,
            b"\xff",
            b'{"id": [1]}',
            b'{"id": "x", "annotator": "a", "answer": 1, "completions": 3}',
        ):
            file.write(line + b"\n")
    assert one.next(1, waiting) is not None
    assert [(q.completions, who, said) for q, who, said in said_by_all(tmp_path)] == [(("a", "b"), "ada", 1)]


@pytest.mark.parametrize("text", ["half \ud83d", "line\u2028separator", "gr\u00fc\u00dfe"])
def test_any_text_is_exported(tmp_path, text):
    people = asking(tmp_path, Question("compare", text, ("a", "b")))
    people.answer({"id": people.open()[0].id, "annotator": "ada", "answer": 1})
    assert run_command(tmp_path, "--export", tmp_path / "out") == 0
    (line,) = (tmp_path / "out").read_bytes().split(b"\n")[:-1]
    assert json.loads(line)["prompt"] == text


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ([], "must be an object"),
        ({"annotator": " ", "id": COMPARED[0].id, "answer": 0}, "annotator: got ' '"),
        ({"annotator": "x" * 101, "id": COMPARED[0].id, "answer": 0}, "annotator"),
        ({"annotator": "ada", "id": "no", "answer": 0}, "id: got 'no'; must be that of a question"),
    ],
)
def test_answers_to_nothing_are_refused(tmp_path, row, told):
    people = asking(tmp_path, *COMPARED)
    with pytest.raises(WrongAnswerError, match=told):
        people.answer(row)
    assert not (tmp_path / ANSWERS).exists()


def test_neither_place_is_shown_first_more_often():
    first = [shown_order(Question("compare", str(i), ("a", "b")), "ada")[0] for i in range(400)]
    assert 150 < sum(first) < 250
    assert shown_order(Question("rate", "p", ("a",)), "ada") == [0]


def test_alpha_is_that_of_the_textbook():
    """Krippendorff (2011), "Computing Krippendorff's Alpha-Reliability", example C: nominal 0.743, interval 0.849."""
    rows = "111 2232 3333 3333 2222 1234 4444 1121 2222 555 11 3"
    units = [[float(value) for value in row] for row in rows.split()]
    assert krippendorff(units, lambda a, b: float(a != b)) == pytest.approx(0.743, abs=5e-4)
    assert krippendorff(units, lambda a, b: (a - b) ** 2) == pytest.approx(0.849, abs=5e-4)


def test_the_agreement_is_told_in_one_line(tmp_path):
    people = asking(tmp_path, *COMPARED)
    for question, mine, theirs in zip(COMPARED, (0, 1, "tie"), (0, 1, 1), strict=True):
        people.answer({"id": question.id, "annotator": "ada", "answer": mine})
        people.answer({"id": question.id, "annotator": "bob", "answer": theirs})
    told = agreement(said_by_all(tmp_path))
    assert told.startswith(
        "6 answers by ada, bob to 3 questions; of 3 pairs of answers to one question 67% are the same"
    )
    assert "no question was answered by two" in agreement(said_by_all(tmp_path)[:1])


# ---------------------------------------------------------------- exports


def run_command(*words: object, command: str = "feedback") -> int:
    with pytest.raises(SystemExit) as ended:
        main([command, *map(str, words)])
    return int(ended.value.code)


def test_exports(tmp_path, capsys):
    people = asking(tmp_path, *COMPARED, Question("rate", "q", ("c",), 1, 4))
    for question, said in zip(COMPARED, (0, 1, "tie"), strict=True):
        people.answer({"id": question.id, "annotator": "ada", "answer": said})
    people.answer({"id": Question("rate", "q", ("c",)).id, "annotator": "ada", "answer": 4})
    out = tmp_path / "out"
    assert run_command(tmp_path, "--export", out) == 0
    assert json_rows(out) == [
        {"prompt": "p1", "chosen": "a1", "rejected": "b1"},
        {"prompt": "p2", "chosen": "b2", "rejected": "a2"},
    ]
    assert run_command(tmp_path, "--export", out) == 2
    assert "is there already; set overwrite" in capsys.readouterr().err
    assert run_command(tmp_path, "--export", out, "--format", "ratings", "--overwrite", "true") == 0
    assert json.loads(out.read_text()) == {"prompt": "q", "completion": "c", "score": 4}
    assert run_command(tmp_path, "--export", out, "--format", "label_studio", "--overwrite", "true") == 0
    tasks = json.loads(out.read_text())
    assert tasks == label_studio_tasks(said_by_all(tmp_path))
    assert [task["data"]["prompt"] for task in tasks] == ["p1", "p2", "p3", "q"]
    assert tasks[0]["data"] == {
        "question": COMPARED[0].id,
        "prompt": "p1",
        "annotators": ["ada"],
        "first": "a1",
        "second": "b1",
    }
    (first,) = tasks[0]["annotations"]
    assert first["result"][0]["type"] == "pairwise"
    assert first["result"][0]["value"] == {"selected": "left"}
    assert tasks[2]["annotations"][0]["result"] == []
    assert tasks[3]["annotations"][0]["result"][0]["value"] == {"rating": 4}


def test_the_command_refuses_what_it_cannot_do(tmp_path, capsys):
    assert run_command(tmp_path) == 2
    assert "must be the output folder of a run with train.feedback.ask" in capsys.readouterr().err
    asking(tmp_path, *COMPARED)
    assert run_command(tmp_path, "--export", tmp_path / "x") == 2
    assert "of 0 answers none is of this kind" in capsys.readouterr().err
    server = make_server(People(tmp_path), "127.0.0.1", 0, "t")
    with server:
        assert run_command(tmp_path, "--port", server.server_address[1]) == 2
    assert "cannot be listened on there" in capsys.readouterr().err


def test_the_token_is_not_printed_with_the_configuration(tmp_path, capsys):
    assert run_command(tmp_path, "--token", "hunter2", "--dry-run") == 0
    assert "hunter2" not in capsys.readouterr().out


# ---------------------------------------------------------------- the server and its page


@contextmanager
def serving(people: People):
    server = make_server(people, "127.0.0.1", 0, "secret")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ask(url: str, body: bytes | None = None, **headers: str) -> SimpleNamespace:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=10) as reply:
            return SimpleNamespace(status=reply.status, text=reply.read().decode(), headers=reply.headers)
    except urllib.error.HTTPError as error:
        return SimpleNamespace(status=error.code, text=error.read().decode(), headers=error.headers)


BEARER = {"Authorization": "Bearer secret"}


def test_the_interface_for_other_tools(tmp_path):
    with serving(asking(tmp_path, *COMPARED)) as url:
        assert json.loads(ask(f"{url}/api/questions", **BEARER).text) == [question.row() for question in COMPARED]
        found = json.loads(ask(f"{url}/api/question?annotator=ada&token=secret").text)
        assert found["question"]["id"] == COMPARED[0].id
        assert sorted(found["question"]["order"]) == [0, 1]
        assert found["left"] == 3
        body = json.dumps({"id": COMPARED[0].id, "annotator": "ada", "answer": 1}).encode()
        assert ask(f"{url}/api/answers", body, **BEARER).status == 200
        assert json.loads(ask(f"{url}/api/question?annotator=ada", **BEARER).text)["left"] == 2
        for wrong in (b"{", b"[" * 60_000, b'{"id": 3}', b"\xff"):
            assert ask(f"{url}/api/answers", wrong, **BEARER).status == 400
        assert ask(f"{url}/api/answers", b"x" * 70_000, **BEARER).status == 413
        assert ask(f"{url}/api/other", **BEARER).status == 404
        assert ask(f"{url}/api/question", **BEARER).status == 404
        assert ask(f"{url}/other", b"{}", **BEARER).status == 404
    (row,) = json_rows(tmp_path / ANSWERS)
    assert (row["annotator"], row["answer"], row["completions"]) == ("ada", 1, ["a1", "b1"])


def test_strangers_get_nothing(tmp_path):
    with serving(asking(tmp_path, *COMPARED)) as url:
        for place, body in itertools.product(["/", "/api/questions", "/api/answers"], [None, b"{}"]):
            for headers, query in (
                ({}, ""),
                ({"Authorization": "Bearer Secret"}, ""),
                ({}, "?token="),
                ({}, "?token=ö"),
            ):
                found = ask(f"{url}{place}{query.replace('ö', '%C3%B6')}", body, **headers)
                assert found.status == 401
                assert "p1" not in found.text
    assert not (tmp_path / ANSWERS).exists()


def test_two_people_in_browsers(tmp_path):
    """Keys, places, texts that are markup, a second opinion, and what comes later."""
    mean = Question("compare", "<b>p</b>", ("<img src=x onerror=alert(1)>", "second\n  line"), 1, 4)
    people = asking(tmp_path, COMPARED[0], mean)
    with serving(people) as url, browser() as page:
        page.call("Page.navigate", url=f"{url}/?token=secret")
        page.wait_for("!document.getElementById('who')?.hidden")
        page.run("document.getElementById('name').value = 'ada'; document.querySelector('#who button').click()")
        page.wait_for(f"document.getElementById('question').dataset.id === '{COMPARED[0].id}'")
        shown = page.run("[...document.querySelectorAll('#answers .text')].map(e => e.textContent)")
        assert shown == [COMPARED[0].completions[number] for number in shown_order(COMPARED[0], "ada")]
        press(page, "2")  # the one that is shown second
        page.wait_for(f"document.getElementById('question').dataset.id === '{mean.id}'")
        assert page.run("document.getElementById('prompt').textContent") == "<b>p</b>"
        assert set(page.run("[...document.querySelectorAll('#answers .text')].map(e => e.textContent)")) == set(
            mean.completions
        )
        assert page.run("document.querySelectorAll('#answers img').length") == 0
        press(page, "b")  # back, and the other way round
        page.wait_for(f"document.getElementById('question').dataset.id === '{COMPARED[0].id}'")
        press(page, "1")
        page.wait_for(f"document.getElementById('question').dataset.id === '{mean.id}'")
        held = {"type": "keyDown", "key": "1", "text": "1", "autoRepeat": True}
        page.call("Input.dispatchKeyEvent", **held)  # a key that is held down answers one question
        assert page.run("document.getElementById('question').dataset.id") == mean.id
        press(page, "0")
        page.wait_for("document.getElementById('question').hidden")
        assert "Nothing to answer" in page.run("document.getElementById('told').textContent")
        rating = Question("rate", "stars", ("c",), 1, 5)
        asking(tmp_path, rating)
        page.wait_for(f"document.querySelector('#question:not([hidden])')?.dataset.id === '{rating.id}'")
        press(page, "4")
        page.wait_for("document.getElementById('question').hidden")
        assert page.errors == []
    first = COMPARED[0].completions.index(shown[0])
    assert {(q.prompt, who): said for q, who, said in said_by_all(tmp_path)} == {
        ("p1", "ada"): first, ("<b>p</b>", "ada"): "tie", ("stars", "ada"): 4,
    }  # fmt: skip


def press(page, key: str) -> None:
    page.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=key)
    page.call("Input.dispatchKeyEvent", type="keyUp", key=key)
