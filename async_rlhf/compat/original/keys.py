"""The keys that the original's files may have, command by command: their types, defaults, and why many do nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from async_rlhf.config.base import require
from async_rlhf.config.yaml_text import reads_as_number

MAPPED = "mapped"
THERE = "no effect there"
HERE = "no effect here"
ENVIRONMENT = "env"
"""The top-level key whose mapping is exported to the environment."""
_TRUE, _FALSE = ("true", "yes", "t", "y", "1"), ("false", "no", "f", "n", "0")


class Key(NamedTuple):
    """A key of the original."""

    kind: str
    """bool, int, float, str, list, "steps" for an integer or a share of all steps, "any" if nothing depends on it."""
    default: Any
    """Its value if it is absent; None also if there is none."""
    note: str
    """Why it has no effect, if nothing else is said of it."""


def typed(key: str, kind: str, value: Any) -> Any:
    """A value of a key's type: "1e-5" is a number there too. Raises :class:`ConfigError` if it is of another."""
    if kind == "mapping":
        require(isinstance(value, dict), key, value, "must be a mapping of names to values")
    if value is None or kind in ("any", "mapping"):
        return value
    if kind == "bool":
        text = str(value).lower()
        require(text in _TRUE + _FALSE, key, value, "must be true or false")
        return text in _TRUE
    if kind == "list":
        return list(value) if isinstance(value, (list, tuple)) else [str(value)]
    if kind == "str":
        require(not isinstance(value, (list, dict)), key, value, "must be a string")
        return str(value)
    try:
        plain = reads_as_number(value) if isinstance(value, str) else not isinstance(value, bool)
        number = float(value) if plain else float("nan")
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    require(abs(number) < float("inf"), key, value, "must be a number")
    require(kind != "int" or number == int(number), key, value, "must be an integer")
    return int(number) if kind == "int" or (kind == "steps" and number == int(number)) else number


def _keys(texts: Mapping[str, str], base: Mapping[str, Key] | None = None) -> dict[str, Key]:
    """The keys of ``base``, and others by their notes: each is ``name``, ``name:type`` or ``name:type=default``.

    A mere name that ``base`` has keeps its type and default.
    """
    found = dict(base or {})
    for note, text in texts.items():
        for word in text.split():
            name, _, kind = word.partition(":")
            kind, _, default = kind.partition("=")
            new = Key(kind or "any", typed(name, kind, default) if default else None, note)
            found[name] = found[name]._replace(note=note) if name in found and not kind else new
    return found


_HUB = "upload the finished folder with `huggingface-cli upload`"
# trl's ModelConfig.
_MODEL = _keys(
    {
        "": "model_name_or_path:str torch_dtype:str",
        f"{THERE}: this program does not read it": """model_revision:str=main attn_implementation trust_remote_code:bool
            load_in_8bit:bool load_in_4bit:bool bnb_4bit_quant_type use_bnb_nested_quant:bool""",
        f"{THERE}: this trainer has no adapters": """use_peft:bool=false lora_r:int=16 lora_alpha:float=32
            lora_target_modules:list""",
        f"{THERE}: there are no adapters": "lora_dropout:float=0.05 lora_modules_to_save:list lora_task_type",
    }
)
# transformers' TrainingArguments as of 4.43, and what the original adds for all that it trains.
_TRAINED = _keys(
    {
        "": """output_dir:str overwrite_output_dir:bool=false resume_from_checkpoint:str learning_rate:float=5e-5
            per_device_train_batch_size:int=8 gradient_accumulation_steps:int=1 num_train_epochs:float=3
            max_steps:int=-1 lr_scheduler_type:str=linear warmup_ratio:float=0 warmup_steps:int=0 weight_decay:float=0
            adam_beta1:float=0.9 adam_beta2:float=0.999 adam_epsilon:float=1e-8 max_grad_norm:float=1 bf16:bool=false
            fp16:bool=false gradient_checkpointing:bool=false logging_steps:steps=500 eval_steps:steps
            eval_strategy:str=no evaluation_strategy:str save_steps:steps=500 save_strategy:str=steps
            save_total_limit:int report_to:list run_name:str seed:int=42 use_cpu:bool=false no_cuda:bool=false
            disable_tqdm:bool=false ddp_timeout:int=1800 sanity_check:bool=false""",
        f"{HERE}: it has no counterpart": """auto_find_batch_size batch_eval_metrics bf16_full_eval data_seed
            dataloader_drop_last dataloader_multiprocessing_context dataloader_num_workers dataloader_pin_memory
            dataloader_persistent_workers dataloader_prefetch_factor debug dispatch_batches do_eval do_predict do_train
            eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start eval_use_gather_object fp16_backend
            fp16_full_eval fp16_opt_level full_determinism gradient_checkpointing_kwargs greater_is_better
            group_by_length half_precision_backend ignore_data_skip include_inputs_for_metrics
            include_num_input_tokens_seen include_tokens_per_second jit_mode_eval label_names length_column_name
            load_best_model_at_end log_level log_level_replica log_on_each_node logging_dir logging_first_step
            logging_nan_inf_filter logging_strategy metric_for_best_model mp_parameters past_index prediction_loss_only
            ray_scope remove_unused_columns restore_callback_states_from_checkpoint save_on_each_node save_only_model
            save_safetensors skip_memory_metrics split_batches tf32 torch_compile torch_compile_backend
            torch_compile_mode torchdynamo tpu_metrics_debug tpu_num_cores use_ipex use_legacy_prediction_loop
            use_mps_device""",
        f"{HERE}: {_HUB}, or give train.push_to_hub to train": """push_to_hub:bool=false hub_always_push hub_model_id
            hub_private_repo hub_strategy hub_token push_to_hub_model_id push_to_hub_organization push_to_hub_token""",
        f"{HERE}: the optimiser is torch's AdamW": "adafactor optim optim_args optim_target_modules",
        f"{HERE}: train.parallel, or accelerate's config file, says how ranks share the work": """accelerator_config
            ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters deepspeed fsdp fsdp_config
            fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap local_rank""",
        f"{HERE}: rows without gradient have a batch size of their own": """per_device_eval_batch_size
            per_gpu_eval_batch_size""",
        f"{HERE}: per_device_train_batch_size is the key": "per_gpu_train_batch_size",
        f"{HERE}: schedules have transformers' default shape": "lr_scheduler_kwargs",
        f"{HERE}: not implemented": "neftune_noise_alpha label_smoothing_factor",
        f"{THERE}: read only with wandb_run_id: slurm": "output_global_parent_dir:str",
        f"{THERE}: this program knows only the value snow": "wandb_run_id:str",
    },
    _MODEL,
)
_TRAIN = _keys(
    {
        "": """dataset_name:str dataset_train_split:str=train dataset_test_split:str=test max_length:int=512
            num_mini_batches:int=1 total_episodes:int local_rollout_forward_batch_size:int=64
            num_sample_generations:int=10 response_length:int=53 stop_token:str stop_token_id:int temperature:float=0.7
            penalty_reward_value:float=-1 non_eos_penalty:bool=false reward_model_path:str=EleutherAI/pythia-160m
            sft_model_path:str=EleutherAI/pythia-160m num_ppo_epochs:int=4 cliprange:float=0.2 kl_coef:float=0.05
            rloo_k:int=2 bok:bool=false""",
        f"{HERE}: only online DPO has it": """vllm:bool=false single:bool=false sync:bool=false vllm_device:str
            vllm_gpu_memory_utilization:float=0.9 loss_type:str=sigmoid beta:float=0.1 save_generations:bool=false""",
        f"{THERE}: only PPO reads it": """vf_coef:float=0.1 cliprange_value:float=0.2 gamma:float=1 lam:float=0.95
            whiten_rewards:bool=false""",
        f"{THERE}: online DPO does not read it": """disable_dropout:bool=true is_encoder_decoder:bool
            generate_during_eval:bool precompute_ref_log_probs:bool reference_free:bool force_use_ref_model:bool
            sync_ref_model:bool label_smoothing label_pad_token_id padding_value truncation_mode max_prompt_length
            max_target_length dataset_num_proc model_init_kwargs ref_model_init_kwargs model_adapter_name
            ref_adapter_name ref_model_mixup_alpha ref_model_sync_steps rpo_alpha""",
        f"{THERE}: it is read nowhere": "base_model exp_name config",
        f"{THERE}: it is computed at the start": """world_size num_updates micro_batch_size local_batch_size batch_size
            local_mini_batch_size mini_batch_size""",
        f"{THERE}: only an unused class has it": "shuffle",
        f"{THERE}: total_episodes decides how long the run is": "num_train_epochs max_steps",
        f"{THERE}: num_sample_generations decides how often it evaluates": """eval_steps eval_strategy
            evaluation_strategy""",
    },
    _TRAINED,
)
_STAGE = _keys(
    {
        "": "dataset_name:str dataset_train_split:str=train dataset_eval_split:str=test",
        f"{HERE}: num_epochs decides how long the stage is": "max_steps",
        f"{HERE}: AdamW has torch's defaults, 0.9, 0.999 and 1e-8": "adam_beta1 adam_beta2 adam_epsilon",
        f"{HERE}: gradients are clipped to norm 1": "max_grad_norm",
        f"{HERE}: checkpoints only serve resuming, by save_steps here": "save_steps save_strategy save_total_limit",
        f"{HERE}: --resume goes on from the stage's own": "resume_from_checkpoint",
        f"{HERE}: the output folder names the run": "run_name",
        f"{HERE}: the first GPU, or the CPU, unless device says": "use_cpu no_cuda",
        f"{HERE}: it has no counterpart": "disable_tqdm ddp_timeout",
        f"{THERE}: weights are float32, there as here": "torch_dtype",
    },
    _TRAINED,
)
_SFT = _keys(
    {
        "": "task_type:str=hh max_seq_length:int packing:bool=false",
        f"{THERE}: sft.py does not read it": "output_model_name model_init_kwargs",
        f"{THERE}: task_type decides": "dataset_text_field",
        f"{HERE}: it changes no result": "dataset_num_proc dataset_batch_size",
        f"{HERE}: it has no counterpart": "dataset_kwargs",
        f"{HERE}: it is for packing": "eval_packing num_of_sequences chars_per_token",
    },
    _STAGE,
)
_REWARD = _keys(
    {
        "": "max_length:int",
        f"{HERE}: the model's own tokenizer is taken": "tokenizer_name:str",
        f"{HERE}: the main revision is what is loaded": "model_revision",
    },
    _STAGE,
)
_RELABEL = _keys(
    {
        "": """dataset_name:str tokenizer_name:str train_split:str=train eval_split:str=validation batch_size:int=32
            sanity_check:bool=false output_name:str""",
        f"{HERE}: {_HUB}": "push_to_hub:bool=false",
        f"{HERE}: transformers' default attention": "attn_implementation",
        f"{HERE}: a reward model keeps all its bits": """load_in_8bit:bool load_in_4bit:bool bnb_4bit_quant_type
            use_bnb_nested_quant:bool""",
        f"{THERE}: relabel_with_rm.py does not read it": "template seed",
    },
    _MODEL,
)
_GENERATE = _keys(
    {
        "": """model_name_or_path:str=EleutherAI/pythia-410m model_paths:list dataset_name:str split:str=validation
            temperature:float=0.7 top_p:float=1 max_new_tokens:int=48 torch_dtype:str=auto sanity_check:bool=false
            dataset_path:str save_generations:bool=false num_gpus:int=1""",
        f"{HERE}: the model's own tokenizer is taken": "tokenizer_name:str",
        f"{HERE}: checkpoints of async-rlhf are whole models": "base_model_name:str base_model_revision:str",
        f"{THERE}: generate_for_eval.py does not read it": "wandb_run_id:str",
    }
)
_EVALUATE = _keys(
    {
        "": """model_name_or_path:str ref_model_name:str gold_model_name:str=EleutherAI/pythia-410m
            gold_tokenizer_name:str batch_size:int=16 dataset_path:str sanity_check:bool=false""",
        f"{HERE}: every model is loaded in float32, the reward model as well": "torch_dtype:str=auto",
        f"{THERE}: load_and_eval.py does not read it": "gold_model_revision:str",
        f"{HERE}: results are files in output_dir": "wandb_run_id:str",
    }
)
KEYS = {
    "train": _TRAIN,
    "sft": _SFT,
    "reward": _REWARD,
    "relabel": _RELABEL,
    "generate": _GENERATE,
    "evaluate": _EVALUATE,
}
"""Every key that the original knows, by our corresponding command."""
