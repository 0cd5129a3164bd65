"""What TensorBoard, trackio, MLflow and W&B hold of a run, read back from their own files."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

# trackio decides when it is imported where its files go.
PLACE = tempfile.TemporaryDirectory(prefix="trackers-")
os.environ.setdefault("TRACKIO_DIR", PLACE.name)

from tiny import count_letters, json_rows  # noqa: E402

from async_rlhf import OnlineDPOTrainer  # noqa: E402
from async_rlhf.commands.evaluate import run_evaluate  # noqa: E402
from async_rlhf.commands.sft import run_sft  # noqa: E402
from async_rlhf.config import EvaluateConfig, SFTConfig  # noqa: E402
from async_rlhf.models.saving import write_model  # noqa: E402
from async_rlhf.run.callbacks import TRACKERS, training_arguments  # noqa: E402

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
    return json_rows(folder / "samples.jsonl")


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
    told = training_arguments(args, rows=12)
    assert (told.num_train_epochs, told.bf16, told.gradient_checkpointing, told.learning_rate) == (4, True, True, 1e-3)
    logged = told.to_dict()
    for name in ("staleness", "bf16", "learning_rate", "num_epochs", "samples_per_prompt", "seed"):
        assert logged[name] == getattr(args, name), name
    assert (logged["num_train_epochs"], logged["batches"], logged["prompts_per_batch"]) == (4, 6, 8)
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
            texts.setdefault(tag.removesuffix("/text_summary"), {})[event.step] = event.tensor_proto.string_val[
                0
            ].decode()
    scalars = {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    if "_hparams_/session_start_info" not in found.summary_metadata:
        return scalars, texts, {}
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
    assert [step for step, _ in scalars["evaluation/reward_mean"]] == [2, 4]
    assert "&lt;b&gt;" in texts["evaluation_completions"][4]
    assert "q0&#124;" in texts["evaluation_completions"][4]


@needs("tensorboard")
def test_answers_to_held_out_prompts_are_shown_at_their_batch(make_policy, tokenizer, prompts, make_args):
    """Their results come two batches later."""
    options = {"eval_steps": 2, "eval_samples_per_prompt": 2, "total_episodes": 48}
    args = make_args(staleness=1, generation=GENERATION, report_to=["tensorboard"], **options)
    held = {"eval_dataset": prompts[:3]}
    folder = train(make_policy, tokenizer, prompts, args, **held)
    scalars, texts, _ = events(folder)
    assert [step for step, _ in scalars["eval/objective/scores"]] == [2, 4, 6]
    rows = json_rows(folder / "eval_samples.jsonl")
    assert sorted(texts["eval_completions"]) == [2, 4, 6]
    for batch, table in texts["eval_completions"].items():
        head, _, *lines = table.split("\n")
        shown = [dict(zip(cells(head), cells(line), strict=True)) for line in lines]
        ours = [row for row in rows if row["batch"] == batch]
        assert [(one["row"], one["sample"], one["prompt"]) for one in shown] == [
            (str(row["row"]), str(row["sample"]), row["prompt"]) for row in ours
        ]
        assert [float(one["score"]) for one in shown] == pytest.approx([row["score"] for row in ours], rel=1e-5)


@needs("tensorboard")
def test_a_stage_logs_its_own_configuration(tokenizer, make_policy, tmp_path):
    write_model(make_policy(), tokenizer, tmp_path / "model")
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"query": "ab", "query_reference_response": f"ab{i}"}) + "\n" for i in range(8)))
    known = {"bf16": True, "num_epochs": 2, "learning_rate": 1e-3, "report_to": ["tensorboard"]}
    run_sft(SFTConfig(str(data), str(tmp_path / "sft"), model=str(tmp_path / "model"), **known))
    found = json.loads(events(tmp_path / "sft" / "logs")[1]["args"][0])
    assert (found["bf16"], found["num_epochs"], found["num_train_epochs"], found["learning_rate"]) == (True, 2, 2, 1e-3)


@needs("tensorboard")
def test_a_resumed_run_goes_on_in_tensorboards_same_folder(make_policy, tokenizer, prompts, make_args):
    known = {"generation": GENERATION, "report_to": ["tensorboard"], "save_steps": 2}
    folder = train(make_policy, tokenizer, prompts, make_args(total_episodes=24, **known))
    shutil.rmtree(folder / "checkpoint-3")  # so batch 3 is trained on once more
    (place,) = (folder / "runs").iterdir()
    train(
        make_policy,
        tokenizer,
        prompts,
        make_args(total_episodes=48, resume=True, **known | {"overwrite_output_dir": False}),
    )
    assert list((folder / "runs").iterdir()) == [place]
    scalars, texts, _ = events(folder)
    assert [step for step, _ in scalars["train/episode"]] == [1, 2, 3, 4, 5, 6]
    assert sorted(texts["completions"]) == [1, 2, 3, 4, 5, 6]


@needs("trackio")
def test_trackio_has_configuration_and_metrics(make_policy, tokenizer, prompts, make_args, tmp_path):
    known = {"staleness": 1, "generation": GENERATION, "report_to": ["trackio"], "save_steps": 2}
    known |= {"run_name": "mine", "project": tmp_path.name}
    folder = train(make_policy, tokenizer, prompts, make_args(total_episodes=16, **known))
    train(make_policy, tokenizer, prompts, make_args(total_episodes=32, resume=True, **known))
    assert not (folder / TRACKERS).exists()
    from trackio.sqlite_storage import SQLiteStorage

    assert SQLiteStorage.get_runs(tmp_path.name) == ["mine"]
    config = SQLiteStorage.get_run_config(tmp_path.name, "mine")
    assert (config["staleness"], config["algorithm"], config["batches"]) == (1, "online_dpo", 4)
    logs = SQLiteStorage.get_logs(tmp_path.name, "mine")
    trained = [(one["train/global_step"], one["train/episode"]) for one in logs if "train/episode" in one]
    assert trained == [(b, 8 * b) for b in range(1, 5)]


@needs("mlflow")
def test_mlflow_has_configuration_and_metrics(make_policy, tokenizer, prompts, make_args, tmp_path, monkeypatch):
    import mlflow

    place = "sqlite:///" + str(tmp_path / "mlflow.db") if find_spec("sqlalchemy") else f"file:{tmp_path / 'mlruns'}"
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", place)
    monkeypatch.chdir(tmp_path)
    known = {"staleness": 1, "generation": GENERATION, "report_to": ["mlflow"], "project": "ours"}
    train(make_policy, tokenizer, prompts, make_args(total_episodes=16, **known))
    client = mlflow.MlflowClient()
    (experiment,) = [one for one in client.search_experiments() if one.name == "ours"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert (run.data.params["staleness"], run.data.params["batches"]) == ("1", "2")
    episodes = client.get_metric_history(run.info.run_id, "episode")
    assert [(one.step, one.value) for one in episodes] == [(b, 8 * b) for b in range(1, 3)]


def records(path: Path):
    """The records of a file of W&B: a head of 7 bytes, then LevelDB's log format, in blocks of 32 KiB."""
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (room := 32768 - at % 32768) < 7:
            at += room
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # it is whole, or this was its last part
            yield whole
            whole = b""


def wandb_files(files: list[Path]):
    """Configuration and history of a run, from all files of it."""
    from wandb.proto.wandb_internal_pb2 import Record

    config, history = {}, []
    for path in files:
        for record in map(Record.FromString, records(path)):
            updates = [*record.config.update, *record.run.config.update]
            config |= {one.key or one.nested_key[0]: json.loads(one.value_json) for one in updates}
            if record.history.item:
                items = {tuple(one.nested_key) or (one.key,): one.value_json for one in record.history.item}
                history.append({"/".join(key): json.loads(value) for key, value in items.items()})
    return config, history


@needs("wandb")
def test_wandb_has_configuration_completions_and_evaluation(
    make_policy, tokenizer, prompts, make_args, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    known = {"staleness": 1, "generation": GENERATION, "report_to": ["wandb"], "save_steps": 2, "project": "ours"}
    folder = train(make_policy, tokenizer, prompts, make_args(total_episodes=16, **known))
    evaluate(folder, tmp_path)
    number = json.loads((folder / TRACKERS).read_text())["wandb"]["id"]
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert [path.name for path in files] == [f"run-{number}.wandb"] * 2
    until = time.monotonic() + 60
    config, history = wandb_files(files)
    while not any("evaluation/reward_mean" in one for one in history) and time.monotonic() < until:
        time.sleep(0.1)  # its service, a process of its own, may still be writing
        config, history = wandb_files(files)
    assert (config["staleness"], config["algorithm"], config["batches"]) == (1, "online_dpo", 2)
    assert [one["train/episode"] for one in history if "train/episode" in one] == [8, 16]
    tables = tmp_path.glob("wandb/offline-run-*/files/media/table/completions*.json")
    shown = sorted(json.loads(path.read_text())["data"] for path in tables)
    rows = [list(row.values()) for row in samples_of(folder)]
    assert [row[: len(rows[0])] for table in shown for row in table] == rows
    assert [one["train/global_step"] for one in history if "evaluation/reward_mean" in one] == [2]
