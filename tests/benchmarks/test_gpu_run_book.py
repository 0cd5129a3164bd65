"""The run book of a first GPU, on a CPU: all of it runs, and a part that fails, dies or hangs stops no other."""

from __future__ import annotations

import json
import sys
import time
from types import SimpleNamespace

import pytest
from printed import BENCHMARKS, by_itself, markdown, require

sys.path.append(str(BENCHMARKS))
import gpu
import shared_tokens
import torch

WORDS = {"exits": "sys.exit('no room')", "dies": "os.kill(os.getpid(), 9)", "hangs": "time.sleep(600)"}
WORDS |= {"says nothing": "pass", "says more": "print('[1]')", "is right": "print('a line'); print('{\"ratio\": 1.5}')"}
REASONS = {
    "exits": "exit code 1: no room",
    "dies": "signal 9: no message",
    "hangs": "not done within 2 s",
    "says nothing": "printed no JSON",
    "says more": "printed no JSON",
}


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setenv("ASYNC_RLHF_GPU_TESTS_ON", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads that wait for each other on busy cores take minutes


def run(folder, *words):
    (table,) = markdown(by_itself("gpu.py", "--folder", str(folder), *words))
    (file,) = folder.iterdir()
    return table, json.loads(file.read_text())


def test_a_part_that_runs_and_one_that_is_skipped_with_its_reason(on_cpu, tmp_path):
    table, figures = run(tmp_path, "--only", "update", "--only", "memory")
    assert figures.keys() == {"machine", "update", "memory"}
    assert figures["update"]["command"] == "python benchmarks/learner.py --smallest --device cpu"
    (update, memory) = table
    assert [name for name, _ in (part.split() for part in update["figures"].split(","))] == ["ratio", "tflops", "peak"]
    require(update["figures"], 1e-4)
    assert memory["figures"] == "skipped a CPU's allocator does not count what it gives"


@pytest.mark.rare
def test_all_parts_in_their_order(on_cpu, tmp_path):
    table, figures = run(tmp_path)
    assert list(figures) == ["machine", *gpu.PARTS]
    for name, part in gpu.PARTS.items():
        shown = [row["figures"] for row in table if row["part"] == name]
        assert shown
        whole = name != "memory" and not (name == "vllm" and "not installed" in shown[0])
        assert whole == all(key in " ".join(shown) for key in part.shown), shown
        assert whole or shown[0].startswith("skipped ")


@pytest.mark.parametrize(("gigabytes", "tokens"), [(80, 16384), (24, 8000)])
def test_kernels_have_as_much_to_do_as_the_gpu_has_room_for(monkeypatch, gigabytes, tokens):
    """Rows that it keeps busy: a step of 410 million parameters, not of a thousandth of that work."""
    memory = SimpleNamespace(total_memory=gigabytes * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    for name in gpu.PARTS["kernels"].words.partition("--shapes ")[2].split():
        prompt, answer, samples, prompts = shared_tokens.shape_of(name, "410m", "cuda:0")
        assert 0.6 * tokens < (prompt + answer) * samples * prompts <= max(tokens, (prompt + answer) * samples)
        assert shared_tokens.shape_of(name, "small", "cpu") == shared_tokens.SHAPES[name]
    with torch.device("meta"):
        models = [shared_tokens.model_of(kind, "410m", "meta") for kind in ("neox", "llama")]
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in models]
    assert all(400e6 < size < 420e6 for size in sizes)


@pytest.mark.parametrize("name", WORDS)
def test_what_a_part_prints_or_why_it_is_skipped(name):
    command = [sys.executable, "-c", f"import os, sys, time; {WORDS[name]}"]
    found = gpu.attempt(command, 2 if name == "hangs" else 60)
    assert found == ({"skipped": REASONS[name]} if name in REASONS else {"ratio": 1.5})


def test_no_process_of_a_part_that_hangs_is_left(tmp_path):
    child = (
        f"import time; open({str(tmp_path / 'started')!r}, 'w'); time.sleep(6); open({str(tmp_path / 'left')!r}, 'w')"
    )
    words = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"
    assert "skipped" in gpu.attempt([sys.executable, "-c", words], 4)
    assert (tmp_path / "started").exists()
    with pytest.raises(TimeoutError):
        wait_for(tmp_path / "left", 4)


def wait_for(path, seconds):
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(path)
        time.sleep(0.1)


def test_a_part_that_hangs_stops_no_other(on_cpu, monkeypatch, tmp_path, capsys):
    """In the command itself, whose parts are replaced."""
    for name, text in (("first", "import time; time.sleep(600)"), ("second", "print('{\"ratio\": 1.5}')")):
        (tmp_path / f"{name}.py").write_text(text)
    parts = {"first": gpu.Part("first", "", 1, ("ratio",)), "second": gpu.Part("second", "", 60, ("ratio",))}
    monkeypatch.setattr(gpu, "PARTS", parts)
    monkeypatch.setattr(gpu, "HERE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--folder", str(tmp_path / "figures")])
    gpu.main()
    (table,) = markdown(capsys.readouterr().out)
    assert [(row["part"], row["figures"]) for row in table] == [
        ("first", "skipped not done within 1 s"),
        ("second", "ratio 1.5"),
    ]
    (file,) = (tmp_path / "figures").iterdir()
    assert json.loads(file.read_text())["second"]["ratio"] == 1.5
