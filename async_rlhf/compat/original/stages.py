"""The original's programs beside online training.

They are sft.py, reward_modeling.py and relabel_with_rm.py; for evaluation generate_for_eval.py and load_and_eval.py.
"""

from __future__ import annotations

import os
from pathlib import Path

from async_rlhf.compat.original import common
from async_rlhf.compat.original.common import Translation, one_of
from async_rlhf.compat.original.keys import HERE, MAPPED
from async_rlhf.config.base import require

_SANITY_ROWS = 64
_SANITY_PROMPTS = 10
_TRL_MAX_LENGTH = 1024  # SFTTrainer's default if max_seq_length is not given
_GENERATIONS = "_generations"
_EVALUATION = "_evaluation"


def translate_sft(t: Translation) -> None:
    """All keys of a file for sft.py."""
    one_of("task_type", t["task_type"], "tldr", "hh")
    _stage(t)
    columns = "query_reference_response" if t["task_type"] == "tldr" else "prompt and chosen"
    t.maps("task_type", {"completion_only": False}, f"trains on the whole of {columns}, as there")
    length = t["max_seq_length"]
    note = "longer rows are dropped and counted here, cut off there"
    t.maps("max_seq_length", {"max_length": _TRL_MAX_LENGTH if length is None else length}, note)
    t.idle(f"{HERE}: every row is a sequence of its own" if t["packing"] else MAPPED, "packing")


def translate_reward(t: Translation) -> None:
    """All keys of a file for reward_modeling.py."""
    _stage(t)
    t.does("centring", {"center": False}, "scores are not centred there; true keeps their mean at 0")
    if t["max_length"] is not None:
        t.maps("max_length", "max_length", "longer pairs are dropped and counted; they failed there")
    if t["tokenizer_name"] == t["model_name_or_path"]:
        t.idle(MAPPED, "tokenizer_name")
    if t["model_revision"] != "main":
        name = f"{t['model_name_or_path']}@{t['model_revision']}"
        t.maps("model_revision", {"model": name}, "part of the model's name")
    t.maps("trust_remote_code", {"trust_remote_code": True} if t["trust_remote_code"] else {})


def _stage(t: Translation) -> None:
    common.place(t, "output_dir", below_cwd=True, names_run=False)
    common.integrations(t, "report_to")
    t.needed("model_name_or_path")
    source = t.needed("dataset_name")
    t.maps("model_name_or_path", "model")
    t.maps("dataset_name", {"train": source, "eval": source}, MAPPED + common.one_split(source))
    slices = f"[:{_SANITY_ROWS}]" if t["sanity_check"] and not Path(source).exists() else ""
    t.maps("dataset_train_split", {"train_split": t["dataset_train_split"] + slices})
    t.maps("dataset_eval_split", {"eval_split": t["dataset_eval_split"] + slices})
    note = f"mapped: the first {_SANITY_ROWS} rows" if slices else f"{HERE}: all rows of a local data set are used"
    t.idle(note if t["sanity_check"] else MAPPED, "sanity_check")
    t.same(
        "",
        """num_train_epochs=num_epochs overwrite_output_dir=overwrite per_device_train_batch_size
        gradient_accumulation_steps learning_rate lr_scheduler_type weight_decay warmup_ratio warmup_steps seed
        gradient_checkpointing""",
    )
    narrow = {"bf16": t["bf16"] or t["fp16"]}
    t.maps("bf16", narrow)
    t.maps("fp16", narrow if t["fp16"] else {}, "bfloat16 instead" if t["fp16"] else MAPPED)
    t.maps("logging_steps", "logging_steps")
    strategy = one_of("eval_strategy", t["evaluation_strategy"] or t["eval_strategy"], "no", "steps", "epoch")
    steps = strategy == "steps"
    note = MAPPED if steps else f"at the end only: eval_strategy is {strategy!r}"
    t.maps("eval_steps", {"eval_steps": (t["eval_steps"] or t["logging_steps"]) if steps else 0}, note)
    t.idle("mapped: see eval_steps", "eval_strategy", "evaluation_strategy")
    common.adapters(t, "lora")


def translate_relabel(t: Translation) -> None:
    """All keys of a file for relabel_with_rm.py."""
    source = t.needed("dataset_name")
    t.needed("model_name_or_path")
    t.same("", "dataset_name=data model_name_or_path=reward_model batch_size")
    splits = [t["train_split"]] if t["eval_split"] is None else [t["train_split"], t["eval_split"]]
    note = MAPPED
    if t["sanity_check"]:
        splits, note = splits[-1:], f"{MAPPED}: the last split only"
    t.idle(note, "sanity_check")
    t.maps("train_split", {"splits": splits}, note)
    t.maps("eval_split", {"splits": splits}, note)
    name = t["output_name"] or f"{source.rstrip('/')}_relabel"
    folder = f"runs/{os.path.basename(name.rstrip('/'))}"
    t.maps("output_name", {"output_dir": folder}, "a folder instead of a hub name")
    common.weights_dtype(t, "dtype")
    t.maps("tokenizer_name", "reward_tokenizer")


def translate_generate(t: Translation) -> None:
    """All keys of a file for generate_for_eval.py."""
    model, wanted = t["model_name_or_path"], t["model_paths"] or []
    if wanted or any(Path(model).glob("checkpoint-*")):
        t.maps("model_name_or_path", "run", "mapped: a folder of checkpoints")
        t.maps("model_paths", {"checkpoints": wanted})
    else:
        models = {os.path.basename(model.rstrip("/")): model}
        note = "mapped: one model, for there is no folder of checkpoints"
        t.maps("model_name_or_path", {"models": models}, note)
        t.idle("mapped: no choice", "model_paths")
    t.needed("dataset_name")
    t.same("", "dataset_name=data split temperature top_p max_new_tokens=response_length")
    t.does("engine", {"engine": "vllm"}, "generate_for_eval.py samples with vLLM")
    common.weights_dtype(t, "dtype")
    folder = t["dataset_path"] or os.path.join(model, _GENERATIONS)
    t.maps("dataset_path", {"output_dir": folder}, "mapped; <name>.jsonl for every model")
    t.maps("sanity_check", {"max_prompts": _SANITY_PROMPTS} if t["sanity_check"] else {})
    t.idle(f"{MAPPED if t['save_generations'] else HERE}: completions are always written", "save_generations")
    t.idle(f"{HERE}: one GPU for each model" if t["num_gpus"] > 1 else MAPPED, "num_gpus")


def translate_evaluate(t: Translation) -> None:
    """All keys of a file for load_and_eval.py."""
    model, folder = t["model_name_or_path"], t["dataset_path"]
    require(not (model is None and folder is None), "model_name_or_path", model, "must be given, or dataset_path")
    targets = {"generations": folder or os.path.join(model, _GENERATIONS)}
    output = {"output_dir": os.path.join(model or os.path.dirname(folder.rstrip("/")), _EVALUATION)}
    if folder is None:
        t.maps("model_name_or_path", targets | output, "mapped: what async-rlhf generate wrote in that folder")
    else:
        t.maps("dataset_path", targets if model else targets | output, "mapped: what async-rlhf generate wrote there")
        t.maps("model_name_or_path", output if model else {}, "mapped: results go there")
    t.same("", "batch_size gold_tokenizer_name=reward_tokenizer")
    note = "mapped; the score is read at the last real token, with pad = eos one token too early there"
    t.maps("gold_model_name", "reward_model", note)
    note = "mapped; perplexity is of the response's tokens, there its loss was divided by the prompt's as well"
    t.maps("ref_model_name", "ref_model", note)
    t.maps("sanity_check", {"max_prompts": _SANITY_PROMPTS} if t["sanity_check"] else {})
