"""The original's online training: online_dpo.py, rloo.py (with best-of-K) and ppov2.py."""

from __future__ import annotations

import math

from async_rlhf.compat.original import common
from async_rlhf.compat.original.algorithm import PROGRAMS
from async_rlhf.compat.original.batches import Batches, batches
from async_rlhf.compat.original.keys import DPO_UNREAD, ONLINE_DPO_ONLY, PPO_ONLY
from async_rlhf.compat.original.translation import (
    ALGORITHM,
    IDLE_HERE,
    IDLE_THERE,
    MAPPED,
    Row,
    Translation,
    one_of,
    share_of,
)
from async_rlhf.config.online import ANNOTATED_ROWS

_TABLE_TEMPERATURE = 0.01
_MASTERS = "weights and AdamW stay float32 here; in pure bfloat16 there, nearly every step rounded to nothing"
_UNREAD = {
    "base_model exp_name config": "it is read nowhere",
    "world_size num_updates micro_batch_size local_batch_size batch_size local_mini_batch_size mini_batch_size": (
        "it is computed at the start"
    ),
    "shuffle": "only an unused class has it",
    " ".join(DPO_UNREAD): "online DPO does not read it",
    "num_train_epochs max_steps": "total_episodes decides how long the run is",
    "eval_steps eval_strategy evaluation_strategy": "num_sample_generations decides how often it evaluates",
}


def translate_train(t: Translation, algorithm: str, why: str) -> None:
    """All keys of a file for one of the original's trainers."""
    t.values[ALGORITHM] = algorithm
    t.rows.append(Row(f"({ALGORITHM})", None, {ALGORITHM: algorithm}, why, given=False))
    common.environment(t)
    common.place(t, "train.output_dir", below_cwd=algorithm != "online_dpo", names_run=True)
    common.integrations(t, "train.report_to")
    _models_and_data(t)
    size = batches(t, algorithm)
    _evaluation(t, size)
    _schedule(t, size)
    _optimisation(t, algorithm)
    _generation(t, algorithm)
    _objective(t, algorithm)
    _logs(t, algorithm, size)
    reference = "mapped; crashed there; here the reference is the policy with its adapters off"
    common.adapters(t, "train.lora", read=algorithm == "online_dpo", note=reference)
    common.model_options(t)
    _without_effect(t)


def _models_and_data(t: Translation) -> None:
    t.same(
        {
            "sft_model_path": "model",
            "reward_model_path": "reward_model",
            "dataset_train_split": "data.train_split",
        }
    )
    if "max_length" in t.given:  # else 512 in both, but here a model with fewer positions is no error
        t.same({"max_length": "train.max_prompt_length"})
    tokenizer = t["model_name_or_path"]
    if tokenizer in (None, t["sft_model_path"]):
        t.idle("mapped: the tokenizer is the one of sft_model_path", "model_name_or_path")
    else:
        t.maps("model_name_or_path", {"tokenizer": tokenizer}, "mapped: only its tokenizer is used, there as here")
    t.needed("dataset_name")
    t.same({"dataset_name": "data.train"})


def _evaluation(t: Translation, size: Batches) -> None:
    tables, source = t["num_sample_generations"], t["dataset_name"]
    if t["sanity_check"] or tables <= 0:
        note = "no evaluation in a sanity check" if t["sanity_check"] else "no evaluation"
        t.maps("num_sample_generations", {"train.eval_steps": 0}, note)
        t.idle(f"{IDLE_THERE}: there are no evaluations", "dataset_test_split")
        return
    note = (
        f"one in so many of the {size.number} batches; on all prompts of the split, with rewards, at T = 0.01 as there"
    )
    note += common.one_split(source)
    steps = max(1, size.number // tables)
    targets = {"train.eval_steps": steps, "train.eval_temperature": _TABLE_TEMPERATURE, "data.eval": source}
    t.maps("num_sample_generations", targets, note)
    t.same({"dataset_test_split": "data.eval_split"})


def _schedule(t: Translation, size: Batches) -> None:
    strategy = one_of("save_strategy", t["save_strategy"], "steps", "no", "epoch")
    if t["sanity_check"]:
        t.maps("save_steps", {"train.save_steps": 0}, "only the final model in a sanity check")
    elif strategy != "steps":
        t.maps("save_steps", {"train.save_steps": 0}, f"save_strategy is {strategy!r}: only the final model")
    else:
        steps = share_of("save_steps", t["save_steps"], size.number)
        note = f"of {size.number} batches; whole checkpoints here: resumed, a run goes on bit for bit"
        t.maps("save_steps", {"train.save_steps": steps}, note)
    t.idle(MAPPED if strategy == "steps" else "mapped: see save_steps", "save_strategy")
    t.same({"save_total_limit": "train.save_total_limit", "num_ppo_epochs": "train.num_epochs"})
    resume = t["resume_from_checkpoint"]
    read = "was never read there: every run began anew"
    if resume in (None, "False", "false"):
        t.idle(f"{MAPPED}; {read}", "resume_from_checkpoint")
    elif resume in ("True", "true"):
        t.maps("resume_from_checkpoint", {"train.resume": True}, f"{MAPPED}; {read}")
    else:
        t.maps("resume_from_checkpoint", {"train.resume_from": resume}, f"{MAPPED}; {read}")
    t.same({"overwrite_output_dir": "train.overwrite_output_dir"})
    updates = t["num_mini_batches"] * t["num_ppo_epochs"]
    warmup, ratio = t["warmup_steps"], t["warmup_ratio"]
    note = MAPPED if updates == 1 else f"counted batches there; here optimiser steps, {updates} of each batch"
    if warmup > 0 or ratio == 0:
        t.maps("warmup_steps", {"train.warmup_steps": warmup * updates}, note)
        t.idle(f"{IDLE_THERE}: warmup_steps comes first" if warmup > 0 else MAPPED, "warmup_ratio")
    else:
        steps = math.ceil(round(ratio * size.number * updates, 9))
        note = f"of {size.number * updates} optimiser steps"
        t.maps("warmup_ratio", {"train.warmup_steps": steps}, note)
        t.idle("mapped: warmup_ratio decides", "warmup_steps")


def _optimisation(t: Translation, algorithm: str) -> None:
    keys = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "seed")
    t.same({key: f"train.{key}" for key in keys})
    if "gradient_checkpointing" in t.given:  # else ours decides: it moves no number
        t.same({"gradient_checkpointing": "train.gradient_checkpointing"})
    several = t["num_mini_batches"] * t["num_ppo_epochs"] > 1
    note = "mapped; stepped after every optimiser step here, once a batch and before the first there"
    t.maps("lr_scheduler_type", {"train.lr_scheduler_type": t["lr_scheduler_type"]}, note if several else MAPPED)
    note = "mapped; was ignored there, here gradients are clipped"
    t.maps("max_grad_norm", {"train.max_grad_norm": t["max_grad_norm"]}, note)
    t.maps("ddp_timeout", {"train.parallel.timeout": float(t["ddp_timeout"])})
    t.maps("disable_tqdm", {"train.progress": not t["disable_tqdm"]})
    _forward_batches(t, algorithm)
    for key in ("use_cpu", "no_cuda"):
        t.maps(key, {"train.device": "cpu"} if t[key] else {})
    t.maps("bf16", {"train.bf16": t["bf16"]}, f"{MAPPED}, as autocast; {_MASTERS}" if t["bf16"] else MAPPED)
    t.maps("fp16", {"train.fp16": t["fp16"]}, "mapped, with loss scaling, as there" if t["fp16"] else MAPPED)


def _forward_batches(t: Translation, algorithm: str) -> None:
    rows = t["local_rollout_forward_batch_size"]
    targets = {"train.annotate_batch_size": None if rows == ANNOTATED_ROWS else rows}  # null says the same
    if not (algorithm == "online_dpo" and t["vllm"]):
        targets["train.generation.batch_size"] = rows  # generate() had this many rows in the original, too
    t.maps("local_rollout_forward_batch_size", targets)


def _generation(t: Translation, algorithm: str) -> None:
    t.same(
        {
            "temperature": "train.generation.temperature",
            "response_length": "train.generation.response_length",
            "penalty_reward_value": "train.penalty_reward_value",
        }
    )
    note = "mapped; whether a completion ended is recorded here, there a cut-off one looked ended where EOS is token 0"
    penalty = t["non_eos_penalty"]
    t.maps("non_eos_penalty", {"train.non_eos_penalty": penalty}, note if penalty else MAPPED)
    _stop_token(t)
    if algorithm == "online_dpo":
        _engine(t)
        _generator_dtype(t)
        return
    in_turn = {"train.staleness": 0, "train.generation.placement": "inline"}
    t.does("generation", in_turn, f"{PROGRAMS[algorithm]} samples in turn with training")
    t.idle(f"{IDLE_THERE}: {PROGRAMS[algorithm]} accepts and does not read it", "vllm")
    t.idle(f"{IDLE_THERE}: this trainer always computes in float32", "torch_dtype")


def _stop_token(t: Translation) -> None:
    if t["stop_token"] is not None:
        one_of("stop_token", t["stop_token"], "eos")
        t.idle("mapped: a completion always ends at the end-of-sequence token here", "stop_token")
        t.idle(f"{IDLE_THERE}: stop_token decides", "stop_token_id")
    elif t["stop_token_id"] is not None:
        note = "mapped; a completion ends at the end-of-sequence token as well"
        t.maps("stop_token_id", {"train.generation.stop_token_ids": [t["stop_token_id"]]}, note)


def _engine(t: Translation) -> None:
    """Which of the three trainers: transformers, vLLM on a separate device, vLLM alternating with the learner."""
    place = "train.generation.placement"
    if not t["vllm"]:
        t.maps("vllm", {place: "inline", "train.staleness": 0}, "mapped: transformers samples, in turn with training")
        names = ("single", "sync", "vllm_device", "vllm_gpu_memory_utilization")
        t.idle(f"{IDLE_THERE}: vllm is not true", *names)
        return
    single, sync = t["single"], t["sync"]
    staleness = 0 if single or sync else 1
    engine = {"train.generation.engine": "vllm", place: "inline" if single else "process"}
    targets = engine | {"train.staleness": staleness}
    t.maps("vllm", targets, "mapped: in turn with training" if single else "mapped: vLLM in a process of its own")
    t.idle("mapped: see vllm", "single")
    note = "mapped: see vllm; batch 2 came from the starting weights there, here it comes from those after batch 1"
    t.idle(f"{IDLE_THERE}: single is always in turn" if single else note if sync else "mapped: see vllm", "sync")
    if single:
        t.idle(f"{IDLE_HERE}: sampling in turn, vLLM is on the learner's device", "vllm_device")
    else:
        t.maps("vllm_device", {"train.generation.device": t["vllm_device"]})
    t.same({"vllm_gpu_memory_utilization": "train.generation.vllm.gpu_memory_utilization"})


def _generator_dtype(t: Translation) -> None:
    name = common.dtype(t, "torch_dtype")
    if name is None:
        t.idle(f"{IDLE_HERE}: float32, for what the model's files say is not known before they are read", "torch_dtype")
        return
    targets: dict[str, object] = {"train.generation.dtype": name}
    if name != "float32" and not {"bf16", "fp16"} & t.given.keys():
        targets["train.bf16"] = True
    t.maps("torch_dtype", targets, f"mapped, for the generator; {_MASTERS}" if name != "float32" else MAPPED)


def _objective(t: Translation, algorithm: str) -> None:
    if algorithm == "online_dpo":
        one_of("loss_type", t["loss_type"], "sigmoid", "ipo")
        t.same({"loss_type": "train.loss_type", "beta": "train.beta"})
    else:
        t.idle(f"{IDLE_HERE}: only online DPO has it", *ONLINE_DPO_ONLY)
    if algorithm in ("rloo", "ppo"):
        t.same({"kl_coef": "train.kl.coef", "cliprange": "train.cliprange"})
    else:
        t.idle(f"{IDLE_THERE}: only for a number in the log", "kl_coef")
        t.idle(f"{IDLE_THERE}: this objective has no ratio", "cliprange")
    if algorithm == "ppo":
        t.same({key: f"train.{key}" for key in PPO_ONLY})
    else:
        t.idle(f"{IDLE_THERE}: only PPO reads it", *PPO_ONLY)
    t.idle(MAPPED if algorithm == "best_of_k" else "mapped: no best-of-K", "bok")


def _logs(t: Translation, algorithm: str, size: Batches) -> None:
    t.same({"run_name": "train.run_name"})
    keep = algorithm == "online_dpo" and t["save_generations"]
    if keep:
        note = "kept in memory and written at the end there; here at once, to samples.jsonl, with every batch"
        t.maps("save_generations", {"train.num_samples_logged": size.completions}, note)
        note = "every batch, as there, where it was ignored: save_generations writes with each line of the log"
        t.idle(note, "logging_steps")
        return
    t.idle("mapped: a few completions of each logged batch go to samples.jsonl", "save_generations")
    if "logging_steps" in t.given:  # if it is absent, every batch was logged, as here
        steps = share_of("logging_steps", t["logging_steps"], size.number)
        note = "mapped; was ignored there: every batch was logged"
        t.maps("logging_steps", {"train.logging_steps": max(1, steps)}, note)


def _without_effect(t: Translation) -> None:
    t.idle(
        "mapped: two batches, nothing reported, nothing saved on the way" if t["sanity_check"] else MAPPED,
        "sanity_check",
    )
    common.idle_all(t, {keys: f"{IDLE_THERE}: {why}" for keys, why in _UNREAD.items()})
    common.training_without_counterpart(t)
