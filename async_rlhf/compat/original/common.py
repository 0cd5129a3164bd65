"""Keys that several of the original's programs share: places, integrations, adapters, and keys without counterpart."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec

from async_rlhf.compat.original.keys import ENVIRONMENT, TRAINING_WITHOUT_COUNTERPART
from async_rlhf.compat.original.translation import IDLE_HERE, IDLE_THERE, MAPPED, Translation
from async_rlhf.config.base import require

_INTEGRATIONS = ("tensorboard", "wandb")
_HUB = f"{IDLE_HERE}: upload the finished folder with `huggingface-cli upload`, or give train.push_to_hub to train"
_ONE_OPTIMIZER = f"{IDLE_HERE}: the optimiser is torch's AdamW"
_RANKS = f"{IDLE_HERE}: train.parallel, or accelerate's config file, says how ranks share the work"
_REASONS = {
    "hub_always_push hub_model_id hub_private_repo hub_strategy hub_token push_to_hub push_to_hub_model_id "
    "push_to_hub_organization push_to_hub_token": _HUB,
    "adafactor optim optim_args optim_target_modules": _ONE_OPTIMIZER,
    "accelerator_config ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters deepspeed fsdp "
    "fsdp_config fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap local_rank": _RANKS,
    "per_device_eval_batch_size per_gpu_eval_batch_size": f"{IDLE_HERE}: rows without gradient have a batch size of "
    "their own",
    "per_gpu_train_batch_size": f"{IDLE_HERE}: per_device_train_batch_size is the key",
    "lr_scheduler_kwargs": f"{IDLE_HERE}: schedules have transformers' default shape",
    "neftune_noise_alpha label_smoothing_factor": f"{IDLE_HERE}: not implemented",
}
_REASON = {key: reason for keys, reason in _REASONS.items() for key in keys.split()}


def training_without_counterpart(t: Translation) -> None:
    """Fields of TrainingArguments that are accepted but change nothing here."""
    for key in (*TRAINING_WITHOUT_COUNTERPART, "push_to_hub"):
        t.idle(_REASON.get(key, f"{IDLE_HERE}: it has no counterpart"), key)


_EXPORTED = (
    "CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING CUDA_VISIBLE_DEVICES",
    "MKL_NUM_THREADS OMP_NUM_THREADS TOKENIZERS_PARALLELISM",
    "HF_DATASETS_OFFLINE HF_HUB_OFFLINE HF_HUB_DISABLE_TELEMETRY TRANSFORMERS_OFFLINE",
    "DATASETS_VERBOSITY HF_HUB_DISABLE_PROGRESS_BARS TRANSFORMERS_VERBOSITY",
    "GLOO_SOCKET_IFNAME NCCL_DEBUG NCCL_IB_DISABLE NCCL_P2P_DISABLE NCCL_SHM_DISABLE NCCL_SOCKET_IFNAME",
    "PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF",
    "WANDB_DISABLED WANDB_ENTITY WANDB_GROUP WANDB_JOB_TYPE WANDB_LOG_MODEL WANDB_MODE WANDB_NAME WANDB_NOTES",
    "WANDB_PROJECT WANDB_RESUME WANDB_RUN_GROUP WANDB_RUN_ID WANDB_SILENT WANDB_TAGS WANDB_WATCH",
)
EXPORTED = frozenset(name for names in _EXPORTED for name in names.split())
"""Variables that a file may set. Others may make this program load libraries or modules (LD_PRELOAD, PYTHONPATH) or
send keys to other hosts (WANDB_BASE_URL, HF_ENDPOINT), or are keys themselves.
"""


def environment(t: Translation) -> None:
    """Translate the mapping whose entries are exported.

    Raises:
        ConfigError: a file may not set one of the variables, or a value is not on one line.
    """
    if ENVIRONMENT in t.given:
        for name, value in t.given[ENVIRONMENT].items():
            right = (
                "a file may set only " + ", ".join(sorted(EXPORTED)) + "; export others in the shell, if you mean them"
            )
            require(name in EXPORTED, ENVIRONMENT, name, right)
            plain = isinstance(value, (str, int, float)) and str(value).isprintable()
            require(plain, f"{ENVIRONMENT}.{name}", value, "must be text on one line, or a number")
            t.environment[name] = str(value)
        t.idle("exported to the environment, but not by --dry-run", ENVIRONMENT)


def place(t: Translation, target: str, *, below_cwd: bool, names_run: bool) -> None:
    """Translate where results go, and the run's id at Weights & Biases.

    Args:
        t: the translation.
        target: our key of the output folder.
        below_cwd: whether this program of the original put the current folder's name below the parent.
        names_run: whether it made an id from wandb_run_id.
    """
    folder, parent, run_id = t.needed("output_dir"), t["output_global_parent_dir"], t["wandb_run_id"]
    job = os.environ.get("SLURM_JOB_ID")
    parent_note = f"{IDLE_THERE}: read only with wandb_run_id: slurm"
    result = folder
    if run_id == "slurm" and names_run:
        result = os.path.join(*filter(None, (parent, job, folder)))
        parent_note = "part of output_dir"
        if job:
            t.environment["WANDB_RUN_ID"] = f"{job}_{os.path.basename(folder)}"
            t.idle(f"SLURM_JOB_ID is {job}: WANDB_RUN_ID={t.environment['WANDB_RUN_ID']}", "wandb_run_id")
        t.idle(
            "SLURM_JOB_ID is not set (the original fails then): the folder and the run have no number", "wandb_run_id"
        )
    elif below_cwd and parent:
        result = os.path.join(parent, os.path.basename(os.getcwd()), folder)
        parent_note = "part of output_dir, with the name of the current folder, as there"
    t.maps("output_dir", {target: result}, MAPPED if result == folder else "mapped, below its parent")
    t.idle(parent_note, "output_global_parent_dir")
    if run_id == "snow":
        t.idle("a defect there: it gave every run the same id; ignored, each run has its own", "wandb_run_id")
    elif run_id is not None and names_run and run_id != "slurm":
        t.environment["WANDB_RUN_ID"] = run_id
        t.idle(f"exported as WANDB_RUN_ID={run_id}", "wandb_run_id")
    t.idle(f"{IDLE_THERE}: this program knows only the value snow", "wandb_run_id")


def integrations(t: Translation, target: str) -> None:
    """Translate report_to: transformers 4.43 reports to everything that is installed unless told otherwise."""
    wanted, note = t["report_to"], MAPPED
    if t["sanity_check"]:
        wanted, note = [], "nothing in a sanity check"
    elif wanted is None or wanted == ["all"]:
        wanted = [name for name in _INTEGRATIONS if find_spec(name) is not None]
        note = f"whatever is installed of {', '.join(_INTEGRATIONS)}"
    elif wanted == ["none"]:
        wanted = []
    t.maps("report_to", {target: wanted}, note)


def adapters(t: Translation, prefix: str, *, read: bool = True, note: str = MAPPED) -> None:
    """peft's low-rank adapters.

    Args:
        t: the translation.
        prefix: of our keys.
        note: on use_peft.
        read: whether this program of the original read them at all.
    """
    names = ("lora_r", "lora_alpha", "lora_target_modules")
    if not read:
        t.idle(f"{IDLE_THERE}: this trainer has no adapters", "use_peft", *names)
    elif t["use_peft"]:
        wanted = t["lora_target_modules"]
        chosen = "; without lora_target_modules peft chose by architecture there, every linear layer here"
        t.maps("use_peft", {}, note + (chosen if wanted is None else ""))
        t.maps("lora_r", {f"{prefix}.rank": t["lora_r"]})
        t.maps("lora_alpha", {f"{prefix}.alpha": t["lora_alpha"]})
        t.maps("lora_target_modules", {f"{prefix}.target_modules": [] if wanted in (None, ["all-linear"]) else wanted})
        t.idle(f"{IDLE_HERE}: dropout is off", "lora_dropout")
        t.idle(f"{IDLE_HERE}: only adapters are trained", "lora_modules_to_save")
        t.idle(f"{IDLE_HERE}: it follows from the model", "lora_task_type")
    else:
        t.maps("use_peft", {f"{prefix}.rank": 0})
        t.idle(f"{IDLE_THERE}: use_peft is not true", *names)
    t.idle(f"{IDLE_THERE}: there are no adapters", "lora_dropout", "lora_modules_to_save", "lora_task_type")


def model_options(t: Translation, read: tuple[str, ...] = ()) -> None:
    """How a model is loaded.

    Args:
        t: the translation.
        read: which of these keys this program of the original read.
    """
    if "model_revision" in read and t["model_revision"] != "main":
        t.maps(
            "model_revision", {"model": f"{t['model_name_or_path']}@{t['model_revision']}"}, "part of the model's name"
        )
    if "trust_remote_code" in read and t["trust_remote_code"]:
        t.same({"trust_remote_code": "trust_remote_code"})
    t.idle(
        MAPPED if "trust_remote_code" in read else f"{IDLE_THERE}: this program does not read it", "trust_remote_code"
    )
    reasons = {
        "model_revision": "the main revision is what is loaded",
        "attn_implementation": "transformers' default attention",
    }
    reasons |= dict.fromkeys(("load_in_8bit", "load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant"), "")
    for key, reason in reasons.items():
        t.idle(f"{IDLE_HERE}: {reason}" if key in read else f"{IDLE_THERE}: this program does not read it", key)


def dtype(t: Translation, name: str) -> str | None:
    """A dtype as we spell it; None for "auto" or if none is given."""
    found = (t[name] or "auto").removeprefix("torch.")
    spelt = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "auto": None}.get(
        found, found
    )
    right = "must be float32, bfloat16, float16 or auto"
    require(spelt in (None, "float32", "bfloat16", "float16"), name, t[name], right)
    return spelt


def one_split(source: str) -> str:
    """An addition to a note on held-out data: a single file has no splits."""
    single = os.path.splitext(source)[1] in (".jsonl", ".json", ".csv", ".parquet")
    return "; a file has one split: held out is what is trained on" if single else ""


def weights_dtype(t: Translation, target: str) -> None:
    """The dtype of a model that is loaded but not trained."""
    spelt = dtype(t, "torch_dtype")
    if spelt is None:
        note = f"{IDLE_HERE}: float32, for what the model's files say is not known before they are read"
        t.idle(note, "torch_dtype")
    else:
        t.maps("torch_dtype", {target: spelt})


def idle_all(t: Translation, notes: Mapping[str, str]) -> None:
    """Note keys without effect, each with its reason; several keys with one reason are separated by spaces."""
    for keys, note in notes.items():
        t.idle(note, *keys.split())
