"""The tools that come along: arithmetic, programs with limits, search."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from async_rlhf.config import ConfigError
from async_rlhf.generation.episodes.tools import ToolEnvironment, schemas_of
from async_rlhf.tasks import tools as builtin
from async_rlhf.tasks.tools import CHARACTERS, Search, calculate, python

ONLY_ARITHMETIC = "Error: only numbers, + - * / // % ** and parentheses can be computed"
TOO_LARGE = "Error: the number is too large"


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        (" (2 + 3) * 4 ** 2 / 8 ", "10.0"),
        ("-7 // 2 % 3 - +1", "1"),
        ("2 ** -2", "0.25"),
        ("1 ** 100_000", "1"),
        ("2 ** 9999", str(2**9999)),
        ("0.1 + 0.2", "0.30000000000000004"),
        ("1 / 0", "Error: division by zero"),
        ("(-8) ** 0.5", "Error: no real number"),
        ("2 ** 10001", TOO_LARGE),
        ("9 ** 9 ** 9 ** 9", TOO_LARGE),
        ("((7 ** 3000) ** 3000) ** 3000", TOO_LARGE),
        ("2 ** 6000 * 2 ** 6000", TOO_LARGE),
        ("2.0 ** 10_000", "Error: Numerical result out of range"),
        ("1 +", "Error: no arithmetic expression: invalid syntax"),
        ("", "Error: no arithmetic expression: invalid syntax"),
        ("abs(1)", ONLY_ARITHMETIC),
        ("__import__('os')", ONLY_ARITHMETIC),
        ("'a' * 9", ONLY_ARITHMETIC),
        ("True + 1", ONLY_ARITHMETIC),
        ("2j", ONLY_ARITHMETIC),
        ("1 << 9", ONLY_ARITHMETIC),
        ("1 < 2", ONLY_ARITHMETIC),
        ("1" * 501, "Error: longer than 500 characters"),
    ],
)
def test_arithmetic(expression, value):
    before = time.perf_counter()
    assert calculate(expression) == value
    assert time.perf_counter() - before < 1


@pytest.mark.parametrize("deep", ["(" * 250 + ")" * 250, "-" * 499 + "1", "1" + "**1" * 166, "\0"])
def test_deep_expressions_end(deep):
    assert calculate(deep).startswith(("Error: ", "-1", "1"))


def test_they_are_tools():
    schemas = schemas_of([calculate, python, Search(["a"]).search])
    assert [one["function"]["name"] for one in schemas] == ["calculate", "python", "search"]
    call = {"type": "function", "function": {"name": "calculate", "arguments": {"expression": "6 * 7"}}}
    seen = asyncio.run(ToolEnvironment([calculate]).step({"tool_calls": [call]}))
    assert seen.messages == [{"role": "tool", "name": "calculate", "content": "42"}]


# Programs


def test_a_program_prints():
    assert python("import math\nprint(math.sqrt(16))\nprint(__name__)") == "4.0\n__main__"
    assert python("") == ""


def test_errors_follow_the_output():
    lines = python("print('before')\n1 / 0").splitlines()
    assert (lines[0], lines[-1]) == ("before", "ZeroDivisionError: division by zero")
    assert lines[-2] == '  File "<code>", line 2, in <module>'
    assert python("import sys\nsys.exit(3)") == "Error: exit code 3"
    assert python("import os\nos.kill(os.getpid(), 9)") in ("Error: exit code 137", "Error: exit code -9")
    assert "EOFError" in python("input()")


def test_long_output_is_cut():
    assert python("print('é' * 100_000)") == "é" * CHARACTERS + " [cut off]"
    errors = python("import sys\nfor i in range(10_000): print(i, file=sys.stderr)")
    assert errors == "Error: " + "\n".join(map(str, range(9_980, 10_000)))


def test_a_program_sees_nothing_of_ours(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "hidden")
    seen = python(
        "import os, sys\n"
        "print(os.listdir('.'), os.getcwd() == os.environ['HOME'] == os.environ['TMPDIR'])\n"
        "print(sorted(os.environ), sys.argv, '' in sys.path)\n"
        "open('kept', 'w').write(os.getcwd())"
    )
    names = ["HOME", "LANG", "OMP_NUM_THREADS", "PATH", "PYTHONHASHSEED", "TMPDIR"]
    assert seen == f"[] True\n{names} ['-c'] False"
    folder = python("import os\nprint(os.getcwd())")
    assert not Path(folder).exists()


def test_sets_have_the_same_order_in_every_run():
    program = "print({str(i) for i in range(20)})"
    assert python(program) == python(program)


def test_memory_and_files_are_limited():
    assert python("bytearray(2 ** 31)").endswith("MemoryError")
    assert "File too large" in python("open('f', 'wb').write(bytes(2 ** 25))")


def mark(number: int) -> str:
    """Seconds of sleep that no other process has."""
    return f"{4710 + number}.{os.getpid()}"


def gone(command: str) -> bool:
    """Whether they are, or soon will be: a kill takes a moment."""
    deadline = time.monotonic() + 5
    while running(command) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not running(command)


def running(command: str) -> list[str]:
    """Processes with such a command on this machine."""
    return subprocess.run(["pgrep", "-f", f"^{command}"], capture_output=True, text=True, check=False).stdout.split()


@pytest.mark.parametrize("namespaces", sorted({builtin._namespaces(), ()}))
def test_nothing_outlives_the_limit(monkeypatch, namespaces):
    monkeypatch.setattr(builtin, "SECONDS", 1)
    monkeypatch.setattr(builtin, "_namespaces", lambda: namespaces)
    before = time.perf_counter()
    program = "import os, time\nprint('in', flush=True)\n"
    if namespaces or (os.geteuid() == 0 and not builtin._can_change_user()):  # others start no process
        program += f"if os.fork() == 0: os.execvp('sleep', ['sleep', '{mark(1)}'])\n"
    assert python(program + "time.sleep(60)") == "in\nError: stopped after 1 seconds"
    assert time.perf_counter() - before < 20
    assert gone(f"sleep {mark(1)}")


needs_namespaces = pytest.mark.skipif(not builtin._namespaces(), reason="the kernel gives no namespaces here")


@needs_namespaces
def test_nothing_outlives_the_call_even_in_a_session_of_its_own():
    program = (
        f"import os\nif os.fork() == 0:\n  os.setsid()\n  os.execvp('sleep', ['sleep', '{mark(2)}'])\nprint('done')"
    )
    assert python(program) == "done"
    assert running(f"sleep {mark(2)}") == []


@needs_namespaces
def test_there_is_no_network():
    assert "unreachable" in python("import socket\nsocket.create_connection(('192.0.2.1', 80), 5)")


@needs_namespaces
def test_a_program_ends_though_its_caller_is_killed():
    source = (
        "from async_rlhf.tasks import tools as builtin\nbuiltin.SECONDS = 1\n"
        f'builtin.python(\'import os; os.execvp("sleep", ["sleep", "{mark(3)}"])\')'
    )
    caller = subprocess.Popen([sys.executable, "-c", source])
    deadline = time.monotonic() + 60
    while not running(f"sleep {mark(3)}") and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(caller.pid, signal.SIGKILL)
    caller.wait()
    assert running(f"sleep {mark(3)}")
    assert gone(f"sleep {mark(3)}")


def test_a_program_that_switches_its_alarm_off(own_user, monkeypatch):
    monkeypatch.setattr(builtin, "SECONDS", 1)
    before = time.perf_counter()
    assert python("import signal, time\nsignal.alarm(0)\ntime.sleep(60)") == "Error: stopped after 1 seconds"
    assert time.perf_counter() - before < 25


@pytest.fixture
def own_user(monkeypatch):
    """Root, with a Python that every user can read."""
    if os.geteuid() != 0 or not Path("/usr/bin/python3").exists():
        pytest.skip("takes root and a Python of the system")
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    monkeypatch.setattr(builtin, "_can_change_user", lambda: True)
    monkeypatch.setattr(builtin, "_namespaces", lambda: ())


FORKS = "import os\nfor i in range(100):\n  if os.fork() == 0: os._exit(0)"


def test_without_namespaces_a_program_starts_no_process(own_user):
    assert python("print(1)") == "1"
    assert "Resource temporarily unavailable" in python("import os\nos.fork()")


def test_a_user_for_each_call(own_user, tmp_path):
    (tmp_path / "secret").write_text("hidden")
    (tmp_path / "secret").chmod(0o600)
    assert 20_000 <= int(python("import os\nopen('f', 'w').close()\nprint(os.getuid())")) < 60_000
    for file in (tmp_path / "secret", f"/proc/{os.getpid()}/environ"):
        assert "PermissionError" in python(f"open({str(file)!r}).read()")
    assert "PermissionError" in python(f"import os\nos.kill({os.getpid()}, 0)")


def test_the_number_of_processes_is_limited(own_user, monkeypatch):
    if not shutil.which("unshare") or subprocess.run(["unshare", "--net", "--pid", "--fork", "true"]).returncode:
        pytest.skip("takes the right to make namespaces")
    command = ("unshare", "--net", "--pid", "--fork", "--kill-child")
    monkeypatch.setattr(builtin, "_namespaces", lambda: command)
    program = FORKS.replace("os._exit(0)", f"os.execvp('sleep', ['sleep', '{mark(4)}'])")
    assert "Resource temporarily unavailable" in python(program)
    assert python("import subprocess\nprint(subprocess.run('echo hi', shell=True).returncode)") == "hi\n0"
    assert running(f"sleep {mark(4)}") == []


# Search

DOCUMENTS = [
    "The cat sat on the mat.",
    "Dogs chase cats, and a cat chases mice: cat, cat, cat.",
    "Quantum chromodynamics is a theory.",
    "The dog sat.",
]


def test_better_documents_come_first():
    search = Search(DOCUMENTS).search
    assert search("quantum theory") == "[1] Quantum chromodynamics is a theory."
    assert search("cat") == f"[1] {DOCUMENTS[1]}\n\n[2] {DOCUMENTS[0]}"
    assert search("cat", k=1) == f"[1] {DOCUMENTS[1]}"
    assert search("a dog that sat", k=2).splitlines()[0] == "[1] The dog sat."
    assert search("cat dog theory", k=-5).count("[") == 1
    assert search("the cat dog theory", k=100).count("[") == 4
    assert search("CHASED") == f"[1] {DOCUMENTS[1]}"
    assert search("zebra") == "Nothing found."


@pytest.mark.parametrize(
    "query", ["", "   ", '"', "cat AND", "NOT", "text:cat*", "(cat", "NEAR(", "^", "_", "'; --", "é"]
)
def test_no_query_is_an_error(query):
    assert Search(DOCUMENTS).search(query).startswith(("[1]", "Nothing found."))


def test_operators_are_words():
    assert Search([*DOCUMENTS, "not"]).search("NOT cat", k=9).count("[") == 3
    assert Search(DOCUMENTS).search("x " * 100 + "cat").count("[") == 2
    assert Search(DOCUMENTS).search(" ".join(f"word{i}" for i in range(10_000))) == "Nothing found."


def test_equal_documents_keep_their_order_and_long_ones_are_cut():
    search = Search([f"same {i}" for i in range(5)]).search
    assert search("same") == "[1] same 0\n\n[2] same 1\n\n[3] same 2"
    assert len(Search(["long " * 9_999] * 3).search("long")) < CHARACTERS + 50


def test_search_from_several_threads():
    search = Search(DOCUMENTS).search

    async def many() -> list[str]:
        return await asyncio.gather(*(asyncio.to_thread(search, word) for word in ["theory", "mat"] * 20))

    expected = ["[1] Quantum chromodynamics is a theory.", "[1] The cat sat on the mat."]
    assert asyncio.run(many()) == expected * 20


def test_documents_of_files(tmp_path):
    lines = tmp_path / "rows.jsonl"
    lines.write_text(json.dumps({"text": "one\u2028line", "id": 3}, ensure_ascii=False) + '\n\n"two lines"\n', "utf-8")
    assert Search(lines).search("one") == "[1] one\u2028line"
    assert Search(lines).search("two") == "[1] two lines"
    text = tmp_path / "text.txt"
    text.write_text("First\nof two.\n \n\nSecond of two.\n", "utf-8")
    assert Search(str(text)).search("first") == "[1] First\nof two."
    assert Search(str(text)).search("second") == "[1] Second of two."


@pytest.mark.parametrize(
    ("name", "content", "right"),
    [
        ("a.csv", b"a", "must be the path of a .jsonl or .txt file in UTF-8"),
        ("missing.txt", None, "must be the path of a .jsonl or .txt file in UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{', "must be the path of .*Expecting property name"),
        ("a.txt", b"\xff\xfe", "must be the path of .*invalid start byte"),
        ("a.jsonl", b'{"title": "a"}', "must hold at least one text"),
        ("a.jsonl", b"3", "must hold at least one text"),
        ("a.txt", b"\n\n", "must hold at least one text"),
    ],
)
def test_files_without_documents(tmp_path, name, content, right):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"documents: got .*{name}.*; {right}"):
        Search(tmp_path / name)


@pytest.mark.parametrize("documents", [[], ["a", ""], ["a", 3]])
def test_lists_without_documents(documents):
    with pytest.raises(ConfigError, match=r"documents: got .*; must hold at least one text"):
        Search(documents)
