"""The original's supervised programs: sft.py, reward_modeling.py and relabel_with_rm.py."""

from __future__ import annotations

from pathlib import Path

from async_rlhf.compat.original import common
from async_rlhf.compat.original.translation import IDLE_HERE, IDLE_THERE, MAPPED, Translation, one_of
from async_rlhf.config.base import require

_SANITY_ROWS = 64
_TRL_MAX_LENGTH = 1024  # SFTTrainer's default if max_seq_length is not given
_IDLE = {
    "max_steps": f"{IDLE_HERE}: num_epochs decides how long the stage is",
    "adam_beta1 adam_beta2 adam_epsilon": f"{IDLE_HERE}: AdamW has torch's defaults, 0.9, 0.999 and 1e-8",
    "max_grad_norm": f"{IDLE_HERE}: gradients are clipped to norm 1",
    "save_steps save_strategy save_total_limit": f"{IDLE_HERE}: checkpoints only serve resuming, by save_steps here",
    "resume_from_checkpoint": f"{IDLE_HERE}: --resume goes on from the stage's own",
    "run_name": f"{IDLE_HERE}: the output folder names the run",
    "use_cpu no_cuda": f"{IDLE_HERE}: the first GPU, or the CPU, unless device says",
    "disable_tqdm ddp_timeout": f"{IDLE_HERE}: it has no counterpart",
}


def translate_sft(t: Translation) -> None:
    """All keys of a file for sft.py."""
    one_of("task_type", t["task_type"], "tldr", "hh")
    _stage(t)
    columns = "query_reference_response" if t["task_type"] == "tldr" else "prompt and chosen"
    t.maps("task_type", {"completion_only": False}, f"trains on the whole of {columns}, as there")
    length = t["max_seq_length"]
    note = "longer rows are dropped and counted here, cut off there"
    t.maps("max_seq_length", {"max_length": _TRL_MAX_LENGTH if length is None else length}, note)
    t.idle(f"{IDLE_HERE}: every row is a sequence of its own" if t["packing"] else MAPPED, "packing")
    common.idle_all(
        t,
        {
            "output_model_name model_init_kwargs": f"{IDLE_THERE}: sft.py does not read it",
            "dataset_text_field": f"{IDLE_THERE}: task_type decides",
            "dataset_num_proc dataset_batch_size": f"{IDLE_HERE}: it changes no result",
            "dataset_kwargs": f"{IDLE_HERE}: it has no counterpart",
            "eval_packing num_of_sequences chars_per_token": f"{IDLE_HERE}: it is for packing",
        },
    )
    common.model_options(t)
    _finish(t)


def translate_reward(t: Translation) -> None:
    """All keys of a file for reward_modeling.py."""
    _stage(t)
    t.does("centring", {"center": False}, "scores are not centred there; true keeps their mean at 0")
    if t["max_length"] is not None:
        t.maps("max_length", {"max_length": t["max_length"]}, "longer pairs are dropped and counted; they failed there")
    same = t["tokenizer_name"] == t["model_name_or_path"]
    t.idle(MAPPED if same else f"{IDLE_HERE}: the model's own tokenizer is taken", "tokenizer_name")
    common.model_options(t, read=("model_revision", "trust_remote_code"))
    _finish(t)


def _stage(t: Translation) -> None:
    common.environment(t)
    common.place(t, "output_dir", below_cwd=True, names_run=False)
    common.integrations(t, "report_to")
    for key in ("model_name_or_path", "dataset_name"):
        t.needed(key)
    t.same({"model_name_or_path": "model"})
    source = t["dataset_name"]
    t.maps("dataset_name", {"train": source, "eval": source}, MAPPED + common.one_split(source))
    slices = f"[:{_SANITY_ROWS}]" if t["sanity_check"] and not Path(t["dataset_name"]).exists() else ""
    t.maps("dataset_train_split", {"train_split": t["dataset_train_split"] + slices})
    t.maps("dataset_eval_split", {"eval_split": t["dataset_eval_split"] + slices})
    note = f"mapped: the first {_SANITY_ROWS} rows" if slices else f"{IDLE_HERE}: all rows of a local data set are used"
    t.idle(note if t["sanity_check"] else MAPPED, "sanity_check")
    t.same({"num_train_epochs": "num_epochs", "overwrite_output_dir": "overwrite"})
    keys = ("per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "lr_scheduler_type")
    t.same(
        {key: key for key in (*keys, "weight_decay", "warmup_ratio", "warmup_steps", "seed", "gradient_checkpointing")}
    )
    bf16, fp16 = t["bf16"], t["fp16"]
    t.maps("bf16", {"bf16": bf16 or fp16})
    t.maps("fp16", {"bf16": bf16 or fp16} if fp16 else {}, "bfloat16 instead" if fp16 else MAPPED)
    t.idle(f"{IDLE_THERE}: weights are float32, there as here", "torch_dtype")
    _steps(t)
    common.adapters(t, "lora")


def _steps(t: Translation) -> None:
    logging = t["logging_steps"]
    t.maps("logging_steps", {"logging_steps": logging})
    strategy = t["evaluation_strategy"] or t["eval_strategy"]
    one_of("eval_strategy", strategy, "no", "steps", "epoch")
    steps = strategy == "steps"
    note = MAPPED if steps else f"at the end only: eval_strategy is {strategy!r}"
    t.maps("eval_steps", {"eval_steps": (t["eval_steps"] or logging) if steps else 0}, note)
    t.idle("mapped: see eval_steps", "eval_strategy", "evaluation_strategy")


def _finish(t: Translation) -> None:
    common.idle_all(t, _IDLE)
    common.training_without_counterpart(t)


def translate_relabel(t: Translation) -> None:
    """All keys of a file for relabel_with_rm.py."""
    common.environment(t)
    for key in ("dataset_name", "model_name_or_path"):
        t.needed(key)
    t.same({"dataset_name": "data", "model_name_or_path": "reward_model", "batch_size": "batch_size"})
    train, held_out = t["train_split"], t["eval_split"]
    splits = [train] if held_out is None else [train, held_out]
    if t["sanity_check"]:
        splits = splits[-1:]
    note = f"{MAPPED}: the last split only" if t["sanity_check"] else MAPPED
    t.idle(note, "sanity_check")
    t.maps("train_split", {"splits": splits}, note)
    t.maps("eval_split", {"splits": splits}, note)
    name = t["output_name"] or f"{t['dataset_name'].rstrip('/')}_relabel"
    t.maps(
        "output_name", {"output_dir": f"runs/{name.rstrip('/').rpartition('/')[2]}"}, "a folder instead of a hub name"
    )
    common.weights_dtype(t, "dtype")
    t.idle(f"{IDLE_HERE}: upload the finished folder with `huggingface-cli upload`", "push_to_hub")
    t.same({"tokenizer_name": "reward_tokenizer"})
    t.idle(f"{IDLE_THERE}: relabel_with_rm.py does not read it", "template", "seed")
    _bits(t)
    common.model_options(t, read=("attn_implementation",))
    common.adapters(t, "", read=False)


def _bits(t: Translation) -> None:
    """How many bits the linear layers of the model that labels are held in."""
    eight, four = bool(t["load_in_8bit"]), bool(t["load_in_4bit"])
    require(not (eight and four), "load_in_4bit", four, "must be false with load_in_8bit: there are 4 bits or 8")
    for key, own, bits in (("load_in_8bit", eight, 8), ("load_in_4bit", four, 4)):
        t.maps(key, {"reward_model_bits": bits} if own else {})
    kind = t["bnb_4bit_quant_type"]
    t.idle(MAPPED if kind == "nf4" else f"{IDLE_HERE}: 4 bits are nf4", "bnb_4bit_quant_type")
    t.idle(f"{IDLE_HERE}: the scales of blocks are not quantised again", "use_bnb_nested_quant")
