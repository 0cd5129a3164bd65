"""Child processes start from a server that has not touched a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tiny import rare

PROGRAM = """
import sys
import torch

asked = []
torch.cuda.is_available = lambda: asked.append(torch.cuda._nvml_based_avail()) or False
import async_rlhf.generation.worker
print(asked)
"""

IN_A_CHILD = """
import torch
from async_rlhf.system.subprocesses import context_of, start_process

def answer(pipe):
    pipe.send(torch.cuda._nvml_based_avail())

if __name__ == "__main__":
    sys_context = context_of("{method}")
    ours, theirs = sys_context.Pipe()
    start_process(sys_context.Process(target=child.answer, args=(theirs,), daemon=True), "child", "{method}")
    print(ours.recv(), torch.cuda._nvml_based_avail())
"""


@pytest.fixture
def with_flash_attn(tmp_path):
    """A folder that looks like an installed flash-attn."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("")
    info = tmp_path / "flash_attn-2.8.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n")
    (info / "top_level.txt").write_text("flash_attn\n")
    return tmp_path


def run(program: str, folder: Path, **environment: str) -> str:
    root = str(Path(__file__).parents[2])
    found = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{folder}:{root}", "HOME": str(folder), **environment}
    done = subprocess.run([sys.executable, "-c", program], env=found, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_worker_asks_for_a_gpu_only_in_the_way_that_leaves_forks_alone(with_flash_attn):
    """If torch itself counted the GPUs, every process forked afterwards could use none."""
    assert run(PROGRAM, with_flash_attn) == "[False]"  # what would poison the fork server
    assert run(PROGRAM, with_flash_attn, PYTORCH_NVML_BASED_CUDA_CHECK="1") == "[True]"


def test_the_fork_server_asks_in_that_way(tmp_path):
    (tmp_path / "child.py").write_text(IN_A_CHILD.format(method="forkserver").partition("if __name__")[0])
    program = "import child\n" + IN_A_CHILD.format(method="forkserver")
    assert run(program, tmp_path) == "True False"


SWEEP = """
import sys
from pathlib import Path
from async_rlhf.studies.sweep.running import Job, run_jobs

if __name__ == "__main__":
    import probe
    sys.path.append("")
    (outcome,) = run_jobs([Job("job", probe.where, None, Path("jobs"))], 1, 1)
    print(outcome.results or outcome)
"""
PROBE = """
import async_rlhf
from async_rlhf.config.import_by_name import load_attribute

def where(_):
    return {"package": async_rlhf.__file__, "mine": load_attribute("mine", "reward", "reward_funcs", "function")()}
"""


@pytest.mark.parametrize("shadow", [rare("async_rlhf/nothing.txt"), "async_rlhf/__init__.py", "async_rlhf.py"])
def test_workers_run_the_code_of_their_parent_whatever_is_in_the_current_folder(tmp_path, shadow):
    """And import the user's own modules from there."""
    scripts, here, root = tmp_path / "scripts", tmp_path / "here", Path(__file__).parents[2]
    for folder in (scripts, here / "async_rlhf" if "/" in shadow else here):
        folder.mkdir(parents=True)
    (scripts / "sweep.py").write_text(SWEEP)
    (scripts / "probe.py").write_text(PROBE)
    (here / "mine.py").write_text("def reward(): return 1")
    (here / shadow).write_text("")
    words = [sys.executable, str(scripts / "sweep.py")]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(root), "HOME": str(tmp_path)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, cwd=here)
    assert done.stdout.strip() == str({"package": str(root / "async_rlhf" / "__init__.py"), "mine": 1}), done.stderr
