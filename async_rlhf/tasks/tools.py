"""Tools that come along: arithmetic, Python code, and search in documents of your own.

What :func:`python` runs was written by a model. It has limits of time, memory, file size and processes, an empty
folder, and no variables of this process. It is NOT a sandbox against an attacker:

- The network is blocked only where the command `unshare` may make namespaces: on Linux, for root or if users may make
  user namespaces. In Docker that takes `--cap-add SYS_ADMIN`. Elsewhere the code reaches the network, and can start no
  other processes or threads.
- It can read all files that its user can read, and change those that its user can change. Its user is ours, unless
  training runs as root and Python lies where every user can read it: then each call has a user of its own.
- If it runs as root, the kernel does not limit its processes. Without namespaces it can then leave one behind.
- With neither namespaces nor a user of its own, it can read the environment of this process in /proc.
- It can fill the disk with many files until its time is over.

So train with it in a container that holds nothing secret.
"""

from __future__ import annotations

import ast
import operator
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from async_rlhf.config.base import ConfigError, require
from async_rlhf.system.files import from_json

SECONDS, MEMORY_BYTES, FILE_BYTES, PROCESSES = 10, 2**30, 2**24, 64
"""The limits of :func:`python`: time of a call; memory of each process; size of each file; processes and threads."""
CHARACTERS = 4_000
"""The longest text that a tool returns; the rest is cut off."""
_ERROR_LINES = 20
_EXPRESSION, _BITS = 500, 10_000
_MOST_DOCUMENTS = 10
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str:
    """Compute an arithmetic expression of numbers, + - * / // % ** and parentheses.

    Args:
        expression: such as "(2 + 3) * 4 ** 2 / 7".

    Returns:
        The value, or what is wrong.
    """
    try:
        if len(expression) > _EXPRESSION:
            raise ValueError(f"longer than {_EXPRESSION} characters")
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except SyntaxError as error:
        return f"Error: no arithmetic expression: {error.msg}"
    except (ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        return f"Error: {error.args[-1] if error.args else type(error).__name__}"


def _value(node: ast.AST) -> int | float:
    """The value of a node; integers have at most `_BITS` bits, so nothing takes long."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            values = [_value(operand)]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            values = [_value(left), _value(right)]
        case _:
            raise ValueError("only numbers, + - * / // % ** and parentheses can be computed")
    if isinstance(op, ast.Pow) and isinstance(base := values[0], int) and isinstance(values[1], int):
        # A base of n bits is at least 2 ** (n - 1).
        _require_small((abs(base).bit_length() - 1) * values[1])
    value = _OPERATORS[type(op)](*values)
    if isinstance(value, complex):
        raise ValueError("no real number")
    _require_small(value.bit_length() if isinstance(value, int) else 0)
    return value


def _require_small(bits: int) -> None:
    if bits > _BITS:
        raise ValueError("the number is too large")


_START = """
import os, resource, signal, sys
uid, seconds, memory, size, processes = map(int, sys.argv[1:])
del sys.argv[1:]
signal.alarm(seconds)
for limit, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, size), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(limit, (most, most))
signal.signal(signal.SIGALRM, (lambda *_: os._exit(142)) if os.getpid() == 1 else signal.SIG_DFL)
if os.getpid() == 1 and (child := os.fork()):
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(code if code >= 0 else 128 - code)
if uid:
    os.chown(".", uid, uid)
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
exec(compile(sys.stdin.buffer.read(), "<code>", "exec"), {"__name__": "__main__"})
"""
"""Limits what runs in it. The first process of a namespace only waits: when it ends, the kernel ends all others,
before `unshare` returns. The alarm goes off even if the caller has died."""
_LATE = (-signal.SIGALRM, 128 + signal.SIGALRM)

_ENVIRONMENT = {"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


def python(code: str) -> str:
    """Run a Python program in an empty folder, and see what it prints.

    Args:
        code: the program. Only what it prints is returned.

    Returns:
        Its output, and the end of its errors.
    """
    uid = 20_000 + threading.get_native_id() % 40_000 if _can_change_user() else 0
    namespaces = _namespaces()
    limits = (uid, SECONDS, MEMORY_BYTES, FILE_BYTES, PROCESSES if namespaces else 0)
    # -sP is -I, but for PYTHONHASHSEED: sets have the same order in every run.
    command = [*namespaces, sys.executable, "-sP", "-c", _START, *map(str, limits)]
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
    ):
        environment = _ENVIRONMENT | {"HOME": folder, "TMPDIR": folder}
        files: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": output, "stderr": errors}
        process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **files)
        late = True
        try:
            process.communicate(code.encode(), timeout=SECONDS + 5)
            late = process.returncode in _LATE
        except subprocess.TimeoutExpired:
            pass  # it has switched its alarm off
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        output.seek(0)
        said = _cut(output.read(4 * CHARACTERS + 4).decode(errors="replace"), CHARACTERS)
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - CHARACTERS))
        lines = errors.read().decode(errors="replace").strip().splitlines()
        problem = "\n".join(lines[-_ERROR_LINES:]) or (f"exit code {process.returncode}" if process.returncode else "")
        problem = f"stopped after {SECONDS} seconds" if late else problem
        return "\n".join(part for part in (said.rstrip("\n"), problem and f"Error: {problem}") if part)


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else f"{text[:characters]} [cut off]"


@cache
def _can_change_user() -> bool:
    """Whether a call can have a user of its own, which then needs to read Python."""
    return os.geteuid() == 0 and all(folder.stat().st_mode & 1 for folder in Path(os.__file__).resolve().parents)


@cache
def _namespaces() -> tuple[str, ...]:
    """The command that gives processes a network and process numbers of their own; empty where that is not allowed."""
    user = () if _can_change_user() else ("--user",)
    command = ("unshare", *user, "--net", "--pid", "--fork", "--kill-child")
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run([*command, "true"], check=True, capture_output=True, timeout=10)
        return command
    return ()


class Search:
    """Search in documents, by words and bm25; its method `search` is the tool. One object serves all episodes.

    Args:
        documents: texts; or a .jsonl file whose lines are texts or objects with "text"; or a .txt file, in which
            empty lines separate documents.

    Raises:
        ConfigError: there is no such file, or it has no documents of that form.
    """

    def __init__(self, documents: Sequence[str] | str | Path) -> None:
        texts = _read(Path(documents)) if isinstance(documents, (str, Path)) else list(documents)
        good = bool(texts) and all(isinstance(text, str) and text for text in texts)
        rule = 'must hold at least one text, in a .jsonl line as "..." or {"text": "..."}'
        require(good, "documents", documents, rule)
        self._lock = threading.Lock()  # tools are called in threads
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        self._index.execute("CREATE VIRTUAL TABLE documents USING fts5(text, tokenize='porter unicode61')")
        self._index.executemany("INSERT INTO documents VALUES (?)", [(text,) for text in texts])

    def search(self, query: str, k: int = 3) -> str:
        """Find the documents that fit a query best.

        Args:
            query: some words; documents with more of them, and with rarer ones, come first.
            k: how many documents to return.

        Returns:
            The documents, or a note that none has any of the words.
        """
        words = list(dict.fromkeys(re.findall(r"\w+", query)))
        most = max(1, min(k, _MOST_DOCUMENTS))
        with self._lock:  # quoted, a word cannot be an operator of the query language
            rows = self._index.execute(
                "SELECT text FROM documents WHERE documents MATCH ? ORDER BY bm25(documents), rowid LIMIT ?",
                (" OR ".join(f'"{word}"' for word in words) or '""', most),
            ).fetchall()
        parts = [f"[{i}] {_cut(text, CHARACTERS // len(rows))}" for i, (text,) in enumerate(rows, 1)]
        return "\n\n".join(parts) or "Nothing found."


def _read(path: Path) -> list[Any]:
    rule = "must be the path of a .jsonl or .txt file in UTF-8"
    require(path.suffix in (".jsonl", ".txt") and path.is_file(), "documents", str(path), rule)
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".txt":
            return [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
        rows = [from_json(line) for line in text.split("\n") if line.strip()]
    except ValueError as error:  # of JSON or UTF-8
        raise ConfigError(f"documents: got {str(path)!r}; {rule}: {error}") from error
    return [row.get("text") if isinstance(row, dict) else row for row in rows]
