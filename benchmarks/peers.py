"""Whole training steps against TRL's trainers: completions per second and peak memory, on the same work.

    python benchmarks/peers.py --out runs/peers [--json] [--rounds 2] [--cases docstrings ragged]

Cases, each with online DPO, RLOO and GRPO:

    docstrings   the policy and the reward model that `async-rlhf quickstart` makes (made here if --models has none, in
                 3 minutes): 128 completions a batch of at most 32 tokens
    ragged       a GPT-NeoX of 25M parameters, whose random weights end an answer after 60 tokens on average and after
                 256 at most; a reward function; 32 completions a batch
    tldr         the same model, prompts of 512 tokens and answers of 53 on average; 32 completions a batch
    sums         SmolLM2-135M-Instruct (recipes/smollm), asked for sums of two numbers: 45 tokens and 12 at most, eight
                 answers to each (GRPO and RLOO); 64 completions a batch

TRL, ours in turn (S = 0, inline) and ours at once (S = 1, a generator's process and the learner with half of the
threads each) take turns, round by round, with the same prompts, models, sizes of batch, lengths, precision (float32)
and number of threads. TRL trains with as many rows a pass as is fastest of --trl-rows, found by trying; ours takes the
tokens that it finds right ("auto"). Gradient checkpointing is off in both. A batch's seconds are those between the ends
of two optimiser steps, without the first two.

    ratio        our completions per second / TRL's; the median over rounds
    memory       peak resident memory of all processes, GB

The first run installs TRL into an environment of its own, ENV (by default OUT/env), which takes all other packages from
the one that runs this program.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import sysconfig
import threading
import time
import venv
from pathlib import Path
from typing import Any

from smallest import parse

ALGORITHMS = ("online_dpo", "rloo", "grpo")
WAYS = ("trl", "in turn", "at once")
WARM_UP = 2  # batches
CASES: dict[str, dict[str, int]] = {
    "docstrings": {"completions": 128, "response": 32, "batches": 8},
    "ragged": {"completions": 32, "response": 256, "batches": 5},
    "tldr": {"completions": 32, "response": 128, "batches": 5, "prompt": 512},
    "sums": {"completions": 64, "response": 12, "batches": 5, "samples": 8},
    "tiny": {"completions": 8, "response": 8, "batches": 4},
}
RAGGED: dict[str, dict[str, Any]] = {
    "ragged": {},
    "tldr": {"prompts": (512, 512), "ends": 53},
    "tiny": {"width": 64, "layers": 1},
}
"""The models and prompts of cases with random weights."""
SAMPLES = {"online_dpo": 2, "rloo": 4, "grpo": 4}
KL = {"online_dpo": 0.1, "rloo": 0.05, "grpo": 0.0}
RATE = 1e-5
TRL = "1.16.0"


def length(completions: list[str], **columns: Any) -> list[float]:
    """A reward function."""
    return [float(len(text) % 17) for text in completions]


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


# What both train on


def make_docstrings(out: Path, models: Path) -> None:
    """The quickstart's models, and its prompts in TRL's format."""
    from transformers import AutoTokenizer

    from async_rlhf.commands.pairs import run_pairs
    from async_rlhf.commands.reward import run_reward
    from async_rlhf.commands.sft import run_sft
    from async_rlhf.tasks.docstrings.config import QuickstartConfig
    from async_rlhf.tasks.docstrings.harvest import run_data
    from async_rlhf.tasks.docstrings.quickstart import MAX_PROMPT_LENGTH, stage_configs

    stages = stage_configs(QuickstartConfig(out=str(models)))
    for name, run in {"data": run_data, "sft": run_sft, "pairs": run_pairs, "reward": run_reward}.items():
        run(stages[name])
    for name, folder in {"sft": "policy", "reward": "reward"}.items():
        (out / folder).unlink(missing_ok=True)
        (out / folder).symlink_to((models / name).resolve())
    tokenizer = AutoTokenizer.from_pretrained(out / "policy")
    rows = [json.loads(line) for line in (models / "data" / "rl.jsonl").read_text().splitlines()[:4000]]
    texts = [row.get("prompt", row.get("query")) for row in rows]
    write_prompts(out, [text for text in texts if len(tokenizer(text)["input_ids"]) <= MAX_PROMPT_LENGTH])


def make_sums(out: Path) -> None:
    """SmolLM2 and its prompts, as texts with the marks of its chat."""
    from transformers import AutoTokenizer

    recipe = Path(__file__).parents[1] / "recipes" / "smollm"
    for name, where in (("convert", "policy"), ("sums", "data")):
        if not (out / where).exists():
            option = {"convert": "--output", "sums": "--out"}[name]
            subprocess.run([sys.executable, str(recipe / f"{name}.py"), option, str(out / where)], check=True)
    tokenizer = AutoTokenizer.from_pretrained(out / "policy")
    rows = [json.loads(line) for line in (out / "data" / "train.jsonl").read_text().splitlines()]
    how = {"tokenize": False, "add_generation_prompt": True}
    write_prompts(out, [tokenizer.apply_chat_template(row["messages"], **how) for row in rows])


def make_ragged(
    out: Path, width: int = 512, layers: int = 6, prompts: tuple[int, int] = (10, 60), ends: float = 60
) -> None:
    """Random weights with a chance of 1 / ``ends`` to end at each token, and prompts of so many tokens."""
    import random

    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from workload import neox

    vocabulary = 6000
    words = {f"w{i}": i for i in range(vocabulary - 2)} | {"<eos>": vocabulary - 2, "<pad>": vocabulary - 1}
    base = Tokenizer(models.WordLevel(words, unk_token="w0"))
    base.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, eos_token="<eos>", pad_token="<pad>")
    end = vocabulary - 2
    policy = neox(vocabulary, width, layers, 8, 1024, bos_token_id=end, eos_token_id=end, pad_token_id=vocabulary - 1)
    with torch.no_grad():  # every state has a part in common, which only the end of an answer looks at
        policy.gpt_neox.final_layer_norm.bias[0] = 10.0
        head_VH = policy.get_output_embeddings().weight
        head_VH[:, 0] = 0.0
        head_VH[end] = 0.0
        head_VH[end, 0] = float(torch.tensor(vocabulary / ends).log()) / 10.0
    policy.save_pretrained(out / "policy")
    tokenizer.save_pretrained(out / "policy")
    draw = random.Random(0)
    lengths = [draw.randint(*prompts) for _ in range(512)]
    write_prompts(out, [" ".join(f"w{draw.randrange(vocabulary - 2)}" for _ in range(n)) for n in lengths])


def write_prompts(out: Path, texts: list[str]) -> None:
    (out / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))


# The two trainers


def samples_of(case: str, algorithm: str) -> int:
    """K."""
    return SAMPLES[algorithm] if algorithm == "online_dpo" else CASES[case].get("samples", SAMPLES[algorithm])


def clock() -> Any:
    """A callback that notes the end of each optimiser step."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.ends.append(time.monotonic())

    return Clock()


def run_trl(folder: Path, case: str, algorithm: str, rows: int) -> list[float]:
    from datasets import load_dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    sizes, timer = CASES[case], clock()
    completions = sizes["completions"]
    # Online DPO counts prompts, and samples as many at once as it trains on in a pass.
    units = completions // 2 if algorithm == "online_dpo" else completions
    rows = min(rows, units)
    shared: dict[str, Any] = {
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": units // rows,
        "max_steps": sizes["batches"],
        "temperature": 1.0,
        "learning_rate": RATE,
        "beta": KL[algorithm],
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "disable_tqdm": True,
    }
    if algorithm == "online_dpo":
        args: Any = OnlineDPOConfig(**shared, max_new_tokens=sizes["response"], max_length=1024)
    else:
        kind = RLOOConfig if algorithm == "rloo" else GRPOConfig
        args = kind(**shared, num_generations=samples_of(case, algorithm), max_completion_length=sizes["response"])
    trainer = {"online_dpo": OnlineDPOTrainer, "rloo": RLOOTrainer, "grpo": GRPOTrainer}[algorithm]
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    options: dict[str, Any] = {"processing_class": tokenizer, "callbacks": [timer]}
    reward: Any = length
    if (folder / "reward").exists():
        reward, options["reward_processing_classes"] = str(folder / "reward"), tokenizer
    if algorithm == "online_dpo":
        from transformers import AutoModelForCausalLM

        reference = AutoModelForCausalLM.from_pretrained(folder / "policy")
        options["ref_model"] = reference
    dataset = load_dataset("json", data_files=str(folder / "prompts.jsonl"), split="train")
    trainer(model=str(folder / "policy"), reward_funcs=reward, args=args, train_dataset=dataset, **options).train()
    return timer.ends


def run_ours(folder: Path, case: str, algorithm: str, staleness: int, threads: int) -> list[float]:
    from datasets import load_dataset

    import async_rlhf as ours
    from async_rlhf.run.trainer import OnlineTrainer

    sizes, timer = CASES[case], clock()
    placement: dict[str, Any] = {"placement": "inline"}
    if staleness > 0:
        placement = {"placement": "process", "num_threads": threads // 2}
    shared: dict[str, Any] = {
        "output_dir": str(folder / "ours"),
        "overwrite_output_dir": True,
        "completions_per_batch": sizes["completions"],
        "samples_per_prompt": samples_of(case, algorithm),
        "batches": sizes["batches"],
        "staleness": staleness,
        "learning_rate": RATE,
        "max_prompt_length": sizes.get("prompt", 128),
        "max_tokens_per_pass": "auto",
        "annotate_max_tokens": "auto",
        "non_eos_penalty": False,
        "device": "cpu",
        "save_steps": 0,
        "progress": False,
        "num_threads": threads if staleness == 0 else threads - threads // 2,
        "generation": ours.GenerationConfig(response_length=sizes["response"], temperature=1.0, **placement),
    }
    if algorithm == "online_dpo":
        args: Any = ours.OnlineDPOConfig(**shared, beta=KL[algorithm])
    else:
        kind = ours.RLOOConfig if algorithm == "rloo" else ours.GRPOConfig
        args = kind(**shared, kl=ours.KLConfig(coef=KL[algorithm]))
    reward = {"reward_model": str(folder / "reward")} if (folder / "reward").exists() else {"reward_funcs": length}
    dataset = load_dataset("json", data_files=str(folder / "prompts.jsonl"), split="train")
    OnlineTrainer(str(folder / "policy"), args, dataset, prompt_field="prompt", callbacks=[timer], **reward).train()
    return timer.ends


# Measuring


class Memory(threading.Thread):
    """Peak of the resident memory of a process and all its descendants, bytes; shared pages counted by their share."""

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self.process, self.peak = process, 0
        self.ended = threading.Event()

    def run(self) -> None:
        import psutil

        while not self.ended.wait(0.5):
            try:
                root = psutil.Process(self.process)
                family = [root, *root.children(recursive=True)]
                self.peak = max(self.peak, sum(one.memory_full_info().pss for one in family))
            except psutil.Error:
                continue


def measure(python: Path, out: Path, options: list[str], threads: int) -> dict[str, float]:
    """Completions per second and gigabytes of one run in a process of its own."""
    found = out / "found.json"
    found.unlink(missing_ok=True)
    with (out / "run.log").open("w") as log:
        process = subprocess.Popen(
            [str(python), __file__, "--out", str(out), *options],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "TRL_EXPERIMENTAL_SILENCE": "1"},
        )
        memory = Memory(process.pid)
        memory.start()
        code = process.wait()
        memory.ended.set()
    if code != 0:
        sys.exit(f"{' '.join(options)} failed: see {log.name}")
    ends = json.loads(found.read_text())
    case = options[options.index("--case") + 1]
    seconds = (ends[-1] - ends[WARM_UP - 1]) / (len(ends) - WARM_UP)
    return {"speed": CASES[case]["completions"] / seconds, "memory": memory.peak / 1e9}


def compare(args: argparse.Namespace, pythons: dict[str, Path], case: str, algorithm: str) -> list[dict[str, Any]]:
    """A row for each way."""

    def once(way: str, rows: int) -> dict[str, float]:
        options = ["--case", case, "--algorithm", algorithm, "--way", way, "--rows", str(rows)]
        threads = (args.trl_threads or args.threads) if way == "trl" else args.threads
        python = pythons["trl" if way == "trl" else "ours"]
        return measure(python, args.out, [*options, "--threads", str(threads)], threads)

    tried = {rows: once("trl", rows)["speed"] if "trl" in args.ways else 0.0 for rows in args.trl_rows}
    rows = max(tried, key=lambda rows: tried[rows])
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in args.ways}
    for _ in range(args.rounds):
        for way in args.ways:
            runs[way].append(once(way, rows))
    table = []
    theirs = [run["speed"] for run in runs.get("trl", [])] or [math.nan] * args.rounds
    for way in args.ways:
        ratios = [mine["speed"] / speed for mine, speed in zip(runs[way], theirs, strict=True)]
        middle = {key: statistics.median(run[key] for run in runs[way]) for key in ("speed", "memory")}
        row = {"case": case, "algorithm": algorithm, "way": way, **middle, "ratio": statistics.median(ratios)}
        table.append(row | {"smallest": min(ratios), "largest": max(ratios), "trl_rows": rows})
        print(line(table[-1]), flush=True)
    return table


def line(row: dict[str, Any]) -> str:
    names = f"{row['case']:<12}{row['algorithm']:<12}{row['way'] if row['way'] != 'trl' else 'TRL':<9}"
    spread = f"{row['ratio']:>7.2f}  ({row['smallest']:.2f} to {row['largest']:.2f})"
    return f"{names}{row['speed']:>14.1f}{row['memory']:>12.2f}{spread}"


def one_run(args: argparse.Namespace) -> None:
    """What a process of its own does."""
    import torch

    torch.set_num_threads(args.threads)
    folder = args.out / args.case
    if args.way == "trl":
        ends = run_trl(folder, args.case, args.algorithm, args.rows)
    else:
        ends = run_ours(folder, args.case, args.algorithm, int(args.way == "at once"), args.threads)
    (args.out / "found.json").write_text(json.dumps(ends))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/peers"), help="folder for models, prompts and logs")
    parser.add_argument("--env", type=Path, help="folder of the environment for TRL; by default OUT/env")
    parser.add_argument("--models", type=Path, help="output folder of a quickstart; by default OUT/quickstart")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=["docstrings", "ragged"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="without trl there is no ratio")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of each run in all")
    parser.add_argument("--trl-threads", type=int, help="threads of TRL, if not all")
    parser.add_argument("--trl-rows", type=int, nargs="+", default=[8, 32, 128], help="a pass, tried with TRL")
    parser.add_argument("--json", action="store_true", help="print the rows as one line of JSON, last")
    for name in ("case", "algorithm", "way"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, help=argparse.SUPPRESS)
    args = parse(parser, cases=["tiny"], algorithms=["grpo"], rounds=1, trl_rows=[4])
    args.out = args.out.resolve()
    if args.way is not None:
        one_run(args)
        return
    for case in args.cases:
        (args.out / case).mkdir(parents=True, exist_ok=True)
    pythons = {"ours": Path(sys.executable)}
    if "trl" in args.ways:
        pythons["trl"] = install_trl((args.env or args.out / "env").resolve())
    for case in args.cases:
        if case == "docstrings":
            make_docstrings(args.out / case, args.models or args.out / "quickstart")
        elif case == "sums":
            make_sums(args.out / case)
        else:
            make_ragged(args.out / case, **RAGGED[case])
    print(f"{'case':<12}{'algorithm':<12}{'':<9}{'completions/s':>14}{'memory, GB':>12}{'ratio':>7}")
    rows = [row for case in args.cases for name in args.algorithms for row in compare(args, pythons, case, name)]
    if args.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
