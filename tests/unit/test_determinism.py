"""What is set so that a GPU repeats itself, and what is refused because nothing could."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from tiny import new_args

from async_rlhf.config import ConfigError
from async_rlhf.system.determinism import _sums_by_blocks, cumulative_sums

PROGRAM = """
import json, os, torch
from async_rlhf.system.determinism import prepare_deterministic
prepare_deterministic()
names = ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC", "VLLM_BATCH_INVARIANT")
print(json.dumps({
    "environment": {name: os.environ[name] for name in names},
    "strict": torch.are_deterministic_algorithms_enabled()
    and not torch.is_deterministic_algorithms_warn_only_enabled(),
    "mem_efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
    "flash": torch.backends.cuda.flash_sdp_enabled(),
}))
"""


def test_everything_that_torch_flash_attention_and_vllm_need_is_set():
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=environment)
    found = json.loads(done.stdout)
    assert found["environment"] == {
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",  # the user's own
        "FLASH_ATTENTION_DETERMINISTIC": "1",
        "VLLM_BATCH_INVARIANT": "1",
    }
    assert found["strict"]
    assert found["flash"]
    assert not found["mem_efficient"]
    assert not found["cudnn"]


@pytest.mark.parametrize("length", [1, 255, 256, 257, 5000])
def test_sums_by_blocks_are_cumulative_sums(length):
    values_BV = torch.rand(3, length, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
    expected_BV = values_BV.cumsum(dim=-1)
    assert torch.allclose(_sums_by_blocks(values_BV), expected_BV, rtol=1e-13, atol=0)
    assert torch.equal(cumulative_sums(values_BV), expected_BV)  # a CPU's own are deterministic


@pytest.mark.parametrize(
    ("generation", "changes", "why"),
    [
        ({"in_flight": True}, {"staleness": 1}, "depends on timing"),
        ({"engine": "vllm", "placement": "server", "urls": ["http://localhost:8000"]}, {}, "VLLM_BATCH_INVARIANT=1"),
        ({"engine": "vllm"}, {"staleness": 1, "launch": "ray"}, "environments of their own"),
    ],
)
def test_what_cannot_be_repeated_is_refused(tmp_path, generation, changes, why):
    with pytest.raises(ConfigError, match=f"deterministic: got True; must be false with .*{why}"):
        new_args(tmp_path, "run", generation, deterministic=True, **changes)
