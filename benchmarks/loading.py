"""Host memory and time until a sharded run's models are loaded, on real ranks of one host, on CPUs.

    python benchmarks/loading.py                       two ranks, 0.4 GB a model
    python benchmarks/loading.py --ranks 4 --layers 24

Each rank builds a run with FSDP: policy, reference policy and reward model, of one size, read from files. *Spread* is
how it is done: rank 0 loads them, and the others get their shares. *Whole* is how it is done with models that others
cannot have without weights: every rank loads all of a model, of which it then keeps its share. Counted is what the
process holds at its peak (VmHWM) beyond what it held before, with everything imported and a tiny run built. On a CPU
the shards themselves are in the host's memory, too; on a GPU they are not.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS)]

import torch  # noqa: E402
from smallest import parse  # noqa: E402
from tiny import PROMPTS, byte_tokenizer, count_letters, new_args  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedModel  # noqa: E402

from async_rlhf.config import ParallelConfig  # noqa: E402
from async_rlhf.run import inputs  # noqa: E402
from async_rlhf.run.trainer import OnlineTrainer  # noqa: E402

MODELS = {"policy": LlamaForCausalLM, "reward_model": LlamaForSequenceClassification}


def write_models(folder: Path, layers: int, hidden: int, dtype: str = "float32") -> dict[str, int]:
    """Write a policy and a reward model of random weights; bytes, in float32, of one and of its largest tensor."""
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    tokens = {"vocab_size": 4096, "max_position_embeddings": 96, "eos_token_id": 256, "pad_token_id": 257}
    found = {}
    for name, kind in MODELS.items():
        torch.manual_seed(0)
        model: PreTrainedModel = kind(LlamaConfig(**sizes, **heads, **tokens, bos_token_id=256, num_labels=1))
        found = {
            "model": 4 * sum(parameter.numel() for parameter in model.parameters()),
            "largest": 4 * max(parameter.numel() for parameter in model.parameters()),
        }
        model.to(getattr(torch, dtype)).save_pretrained(folder / name, max_shard_size="100MB")
        byte_tokenizer().save_pretrained(folder / name)
    return found


def peak() -> int:
    """Bytes that this process has held at most since the last call of :func:`forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def build(models: Path, out: Path) -> OnlineTrainer:
    episodes = 8 * int(os.environ["WORLD_SIZE"])  # a batch
    args = new_args(out, parallel=ParallelConfig(strategy="fsdp"), total_episodes=episodes)
    given = {"reward_funcs": count_letters, "processing_class": byte_tokenizer()}
    return OnlineTrainer(str(models / "policy"), args, PROMPTS, reward_model=str(models / "reward_model"), **given)


def measure(folder: Path, whole: bool) -> dict[str, Any]:
    """On one rank."""
    if whole:
        inputs.is_spread = lambda *_: False
    rank = int(os.environ["RANK"])
    kept = build(folder / "tiny", folder / "run-tiny")  # what comes with the first is not counted
    forget_peak()
    before, started = peak(), time.monotonic()
    trainer = build(folder / "large", folder / "run-large")
    seconds, found = time.monotonic() - started, peak() - before
    fingerprints = [trainer.learner.fingerprint, kept.learner.fingerprint]
    return {"rank": rank, "whole": whole, "bytes": found, "seconds": seconds, "fingerprints": fingerprints}


def launch(folder: Path, ranks: int, whole: bool, timeout: float = 600) -> list[dict[str, Any]]:
    """Measure on so many ranks, in processes of their own; what each says."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={port}"]
    own = ["--measure", str(folder), *(["--whole"] if whole else [])]
    words = [sys.executable, *torchrun, __file__, *own]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stdout[-3000:] + done.stderr[-6000:])
    lines = [line.partition("MEASURED ")[2] for line in done.stdout.splitlines()]
    return sorted((json.loads(line) for line in lines if line), key=lambda found: found["rank"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--dtype", default="bfloat16", help="of the files")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--whole", action="store_true", help=argparse.SUPPRESS)
    args = parse(parser, layers=1, hidden=64)
    if args.measure is not None:
        print("MEASURED " + json.dumps(measure(args.measure, args.whole)), flush=True)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_models(folder / "tiny", 2, 64, args.dtype)
        sizes = write_models(folder / "large", args.layers, args.hidden, args.dtype)
        found = {how: launch(folder, args.ranks, how == "whole") for how in ("whole", "spread")}
    assert len({tuple(each["fingerprints"]) for part in found.values() for each in part}) == 1
    print(f"{args.ranks} ranks, three models of {sizes['model'] / 1e9:.2f} GB in float32, files in {args.dtype}")
    for how, part in found.items():
        held = ", ".join(f"{each['bytes'] / 1e9:.2f}" for each in part)
        print(f"{how:>6}: GB of each rank at its peak {held}; {max(each['seconds'] for each in part):.1f} s")


if __name__ == "__main__":
    main()
