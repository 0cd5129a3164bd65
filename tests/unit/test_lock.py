"""The lock on a folder: one living process at a time, whatever has happened to the others."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from async_rlhf.system import lock
from async_rlhf.system.lock import Holder, InUseError, hold

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


def held_by(path, **changes):
    """A lock file of another process: this one's, with changes."""
    holder = replace(Holder.here(), token="another", **changes)
    path.write_text(json.dumps(asdict(holder)))
    return holder


def take(path):
    return hold(path, "output_dir", path.parent)


def test_drafts_of_dead_processes_are_deleted_at_once(path):
    dead, elsewhere = (path.with_name(f"{path.name}.{name}") for name in ("dead", "elsewhere"))
    for draft, changes in ((dead, {"started": "1"}), (elsewhere, {"host": "another", "place": "another"})):
        held_by(draft, **changes)
    with take(path):
        assert not dead.exists()
        assert elsewhere.exists()  # which may be about to use it


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


def test_a_reused_pid_is_not_the_holder(path):
    held_by(path, pid=os.getppid(), started="1")  # lives, but was started at another time
    take(path).release()
    held_by(path)  # the very same number and time: an earlier program of this process
    take(path).release()


def test_the_parent_of_this_process_is_alive(path):
    held_by(path, pid=os.getppid(), started=lock._started(os.getppid()))
    with pytest.raises(InUseError):
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


def test_a_process_of_another_container_cannot_be_looked_up(path):
    """Though its host has the same name: the place tells them apart."""
    assert Holder.here().place
    assert replace(Holder.here(), pid=os.getppid(), place="another").is_alive() is None


def test_folders_are_made_and_deleted_again_if_they_stay_empty(tmp_path):
    inner = tmp_path / "a" / "b" / ".run.lock"
    held = take(inner)
    assert inner.exists()
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_one_line_says_for_whom_it_waits(path, monkeypatch, caplog):
    monkeypatch.setattr(lock, "STALE_SECONDS", 0.5)
    monkeypatch.setattr(lock, "_LOOK_SECONDS", 0.05)
    held_by(path, host="elsewhere", place="another")
    with take(path):
        pass
    assert [record.message.split(":")[0] for record in caplog.records] == [str(path), f"taking over {path}"]


def test_another_hosts_lock_is_taken_over_when_it_gives_no_sign(path, monkeypatch):
    elsewhere = {"host": "elsewhere", "place": "another boot pid:[1]"}
    held_by(path, **elsewhere)
    os.utime(path, (1, 1))  # long ago by the file system's clock
    take(path).release()
    monkeypatch.setattr(lock, "STALE_SECONDS", 3.0)
    held_by(path, **elsewhere)
    started = time.monotonic()
    take(path).release()
    assert time.monotonic() - started > 2
    held_by(path, **elsewhere)
    os.utime(path, (time.time() + 1e6,) * 2)  # its clock was wrong: then by how long one has watched it
    take(path).release()
    path.write_text("")  # cut off, or on its way
    take(path).release()


def test_another_hosts_lock_that_is_refreshed_is_not(path, monkeypatch):
    monkeypatch.setattr(lock, "_LOOK_SECONDS", 0.1)
    held_by(path, host="elsewhere", place="another boot pid:[1]")
    heartbeat = threading.Timer(1.0, os.utime, (path,))
    heartbeat.start()
    with pytest.raises(InUseError, match="on host 'elsewhere'"):
        take(path)
    heartbeat.join()
    assert os.listdir(path.parent) == [path.name]


def test_the_holder_gives_signs_of_life(path, monkeypatch):
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.05)
    with take(path):
        os.utime(path, (1, 1))
        deadline = time.monotonic() + 60
        while path.stat().st_mtime == 1:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_lock_that_was_lost_is_noticed(path):
    held = take(path)
    held_by(path, host="elsewhere")
    with pytest.raises(OSError, match=r"taken over while this process gave no sign of life, by process .* 'elsewhere'"):
        held.require()
    held.release()
    assert path.exists(), "it is the other's"
    path.unlink()
    held = take(path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="was it deleted"):
        held.require()


def test_without_hard_links(path, monkeypatch):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    with take(path) as held:
        held.require()
    assert os.listdir(path.parent) == []


@pytest.mark.rare
def test_of_many_at_once_one_takes_over_a_dead_ones(path, tmp_path):
    """Eight processes, again and again, on the lock of a dead one."""
    context = multiprocessing.get_context("fork")
    for _ in range(20):
        held_by(path, pid=2**22 + 1)
        barrier, taken = context.Barrier(8), context.SimpleQueue()
        children = [context.Process(target=_compete, args=(path, barrier, taken)) for _ in range(8)]
        for child in children:
            child.start()
        found = [taken.get() for _ in children]
        assert sorted(found) == [False] * 7 + [True]
        for child in children:
            child.join()


def _compete(path, barrier, taken):
    barrier.wait()
    try:
        held = take(path)
    except InUseError:
        taken.put(False)
        barrier.wait()
        return
    taken.put(True)
    barrier.wait()
    held.require()
    held.release()
