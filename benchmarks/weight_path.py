"""How long a version of the weights takes to generators on the same host at least: bytes of each step over bandwidths.

    python benchmarks/weight_path.py [--parameters 8e9] [--json]

A roofline: nothing here is measured on a GPU. tests/simulated_gpu/test_weight_path.py counts the bytes of each step
that crosses the bus or is read for a checksum, in the run's own code. Steps follow each other, but for the generator's
checksums, which cores compute while the GPU copies. "before" is the same with one thread for the learner's checksums,
and with memory of the generator's that is not pinned.

Bandwidths of an H100 and its host, GB/s: HBM 3,350 (NVIDIA's data sheet); PCIe 5.0 x16 from pinned memory 55 (64 in the
specification, less what transfers need); from other memory 4; xxh3 12.4 a thread, as fast as a
core reads (estimates, as are the 55), of which eight need a third of what eight channels of DDR5-4800 give (307). What
vLLM does for each layer on the host is in no roofline: its whole reloads were reported at 4 GB/s (vllm#48382).
"""

from __future__ import annotations

import argparse
import json
from typing import NamedTuple

from smallest import parse

GBS = {"HBM": 3350.0, "PCIe": 55.0, "pageable": 4.0, "xxh3": 12.4}
THREADS = 8
"""That compute checksums."""


class Step(NamedTuple):
    """Bytes of each parameter, in bfloat16 of float32, and what they pass through."""

    name: str
    bytes: int
    through: str


STEPS = (
    Step("rounded, within the learner's GPU", 4 + 2, "HBM"),
    Step("to the host", 2, "PCIe"),
    Step("the learner's checksums", 2, "xxh3"),
    Step("to the generator's GPU", 2, "PCIe"),
    Step("the generator's checksums", 2, "xxh3"),
    # NaN written, new memory written, copied into the memory of kernels (read, written), and looked at for NaN.
    Step("within the generator's GPU (vLLM)", 2 + 2 + 4 + 2, "HBM"),
)
BESIDE = "the generator's checksums"


def seconds(parameters: float, mended: bool = True) -> dict[str, float]:
    """Of each step, and of all."""
    found = {}
    for step in STEPS:
        gbs = GBS[step.through] * (THREADS if step.through == "xxh3" and (mended or step.name == BESIDE) else 1)
        if step.name == "to the generator's GPU" and not mended:
            gbs = GBS["pageable"]
        found[step.name] = parameters * step.bytes / 1e9 / gbs
    copied, beside = found["to the generator's GPU"], found[BESIDE]
    return found | {"all": sum(found.values()) - min(copied, beside)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=8e9)
    parser.add_argument("--json", action="store_true")
    options = parse(parser, parameters=1e9)
    now, before = (seconds(options.parameters, mended) for mended in (True, False))
    if options.json:
        print(json.dumps({"seconds": now, "before": before}))
        return
    print("| step | bytes a parameter | through | seconds | before |\n|---|---|---|---|---|")
    for step in STEPS:
        print(f"| {step.name} | {step.bytes} | {step.through} | {now[step.name]:.2f} | {before[step.name]:.2f} |")
    print(f"| all | {sum(step.bytes for step in STEPS)} | | {now['all']:.2f} | {before['all']:.2f} |")


if __name__ == "__main__":
    main()
