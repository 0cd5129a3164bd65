"""The lock on a folder: one living process at a time, whatever has happened to the others."""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from async_rlhf.system import lock
from async_rlhf.system.lock import InUseError, hold, refuse_in_use

PROGRAM = Path(__file__).parents[1] / "contract" / "holder.py"


@pytest.fixture
def path(tmp_path):
    return tmp_path / ".run.lock"


@pytest.fixture
def start(path):
    """Starts processes that hold the lock, and says what they said."""
    started = []

    def begin(*words: str) -> tuple[subprocess.Popen[str], str]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen([sys.executable, PROGRAM, path, *words], **pipes)
        started.append(process)
        return process, process.stdout.readline().strip()

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def take(path):
    return hold(path, "output_dir", path.parent)


def test_a_second_process_is_refused_and_changes_nothing(path, start):
    process, said = start()
    assert said == "held"
    before = (path.read_bytes(), path.parent.stat().st_mtime_ns, os.listdir(path.parent))
    words = rf"output_dir: got .*; process {process.pid} on host '{socket.gethostname()}' is writing there; must be"
    with pytest.raises(InUseError, match=words):
        take(path)
    assert (path.read_bytes(), path.parent.stat().st_mtime_ns, os.listdir(path.parent)) == before
    process.communicate("\n")
    assert not path.exists()
    take(path).release()


def test_a_killed_holder_is_followed_at_once(path, start):
    process, _ = start()
    process.kill()
    with take(path) as held:  # while nobody has waited for the process
        held.require()
        assert json.loads(path.read_text())["pid"] == os.getpid()
    process.wait()
    assert os.listdir(path.parent) == []


def test_a_stopped_holder_is_alive(path, start):
    process, _ = start()
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(InUseError, match=f"process {process.pid}"):
        take(path)


def test_forks_neither_release_nor_inherit(path, start):
    process, said = start("fork")
    assert said == "held"
    assert json.loads(path.read_text())["pid"] == process.pid
    with take(path.with_name("mine")) as mine:
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        child = context.Process(target=_try_to_take, args=(path.with_name("mine"), queue))
        child.start()
        assert f"process {os.getpid()} on host" in queue.get()
        child.join()
        mine.require()


def test_a_fork_that_outlives_a_killed_holder_does_not_keep_its_lock(path, start, monkeypatch):
    monkeypatch.setattr(lock, "_ENDING_SECONDS", 10.0)
    process, said = start("outlived")
    assert said == "held"
    process.kill()
    take(path).release()


def test_a_file_that_its_last_holder_deletes_meanwhile_is_made_anew(path, monkeypatch):
    """Between opening and locking it: a lock on a file without a name would keep nobody out."""
    lock_it = fcntl.flock

    def delete_first(*arguments):
        monkeypatch.setattr(fcntl, "flock", lock_it)
        path.unlink()
        lock_it(*arguments)

    monkeypatch.setattr(fcntl, "flock", delete_first)
    with take(path) as held:
        held.require()
        assert (
            "is writing there" in subprocess.run([sys.executable, PROGRAM, path], capture_output=True, text=True).stdout
        )


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("seen", [True, False])
def test_folders_that_their_last_holder_deletes_meanwhile_are_made_anew(tmp_path, monkeypatch, times, seen):
    """Between making and using them, or while it is seen that they are there."""
    inner, make, left = tmp_path / "a" / "b" / ".run.lock", Path.mkdir, [None] * times

    def deleted(self, *arguments, **known):
        make(self, *arguments, **known)
        if self == inner.parent and left:
            left.pop()
            shutil.rmtree(tmp_path / "a" if times > 1 else inner.parent)
            if seen:
                raise FileExistsError(errno.EEXIST, "File exists", str(self))

    monkeypatch.setattr(Path, "mkdir", deleted)
    with take(inner) as held:
        held.require()
        assert json.loads(inner.read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_place_of_the_folder_is_said(tmp_path):
    (tmp_path / "a").write_text("")
    with pytest.raises((FileExistsError, NotADirectoryError)):
        take(tmp_path / "a" / ".run.lock")


def _try_to_take(path, queue):
    try:
        take(path)
        queue.put("taken")
    except InUseError as error:
        queue.put(str(error))


def test_a_process_may_hold_it_twice_but_be_there_once(path):
    first, second = take(path), take(path)
    with first.alone(), pytest.raises(InUseError), second.alone():
        pass
    first.release()
    first.release()
    second.require()
    del second
    gc.collect()
    assert not path.exists()


def test_folders_are_made_and_deleted_again_if_they_stay_empty(tmp_path):
    inner = tmp_path / "a" / "b" / ".run.lock"
    held = take(inner)
    assert inner.exists()
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_nobody_holds_is_taken(path):
    for left in ("", "[]", '{"host": "elsewhere", "pid": 1}'):
        path.write_text(left)
        refuse_in_use(path, "output_dir", path.parent)
        take(path).release()
        assert not path.exists()


def test_looking_changes_nothing_and_hinders_nobody(path, start):
    refuse_in_use(path, "output_dir", path.parent)
    assert os.listdir(path.parent) == []
    process, _ = start()
    with pytest.raises(InUseError, match=f"process {process.pid}"):
        refuse_in_use(path, "output_dir", path.parent)
    process.communicate("\n")
    with path.open("w") as file:  # as one who looks has it
        fcntl.flock(file, fcntl.LOCK_SH)
        looks = threading.Timer(0.1, fcntl.flock, (file, fcntl.LOCK_UN))
        looks.start()
        take(path).release()
        looks.join()


def test_a_lock_that_was_lost_is_noticed(path):
    held = take(path)
    path.write_text(json.dumps({"host": "elsewhere", "pid": 1}))
    with pytest.raises(
        OSError, match=r"taken over while this process did not reach it, by process 1 on host 'elsewhere'"
    ):
        held.require()
    held.release()
    assert path.exists(), "it is the other's"
    path.unlink()
    held = take(path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="was it deleted"):
        held.require()


def test_a_file_system_without_locks_is_said(path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with take(path) as held:
        held.require()
    assert "this file system has no locks ([Errno 37] No locks available): nothing else may write" in caplog.text
    assert os.listdir(path.parent) == []


def test_a_holder_that_was_killed_and_still_frees_its_memory_is_waited_for(path, start, monkeypatch):
    """As long as the kernel says so: the lock stays until then."""
    process, _ = start()
    looks = iter([True] * 10 + [False])
    monkeypatch.setattr(lock, "_is_ending", lambda _: next(looks))
    with pytest.raises(InUseError):
        take(path)
    assert next(looks, None) is None
    process.kill()
    take(path).release()


def test_a_lock_that_cannot_be_written_is_let_go(path, monkeypatch):
    with monkeypatch.context() as full:
        full.setattr(os, "write", _refuse)
        with pytest.raises(OSError, match="No space left"):
            take(path)
    take(path).release()


def _refuse(*_):
    raise OSError(errno.ENOSPC, "No space left on device")
