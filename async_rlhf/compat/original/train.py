"""The original's online training: online_dpo.py, rloo.py (with best-of-K) and ppov2.py."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Any

from async_rlhf.compat.original import common
from async_rlhf.compat.original.common import ALGORITHM, Row, Translation, one_of
from async_rlhf.compat.original.keys import HERE, MAPPED, THERE
from async_rlhf.config.base import ConfigError, require
from async_rlhf.config.parallel import launched_ranks
from async_rlhf.config.parsing import variable_of
from async_rlhf.config.sizes import ANNOTATED_ROWS

_OF_DPO = ("single", "loss_type", "beta", "save_generations", "sync")
_OF_PPO = ("vf_coef", "lam", "gamma", "cliprange_value", "whiten_rewards")
_NAMES = {"online_?dpo": "online_dpo", "rloo": "rloo", "ppo": "ppo", r"bo(\d|k|n|_|$)": "best_of_k"}
PROGRAMS = {"online_dpo": "online_dpo.py", "rloo": "rloo.py", "ppo": "ppov2.py", "best_of_k": "rloo.py with bok"}
"""The original's program for each algorithm."""
_OF_A_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")
_SANITY_BATCHES = 2
_TABLE_TEMPERATURE = 0.01
_MASTERS = "weights and AdamW stay float32 here; in pure bfloat16 there, nearly every step rounded to nothing"


def find_algorithm(values: Mapping[str, Any], chosen: str | None, file: str) -> tuple[str, str]:
    """Which of the original's trainers a file is for, and the reason: there the program decides, not the file.

    Args:
        values: keys of the original and their values.
        chosen: what the command line or the environment asks for.
        file: the file's name.

    Raises:
        ConfigError: nothing tells the algorithm, or two hints contradict each other.
    """
    *others, last = PROGRAMS
    rule = f"must be one of {', '.join(PROGRAMS)}: the original has no other (for another one, migrate the file first)"
    require(chosen is None or chosen in PROGRAMS, ALGORITHM, chosen, rule)
    if values.get("bok"):
        require(chosen in (None, "best_of_k"), ALGORITHM, chosen, "must be best_of_k with bok: true")
        return "best_of_k", "bok is true"
    if chosen is not None:
        return chosen, "asked for"
    dpo = [key for key in _OF_DPO if key in values] + (["vllm"] if values.get("vllm") else [])
    ppo = [key for key in _OF_PPO if key in values]
    if bool(dpo) != bool(ppo):
        return ("online_dpo" if dpo else "ppo"), f"only its trainer reads {(dpo or ppo)[0]}"
    names = {"output_dir": values.get("output_dir"), "run_name": values.get("run_name"), "the file's name": file}
    for source, name in names.items():
        for pattern, algorithm in _NAMES.items():
            if match := re.match(pattern, os.path.basename(str(name or "").rstrip("/"))):
                return algorithm, f"{source} begins with {match.group()!r}"
    raise ConfigError(
        "algorithm: the file does not tell which of the original's programs it is for; give --algorithm "
        f"{', '.join(others)} or {last}"
    )


def translate_train(t: Translation, algorithm: str, why: str) -> None:
    """All keys of a file for one of the original's trainers."""
    t.values[ALGORITHM] = algorithm
    t.rows.append(Row(f"({ALGORITHM})", None, {ALGORITHM: algorithm}, why))
    common.place(t, "train.output_dir", below_cwd=algorithm != "online_dpo", names_run=True)
    common.integrations(t, "train.report_to")
    _models_and_data(t)
    number, completions = batches(t, algorithm)
    _evaluation(t, number)
    _schedule(t, number)
    _optimisation(t, algorithm)
    _generation(t, algorithm)
    _objective(t, algorithm)
    _logs(t, algorithm, number, completions)
    if algorithm == "online_dpo":
        note = "mapped; crashed there; here the reference is the policy with its adapters off"
        common.adapters(t, "train.lora", note)
    note = "mapped: two batches, nothing reported, nothing saved on the way"
    t.idle(note if t["sanity_check"] else MAPPED, "sanity_check")


def _models_and_data(t: Translation) -> None:
    t.same("", "sft_model_path=model reward_model_path=reward_model dataset_train_split=data.train_split")
    if "max_length" in t.values_of_file:  # else 512 in both, but here a model with fewer positions is no error
        t.same("train.", "max_length=max_prompt_length")
    if t["model_name_or_path"] in (None, t["sft_model_path"]):
        t.idle("mapped: the tokenizer is the one of sft_model_path", "model_name_or_path")
    else:
        t.maps("model_name_or_path", "tokenizer", "mapped: only its tokenizer is used, there as here")
    t.needed("dataset_name")
    t.maps("dataset_name", "data.train")


def batches(t: Translation, algorithm: str) -> tuple[int, int]:
    """Translate the keys that make up a batch, and return the number of batches and a batch's completions.

    In the original, batch_size = per_device_train_batch_size x gradient_accumulation_steps x num_mini_batches x ranks
    counts prompts, but in RLOO completions, so that its batch has 1 / rloo_k as many prompts; total_episodes counts the
    same. Here all of them count prompts.

    Raises:
        ConfigError: the numbers are not divisible.
    """
    per_device, accumulation = t["per_device_train_batch_size"], t["gradient_accumulation_steps"]
    minis, samples, episodes = t["num_mini_batches"], t["rloo_k"], t.needed("total_episodes")
    for key in (*_OF_A_BATCH, "num_mini_batches", "rloo_k", "total_episodes"):
        require(t[key] >= 1, key, t[key], "must be at least 1")
    said = t.overrides.get("train.parallel.ranks", os.environ.get(variable_of("train.parallel.ranks"), "null"))
    ranks = int(said) if said.isdecimal() else launched_ranks()
    size = per_device * accumulation * minis * ranks
    if t["sanity_check"]:
        episodes = _SANITY_BATCHES * size
    unit = "completions" if algorithm == "rloo" else "prompts"
    rule = (
        f"must be a multiple of the batch of {size} {unit} (per_device_train_batch_size {per_device} x "
        f"gradient_accumulation_steps {accumulation} x num_mini_batches {minis} x {ranks} ranks)"
    )
    require(episodes % size == 0, "total_episodes", episodes, rule)
    share = samples if algorithm == "rloo" else 1
    # What is trained on at once: in RLOO one of the two factors, divided by the completions of a prompt.
    divided = next((key for key in reversed(_OF_A_BATCH) if t[key] % share == 0), None)
    rule = (
        f"it or per_device_train_batch_size ({per_device}) must be a multiple of rloo_k ({samples}): RLOO trains on "
        f"all {samples} completions of a prompt"
    )
    require(divided is not None, "gradient_accumulation_steps", accumulation, rule)
    note = f"divided by rloo_k: counts passes over completions there; here each stands for {samples} passes"
    for key in _OF_A_BATCH:
        part = share if key == divided else 1
        t.maps(key, {f"train.{key}": t[key] // part}, note if algorithm == "rloo" and key == divided else MAPPED)
    shuffled = "mapped; mini-batches are shuffled by the seed here, there in order or by no seed"
    t.maps("num_mini_batches", "train.num_mini_batches", shuffled if minis > 1 else MAPPED)
    note = "divided by rloo_k: counts completions there, prompts here" if algorithm == "rloo" else MAPPED
    note = f"{_SANITY_BATCHES} batches for a sanity check" if t["sanity_check"] else note
    t.maps("total_episodes", {"train.total_episodes": episodes // share}, note)
    if algorithm == "ppo":
        t.idle(f"{THERE}: PPO draws one completion of a prompt", "rloo_k")
    else:
        t.maps("rloo_k", "train.samples_per_prompt")
    return episodes // size, size // share * (1 if algorithm == "ppo" else samples)


def _evaluation(t: Translation, number: int) -> None:
    tables, source = t["num_sample_generations"], t["dataset_name"]
    if t["sanity_check"] or tables <= 0:
        note = "no evaluation in a sanity check" if t["sanity_check"] else "no evaluation"
        t.maps("num_sample_generations", {"train.eval_steps": 0}, note)
        t.idle(f"{THERE}: there are no evaluations", "dataset_test_split")
        return
    note = f"one in so many of the {number} batches; on all prompts of the split, with rewards, at T = 0.01 as there"
    targets = {"train.eval_steps": max(1, number // tables), "train.eval_temperature": _TABLE_TEMPERATURE}
    t.maps("num_sample_generations", targets | {"data.eval": source}, note + common.one_split(source))
    t.maps("dataset_test_split", "data.eval_split")


def _share_of(t: Translation, key: str, total: int) -> int:
    """Steps as transformers counts them: below 1 a share of all, rounded up."""
    value = t[key]
    rule = "must be an integer, or a share of all batches below 1"
    require(value >= 0 and (value <= 1 or value == int(value)), key, value, rule)
    # 0.2 x 15 is 3.0000000000000004 in floating point, and must not become 4.
    return int(value) if value >= 1 or value == 0 else max(1, math.ceil(round(total * value, 9)))


def _schedule(t: Translation, number: int) -> None:
    strategy = one_of("save_strategy", t["save_strategy"], "steps", "no", "epoch")
    steps, note = 0, f"save_strategy is {strategy!r}: only the final model"
    if t["sanity_check"]:
        note = "only the final model in a sanity check"
    elif strategy == "steps":
        steps = _share_of(t, "save_steps", number)
        note = f"of {number} batches; whole checkpoints here: resumed, a run goes on bit for bit"
    t.maps("save_steps", {"train.save_steps": steps}, note)
    t.idle(MAPPED if strategy == "steps" else "mapped: see save_steps", "save_strategy")
    t.same("train.", "save_total_limit num_ppo_epochs=num_epochs")
    resume, goes_on = t["resume_from_checkpoint"], {"train.resume": True}
    known: dict[str | None, dict[str, Any]] = {None: {}, "False": {}, "false": {}, "True": goes_on, "true": goes_on}
    targets = known.get(resume, {"train.resume_from": resume})
    t.maps("resume_from_checkpoint", targets, "mapped; was never read there: every run began anew")
    t.maps("overwrite_output_dir", "train.overwrite_output_dir")
    updates = t["num_mini_batches"] * t["num_ppo_epochs"]
    warmup, ratio = t["warmup_steps"], t["warmup_ratio"]
    if warmup > 0 or ratio == 0:
        note = MAPPED if updates == 1 else f"counted batches there; here optimiser steps, {updates} of each batch"
        t.maps("warmup_steps", {"train.warmup_steps": warmup * updates}, note)
        t.idle(f"{THERE}: warmup_steps comes first" if warmup > 0 else MAPPED, "warmup_ratio")
    else:
        steps = math.ceil(round(ratio * number * updates, 9))
        t.maps("warmup_ratio", {"train.warmup_steps": steps}, f"of {number * updates} optimiser steps")
        t.idle("mapped: warmup_ratio decides", "warmup_steps")


def _optimisation(t: Translation, algorithm: str) -> None:
    t.same("train.", "learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon seed")
    if "gradient_checkpointing" in t.values_of_file:  # else ours decides: it moves no number
        t.same("train.", "gradient_checkpointing")
    several = t["num_mini_batches"] * t["num_ppo_epochs"] > 1
    note = "mapped; stepped after every optimiser step here, once a batch and before the first there"
    t.maps("lr_scheduler_type", "train.lr_scheduler_type", note if several else MAPPED)
    t.maps("max_grad_norm", "train.max_grad_norm", "mapped; was ignored there, here gradients are clipped")
    t.maps("ddp_timeout", {"train.parallel.timeout": float(t["ddp_timeout"])})
    t.maps("disable_tqdm", {"train.progress": not t["disable_tqdm"]})
    rows = t["local_rollout_forward_batch_size"]
    targets = {"train.annotate_batch_size": None if rows == ANNOTATED_ROWS else rows}  # null says the same
    if not (algorithm == "online_dpo" and t["vllm"]):
        targets["train.generation.batch_size"] = rows  # generate() had this many rows in the original, too
    t.maps("local_rollout_forward_batch_size", targets)
    for key in ("use_cpu", "no_cuda"):
        t.maps(key, {"train.device": "cpu"} if t[key] else {})
    t.maps("bf16", "train.bf16", f"{MAPPED}, as autocast; {_MASTERS}" if t["bf16"] else MAPPED)
    t.maps("fp16", "train.fp16", "mapped, with loss scaling, as there" if t["fp16"] else MAPPED)


def _generation(t: Translation, algorithm: str) -> None:
    t.same("train.generation.", "temperature response_length")
    t.same("train.", "penalty_reward_value")
    note = "mapped; whether a completion ended is recorded here, there a cut-off one looked ended where EOS is token 0"
    t.maps("non_eos_penalty", "train.non_eos_penalty", note if t["non_eos_penalty"] else MAPPED)
    if t["stop_token"] is not None:
        one_of("stop_token", t["stop_token"], "eos")
        t.idle("mapped: a completion always ends at the end-of-sequence token here", "stop_token")
        t.idle(f"{THERE}: stop_token decides", "stop_token_id")
    elif t["stop_token_id"] is not None:
        note = "mapped; a completion ends at the end-of-sequence token as well"
        t.maps("stop_token_id", {"train.generation.stop_token_ids": [t["stop_token_id"]]}, note)
    if algorithm == "online_dpo":
        _engine(t)
        bf16 = {} if {"bf16", "fp16"} & t.values_of_file.keys() else {"train.bf16": True}
        common.weights_dtype(t, "train.generation.dtype", f"mapped, for the generator; {_MASTERS}", bf16)
        return
    in_turn = {"train.staleness": 0, "train.generation.placement": "inline"}
    t.does("generation", in_turn, f"{PROGRAMS[algorithm]} samples in turn with training")
    t.idle(f"{THERE}: {PROGRAMS[algorithm]} accepts and does not read it", "vllm")
    t.idle(f"{THERE}: this trainer always computes in float32", "torch_dtype")


def _engine(t: Translation) -> None:
    """Which of the three trainers: transformers, vLLM on a separate device, vLLM alternating with the learner."""
    placement, single, sync = "train.generation.placement", t["single"], t["sync"]
    if not t["vllm"]:
        t.maps(
            "vllm", {placement: "inline", "train.staleness": 0}, "mapped: transformers samples, in turn with training"
        )
        t.idle(f"{THERE}: vllm is not true", "single", "sync", "vllm_device", "vllm_gpu_memory_utilization")
        return
    engine = {"train.generation.engine": "vllm", placement: "inline" if single else "process"}
    note = "mapped: in turn with training" if single else "mapped: vLLM in a process of its own"
    t.maps("vllm", engine | {"train.staleness": 0 if single or sync else 1}, note)
    if single:
        t.idle(f"{THERE}: single is always in turn", "sync")
        t.idle(f"{HERE}: sampling in turn, vLLM is on the learner's device", "vllm_device")
    else:
        first = "; batch 2 came from the starting weights there, here it comes from those after batch 1"
        t.idle(f"mapped: see vllm{first if sync else ''}", "sync")
        t.maps("vllm_device", "train.generation.device")
    t.idle("mapped: see vllm", "single")
    t.maps("vllm_gpu_memory_utilization", "train.generation.vllm.gpu_memory_utilization")


def _objective(t: Translation, algorithm: str) -> None:
    if algorithm == "online_dpo":
        one_of("loss_type", t["loss_type"], "sigmoid", "ipo")
        t.same("train.", "loss_type beta")
    if algorithm in ("rloo", "ppo"):
        t.same("train.", "kl_coef=kl.coef cliprange")
    else:
        t.idle(f"{THERE}: only for a number in the log", "kl_coef")
        t.idle(f"{THERE}: this objective has no ratio", "cliprange")
    if algorithm == "ppo":
        t.same("train.", "vf_coef cliprange_value gamma lam whiten_rewards")
    t.idle(MAPPED if algorithm == "best_of_k" else "mapped: no best-of-K", "bok")


def _logs(t: Translation, algorithm: str, number: int, completions: int) -> None:
    t.maps("run_name", "train.run_name")
    if algorithm == "online_dpo" and t["save_generations"]:
        note = "kept in memory and written at the end there; here at once, to samples.jsonl, with every batch"
        t.maps("save_generations", {"train.num_samples_logged": completions}, note)
        note = "every batch, as there, where it was ignored: save_generations writes with each line of the log"
        t.idle(note, "logging_steps")
        return
    if algorithm == "online_dpo":
        t.idle("mapped: a few completions of each logged batch go to samples.jsonl", "save_generations")
    if "logging_steps" in t.values_of_file:  # if it is absent, every batch was logged, as here
        steps = max(1, _share_of(t, "logging_steps", number))
        t.maps("logging_steps", {"train.logging_steps": steps}, "mapped; was ignored there: every batch was logged")
