"""The original's evaluation: generate_for_eval.py and load_and_eval.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from async_rlhf.compat.original import common
from async_rlhf.compat.original.translation import IDLE_HERE, IDLE_THERE, MAPPED, Translation
from async_rlhf.config.base import require

_SANITY_PROMPTS = 10
_GENERATIONS = "_generations"
_EVALUATION = "_evaluation"


def translate_generate(t: Translation) -> None:
    """All keys of a file for generate_for_eval.py."""
    common.environment(t)
    _sampled_models(t)
    t.needed("dataset_name")
    t.same(
        {
            "dataset_name": "data",
            "split": "split",
            "temperature": "temperature",
            "top_p": "top_p",
            "max_new_tokens": "response_length",
        }
    )
    t.does("engine", {"engine": "vllm"}, "generate_for_eval.py samples with vLLM")
    common.weights_dtype(t, "dtype")
    place = t["dataset_path"] or os.path.join(t["model_name_or_path"], _GENERATIONS)
    t.maps("dataset_path", {"output_dir": place}, "mapped; <name>.jsonl for every model")
    _sanity(t)
    t.idle(f"{MAPPED if t['save_generations'] else IDLE_HERE}: completions are always written", "save_generations")
    t.idle(f"{IDLE_HERE}: one GPU for each model" if t["num_gpus"] > 1 else MAPPED, "num_gpus")
    t.idle(f"{IDLE_HERE}: the model's own tokenizer is taken", "tokenizer_name")
    t.idle(f"{IDLE_HERE}: checkpoints of async-rlhf are whole models", "base_model_name", "base_model_revision")
    t.idle(f"{IDLE_THERE}: generate_for_eval.py does not read it", "wandb_run_id")


def _sampled_models(t: Translation) -> None:
    model, wanted = t["model_name_or_path"], t["model_paths"] or []
    folder = Path(model)
    if wanted or any(folder.glob("checkpoint-*")):
        t.maps("model_name_or_path", {"run": model}, "mapped: a folder of checkpoints")
        t.maps("model_paths", {"checkpoints": wanted})
        return
    models = {os.path.basename(model.rstrip("/")): model}
    t.maps("model_name_or_path", {"models": models}, "mapped: one model, for there is no folder of checkpoints")
    t.idle("mapped: no choice", "model_paths")


def translate_evaluate(t: Translation) -> None:
    """All keys of a file for load_and_eval.py."""
    common.environment(t)
    model, place = t["model_name_or_path"], t["dataset_path"]
    if place is None:
        require(model is not None, "model_name_or_path", model, "must be given, or dataset_path")
    generations = place or os.path.join(model, _GENERATIONS)
    targets: dict[str, Any] = {"generations": generations}
    output = {"output_dir": os.path.join(model or os.path.dirname(place.rstrip("/")), _EVALUATION)}
    if place is None:
        t.maps("model_name_or_path", targets | output, "mapped: what async-rlhf generate wrote in that folder")
    else:
        t.maps("dataset_path", targets if model else targets | output, "mapped: what async-rlhf generate wrote there")
        t.maps("model_name_or_path", output if model else {}, "mapped: results go there")
    t.same({"batch_size": "batch_size", "gold_tokenizer_name": "reward_tokenizer"})
    note = "mapped; the score is read at the last real token, with pad = eos one token too early there"
    t.maps("gold_model_name", {"reward_model": t["gold_model_name"]}, note)
    note = "mapped; perplexity is of the response's tokens, there its loss was divided by the prompt's as well"
    t.maps("ref_model_name", {"ref_model": t["ref_model_name"]}, note)
    _sanity(t)
    t.idle(f"{IDLE_HERE}: every model is loaded in float32, the reward model as well", "torch_dtype")
    t.idle(f"{IDLE_THERE}: load_and_eval.py does not read it", "gold_model_revision")
    t.idle(f"{IDLE_HERE}: results are files in output_dir", "wandb_run_id")


def _sanity(t: Translation) -> None:
    if t["sanity_check"]:
        t.maps("sanity_check", {"max_prompts": _SANITY_PROMPTS})
    t.idle(MAPPED, "sanity_check")
