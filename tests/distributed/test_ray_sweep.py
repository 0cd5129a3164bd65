"""A sweep as tasks of a real Ray cluster."""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed
ray = pytest.importorskip("ray")

from async_rlhf.config import ConfigError  # noqa: E402
from async_rlhf.distributed.ray_tasks import run_tasks  # noqa: E402
from async_rlhf.studies.sweep.running import Job, run_alone  # noqa: E402


@pytest.fixture(scope="module")
def cluster():
    here = {"env_vars": {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}}
    ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=80_000_000, runtime_env=here)
    yield
    ray.shutdown()


def note(path: str) -> dict:
    """Leave a trace of every call, and fail where that is asked for."""
    with Path(path).open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), "at": time.time(), "folder": os.getcwd()}) + "\n")
    if path.endswith("bad"):
        raise ValueError("bad")
    return {"path": path}


def test_runs_are_tasks_and_one_that_fails_is_told(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # not where the cluster was started
    names = ["a", "b", "bad"]
    jobs = [Job(name, note, str(tmp_path / name), tmp_path / f"folder-{name}") for name in names]
    found = {job.name: outcome for job, outcome, _ in run_tasks(partial(run_alone, threads=1), jobs, 1, 0)}
    assert {name: found[name].results for name in "ab"} == {n: {"path": str(tmp_path / n)} for n in "ab"}
    assert found["bad"].results is None
    assert "ValueError: bad" in found["bad"].error
    left = [json.loads((tmp_path / name).read_text()) for name in names]
    assert len({one["pid"] for one in left}) == 3  # a process of its own each
    assert {one["folder"] for one in left} == {str(tmp_path)}
    assert "ValueError" in (tmp_path / "folder-bad" / "log.txt").read_text()


def test_what_no_node_can_hold_is_an_error(cluster, tmp_path):
    with pytest.raises(ConfigError, match=r"gpus: got 4; must fit on a node, with 1 CPUs for each run"):
        list(run_tasks(note, [str(tmp_path / "a")], 1, 4))
    with pytest.raises(ConfigError, match=r"threads: got 64; must fit on a node"):
        list(run_tasks(note, [str(tmp_path / "a")], 64, 0))
    assert not (tmp_path / "a").exists()
