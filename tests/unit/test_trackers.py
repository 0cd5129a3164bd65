"""What TensorBoard, trackio, MLflow and W&B hold of a run, read back from their own files."""

from __future__ import annotations

import json
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

# trackio and wandb decide when they are imported where their files go.
PLACE = tempfile.TemporaryDirectory(prefix="trackers-")
os.environ.setdefault("TRACKIO_DIR", PLACE.name)
os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"

from tiny import count_letters  # noqa: E402

from async_rlhf import OnlineDPOTrainer  # noqa: E402
from async_rlhf.commands.evaluate import run_evaluate  # noqa: E402
from async_rlhf.config import EvaluateConfig  # noqa: E402
from async_rlhf.run.callbacks import training_arguments  # noqa: E402

GENERATION = {"response_length": 6, "num_threads": 1}


def needs(package: str):
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs {package}")


def train(make_policy, tokenizer, prompts, args, **options):
    trainer = OnlineDPOTrainer(
        make_policy(), args, prompts, reward_funcs=count_letters, processing_class=tokenizer, **options
    )
    trainer.train()
    return Path(args.output_dir)


def samples_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def evaluate(folder: Path, tmp_path: Path) -> None:
    """Of the checkpoints of a run."""
    data, reward = tmp_path / "held-out.jsonl", tmp_path / "gold.py"
    data.write_text("".join(json.dumps({"query": f"q{i}|<b>"}) + "\n" for i in range(3)))
    reward.write_text("def gold(prompts, completions, **c):\n    return [float(len(set(t))) for t in completions]\n")
    run_evaluate(
        EvaluateConfig(
            run=str(folder),
            data=str(data),
            output_dir=str(tmp_path / "evaluation"),
            reward_funcs=[f"{reward}:gold"],
            response_length=4,
            device="cpu",
        )
    )


def test_the_arguments_say_what_is_true(make_args):
    args = make_args(staleness=1, bf16=True, num_epochs=2, gradient_checkpointing=True, total_episodes=48)
    told = training_arguments(args, rows=16)
    assert (told.num_train_epochs, told.bf16, told.gradient_checkpointing, told.learning_rate) == (3, True, True, 1e-3)
    logged = told.to_dict()
    for name in ("staleness", "bf16", "learning_rate", "num_epochs", "samples_per_prompt", "seed"):
        assert logged[name] == getattr(args, name), name
    assert (logged["num_train_epochs"], logged["batches"], logged["prompts_per_batch"]) == (3, 6, 8)
    assert (logged["completions_per_batch"], logged["optimizer_steps"], logged["placement"]) == (16, 24, "process")
    assert logged["generation.response_length"] == args.generation.response_length
    assert "optim" not in logged  # transformers' default, which is not what trains here
    assert json.loads(told.to_json_string()) == json.loads(json.dumps(logged))
    assert training_arguments(make_args(staleness=0)).to_dict()["staleness"] == 0


def events(folder: Path):
    """Scalars, texts and hyperparameters of a run, as TensorBoard reads its event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    (place,) = (folder / "runs").iterdir()
    found = EventAccumulator(str(place), size_guidance={"tensors": 0, "scalars": 0}).Reload()
    texts: dict[str, dict[int, str]] = {}
    for tag in found.Tags()["tensors"]:
        for event in found.Tensors(tag):
            texts.setdefault(tag.removesuffix("/text_summary"), {})[event.step] = event.tensor_proto.string_val[0].decode()
    scalars = {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    content = found.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    kinds = ("number_value", "string_value", "bool_value")
    return scalars, texts, {key: getattr(v, next(k for k in kinds if v.HasField(k))) for key, v in hparams.items()}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split(" | ")]


@needs("tensorboard")
def test_tensorboard_has_configuration_completions_and_evaluation(make_policy, tokenizer, prompts, make_args, tmp_path):
    args = make_args(staleness=1, generation=GENERATION, report_to=["tensorboard"], save_steps=2, total_episodes=32)
    folder = train(make_policy, tokenizer, prompts, args)
    evaluate(folder, tmp_path)
    scalars, texts, hparams = events(folder)
    config = json.loads(texts["args"][0])
    assert (config["staleness"], config["algorithm"], config["batches"]) == (1, "online_dpo", 4)
    assert (config["num_train_epochs"], config["bf16"]) == (32 / 20, False)
    assert (hparams["staleness"], hparams["algorithm"], hparams["generation.response_length"]) == (1, "online_dpo", 6)
    assert scalars["train/episode"] == [(b, 8 * b) for b in range(1, 5)]
    rows = samples_of(folder)
    for batch, table in texts["completions"].items():
        head, _, *lines = table.split("\n")
        ours = [row for row in rows if row["batch"] == batch]
        shown = [dict(zip(cells(head), cells(line), strict=True)) for line in lines]
        assert [float(one["score"]) for one in shown] == pytest.approx([row["score"] for row in ours], rel=1e-5)
        assert [one["lag"] for one in shown] == [str(min(1, batch - 1))] * 4
        assert [one["prompt"] for one in shown] == [row["prompt"] for row in ours]
    assert sorted(texts["completions"]) == [1, 2, 3, 4]
    assert [step for step, _ in scalars["evaluation/gold_mean"]] == [2, 4]
    assert "&lt;b&gt;" in texts["evaluation_completions"][4]
    assert "q0&#124;" in texts["evaluation_completions"][4]
