"""TRL's GRPOTrainer and ours on the task of docs/names.md: seconds, and rewards on the way.

    python benchmarks/trl_example.py --out runs/trl

Makes a GPT-NeoX of 0.1 million random parameters over bytes, and 64 prompts; a completion is rewarded for its letters.
The first run installs TRL into an environment of its own, ENV (by default OUT/env), which takes all other packages from
the one that runs this program, so both compute with the same torch and transformers; nothing else is changed. Then
each trainer runs in a process of its own, one after the other, with `python benchmarks/trl_example.py --only ours` or
`--only trl` in its own environment. Seconds are those of `train()`, which with us starts a generator's process. Both
compute with one thread in each process: so small a model is not faster with more, and where other programs have the
cores, threads that wait for each other made TRL's seconds anything from 6 to 87.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import time
import venv
from importlib.metadata import version
from pathlib import Path
from typing import Any

from smallest import parse

TRL = "1.16.0"
PROMPTS, SAMPLES, LENGTH, RATE = 8, 4, 24, 1e-3  # prompts of a batch, completions of each, tokens of each
EVERY = 10  # batches of a mean


def letters(completions: list[str], **columns: Any) -> list[float]:
    return [float(sum(c.isascii() and c.isalpha() for c in text)) for text in completions]


def make_inputs(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    base = Tokenizer(models.BPE(vocab={character: token for token, character in enumerate(characters)}, merges=[]))
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, eos_token="<eos>", pad_token="<pad>")
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=96,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    GPTNeoXForCausalLM(config).save_pretrained(out / "policy")
    tokenizer.save_pretrained(out / "policy")
    rows = [{"prompt": f"def f{number}(x{'y' * (number % 5)}):"} for number in range(64)]
    (out / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def install_trl(folder: Path) -> Path:
    """The interpreter of an environment with TRL, whose other packages are those of this one."""
    python = folder / "bin" / "python"
    places = [path for path in folder.glob("lib/python*/site-packages") if list(path.glob(f"trl-{TRL}.dist-info"))]
    if not places:
        print(f"installing trl {TRL} into {folder}", file=sys.stderr)
        venv.create(folder, with_pip=False, symlinks=True)
        target = next(folder.glob("lib/python*/site-packages"))
        (target / "ours.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
        subprocess.run([*pip, f"trl=={TRL}"], check=True)
    return python


def run_trl(out: Path, batches: int, seed: int) -> dict[str, Any]:
    from datasets import load_dataset
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        output_dir=str(out / "trl"),
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=LENGTH,
        temperature=1.0,
        learning_rate=RATE,
        max_steps=batches,
        logging_steps=1,
        beta=0.0,
        loss_type="grpo",
        report_to="none",
        save_strategy="no",
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        seed=seed,
    )
    dataset = load_dataset("json", data_files=str(out / "prompts.jsonl"), split="train")
    trainer = GRPOTrainer(model=str(out / "policy"), args=args, train_dataset=dataset, reward_funcs=letters)
    started = time.monotonic()
    trainer.train()
    seconds = time.monotonic() - started
    rewards = [logs["reward"] for logs in trainer.state.log_history if "reward" in logs]
    return {"name": f"TRL {version('trl')}", "seconds": seconds, "rewards": rewards}


def run_ours(out: Path, batches: int, seed: int) -> dict[str, Any]:
    from datasets import load_dataset

    from async_rlhf import GenerationConfig, GRPOConfig, GRPOTrainer, KLConfig

    args = GRPOConfig(
        output_dir=str(out / "ours"),
        per_device_train_batch_size=PROMPTS,
        samples_per_prompt=SAMPLES,
        total_episodes=PROMPTS * batches,
        staleness=1,
        learning_rate=RATE,
        max_prompt_length=32,
        logging_steps=1,
        kl=KLConfig(coef=0.0),
        generation=GenerationConfig(response_length=LENGTH, temperature=1.0),
        device="cpu",
        seed=seed,
        progress=False,
        overwrite_output_dir=True,
    )
    dataset = load_dataset("json", data_files=str(out / "prompts.jsonl"), split="train")
    trainer = GRPOTrainer(str(out / "policy"), args, dataset, reward_funcs=letters, prompt_field="prompt")
    started = time.monotonic()
    state = trainer.train()
    seconds = time.monotonic() - started
    return {"name": "async_rlhf", "seconds": seconds, "rewards": [x["objective/scores"] for x in state.log_history]}


def table(results: list[dict[str, Any]], batches: int) -> str:
    lines = [f"{'':<12} {'seconds':>8}  reward, means of {EVERY} batches"]
    for found in results:
        rewards = found["rewards"]
        if len(rewards) != batches:
            raise RuntimeError(f"{found['name']}: logged {len(rewards)} of {batches} batches")
        parts = [rewards[start : start + EVERY] for start in range(0, batches, EVERY)]
        means = ", ".join(f"{sum(part) / len(part):.2f}" for part in parts)
        lines.append(f"{found['name']:<12} {found['seconds']:>8.1f}  {means}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/trl"), help="folder for model, prompts and results")
    parser.add_argument("--env", type=Path, help="folder of the environment for TRL; by default OUT/env")
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("trl", "ours"), help="run one of the two in this environment")
    args = parse(parser, batches=2)
    out = args.out.resolve()
    if args.only is not None:
        if not (out / "policy").exists():
            make_inputs(out)
        found = (run_trl if args.only == "trl" else run_ours)(out, args.batches, args.seed)
        (out / f"{args.only}.json").write_text(json.dumps(found))
        print(table([found], args.batches))
        return
    pythons = {"trl": install_trl((args.env or out / "env").resolve()), "ours": Path(sys.executable)}
    make_inputs(out)
    options = ["--out", str(out), "--batches", str(args.batches), "--seed", str(args.seed)]
    for name, python in pythons.items():
        with (out / f"{name}.log").open("w") as log:
            done = subprocess.run(
                [str(python), __file__, *options, "--only", name],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                check=False,
            )
        if done.returncode != 0:
            sys.exit(f"{name} failed: see {log.name}")
    print(table([json.loads((out / f"{name}.json").read_text()) for name in pythons], args.batches))


if __name__ == "__main__":
    main()
