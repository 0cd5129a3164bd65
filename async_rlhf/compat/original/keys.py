"""The keys that the original's files may have, command by command, with their types and defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["bool", "int", "float", "steps", "str", "list", "any"]


@dataclass(frozen=True)
class Key:
    """A key of the original.

    Args:
        kind: its type; "steps" for an integer or a share of all steps; "any" if nothing here depends on it.
        default: its value if it is absent; None also if there is none.
    """

    kind: Kind = "any"
    default: Any = None


def _idle(names: str) -> dict[str, Key]:
    return dict.fromkeys(names.split(), Key())


ENVIRONMENT = "env"
"""The top-level key whose mapping is exported to the environment."""

# transformers' TrainingArguments as of 4.43: first those with a counterpart here.
_TRAINING = {
    "output_dir": Key("str"),
    "overwrite_output_dir": Key("bool", False),
    "resume_from_checkpoint": Key("str"),
    "per_device_train_batch_size": Key("int", 8),
    "gradient_accumulation_steps": Key("int", 1),
    "num_train_epochs": Key("float", 3.0),
    "max_steps": Key("int", -1),
    "learning_rate": Key("float", 5e-5),
    "lr_scheduler_type": Key("str", "linear"),
    "warmup_ratio": Key("float", 0.0),
    "warmup_steps": Key("int", 0),
    "weight_decay": Key("float", 0.0),
    "adam_beta1": Key("float", 0.9),
    "adam_beta2": Key("float", 0.999),
    "adam_epsilon": Key("float", 1e-8),
    "max_grad_norm": Key("float", 1.0),
    "bf16": Key("bool", False),
    "fp16": Key("bool", False),
    "gradient_checkpointing": Key("bool", False),
    "logging_steps": Key("steps", 500),
    "eval_steps": Key("steps"),
    "eval_strategy": Key("str", "no"),
    "evaluation_strategy": Key("str"),
    "save_steps": Key("steps", 500),
    "save_strategy": Key("str", "steps"),
    "save_total_limit": Key("int"),
    "report_to": Key("list"),
    "run_name": Key("str"),
    "seed": Key("int", 42),
    "use_cpu": Key("bool", False),
    "no_cuda": Key("bool", False),
    "disable_tqdm": Key("bool", False),
    "ddp_timeout": Key("int", 1800),
    "push_to_hub": Key("bool", False),
}

TRAINING_WITHOUT_COUNTERPART = _idle(
    """
    accelerator_config adafactor auto_find_batch_size batch_eval_metrics bf16_full_eval data_seed dataloader_drop_last
    dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory
    dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters debug
    deepspeed dispatch_batches do_eval do_predict do_train eval_accumulation_steps eval_delay eval_do_concat_batches
    eval_on_start eval_use_gather_object fp16_backend fp16_full_eval fp16_opt_level fsdp fsdp_config
    fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap full_determinism gradient_checkpointing_kwargs
    greater_is_better group_by_length half_precision_backend hub_always_push hub_model_id hub_private_repo hub_strategy
    hub_token ignore_data_skip include_inputs_for_metrics include_num_input_tokens_seen include_tokens_per_second
    jit_mode_eval label_names label_smoothing_factor length_column_name load_best_model_at_end local_rank
    log_level log_level_replica log_on_each_node logging_dir logging_first_step logging_nan_inf_filter logging_strategy
    lr_scheduler_kwargs metric_for_best_model mp_parameters neftune_noise_alpha optim optim_args optim_target_modules
    past_index per_device_eval_batch_size per_gpu_eval_batch_size per_gpu_train_batch_size prediction_loss_only
    push_to_hub_model_id push_to_hub_organization push_to_hub_token ray_scope remove_unused_columns
    restore_callback_states_from_checkpoint save_on_each_node save_only_model save_safetensors skip_memory_metrics
    split_batches tf32 torch_compile torch_compile_backend torch_compile_mode torchdynamo tpu_metrics_debug
    tpu_num_cores use_ipex use_legacy_prediction_loop use_mps_device
    """
)
"""Fields of TrainingArguments that have no meaning here."""

_MODEL = {
    "model_name_or_path": Key("str"),
    "model_revision": Key("str", "main"),
    "torch_dtype": Key("str"),
    "use_peft": Key("bool", False),
    "lora_r": Key("int", 16),
    "lora_alpha": Key("float", 32),
    "lora_target_modules": Key("list"),
    "lora_dropout": Key("float", 0.05),
    "lora_modules_to_save": Key("list"),
    "trust_remote_code": Key("bool"),
    "load_in_8bit": Key("bool"),
    "load_in_4bit": Key("bool"),
    "use_bnb_nested_quant": Key("bool"),
} | _idle("attn_implementation lora_task_type bnb_4bit_quant_type")

_PLACE = {
    "output_global_parent_dir": Key("str"),
    "wandb_run_id": Key("str"),
    "sanity_check": Key("bool", False),
}
_ROLLOUTS = {
    "dataset_name": Key("str"),
    "dataset_train_split": Key("str", "train"),
    "dataset_test_split": Key("str", "test"),
    "max_length": Key("int", 512),
    "num_mini_batches": Key("int", 1),
    "total_episodes": Key("int"),
    "local_rollout_forward_batch_size": Key("int", 64),
    "num_sample_generations": Key("int", 10),
    "response_length": Key("int", 53),
    "stop_token": Key("str"),
    "stop_token_id": Key("int"),
    "temperature": Key("float", 0.7),
    "penalty_reward_value": Key("float", -1.0),
    "non_eos_penalty": Key("bool", False),
    "reward_model_path": Key("str", "EleutherAI/pythia-160m"),
    "sft_model_path": Key("str", "EleutherAI/pythia-160m"),
    "num_ppo_epochs": Key("int", 4),
    "cliprange": Key("float", 0.2),
    "kl_coef": Key("float", 0.05),
    "rloo_k": Key("int", 2),
    "bok": Key("bool", False),
} | _idle(
    "exp_name base_model config world_size num_updates micro_batch_size local_batch_size batch_size "
    "local_mini_batch_size mini_batch_size shuffle"
)
ONLINE_DPO_ONLY = {
    "vllm": Key("bool", False),
    "single": Key("bool", False),
    "sync": Key("bool", False),
    "vllm_device": Key("str"),
    "vllm_gpu_memory_utilization": Key("float", 0.9),
    "loss_type": Key("str", "sigmoid"),
    "beta": Key("float", 0.1),
    "save_generations": Key("bool", False),
}
"""What only the original's online DPO reads."""
DPO_UNREAD = {
    "disable_dropout": Key("bool", True),
    "is_encoder_decoder": Key("bool"),
    "generate_during_eval": Key("bool"),
    "precompute_ref_log_probs": Key("bool"),
    "reference_free": Key("bool"),
    "force_use_ref_model": Key("bool"),
    "sync_ref_model": Key("bool"),
} | _idle(
    "label_smoothing label_pad_token_id padding_value truncation_mode max_prompt_length max_target_length "
    "dataset_num_proc model_init_kwargs ref_model_init_kwargs model_adapter_name ref_adapter_name "
    "ref_model_mixup_alpha ref_model_sync_steps rpo_alpha"
)
"""Options of DPO that the original's online DPO accepts and does not read."""
PPO_ONLY = {
    "vf_coef": Key("float", 0.1),
    "cliprange_value": Key("float", 0.2),
    "gamma": Key("float", 1.0),
    "lam": Key("float", 0.95),
    "whiten_rewards": Key("bool", False),
}
"""What only the original's PPO reads."""

_STAGE = {
    "dataset_name": Key("str"),
    "dataset_train_split": Key("str", "train"),
    "dataset_eval_split": Key("str", "test"),
}
_TRAINED = _TRAINING | TRAINING_WITHOUT_COUNTERPART | _MODEL | _PLACE

KEYS: dict[str, dict[str, Key]] = {
    "train": _TRAINED | _ROLLOUTS | ONLINE_DPO_ONLY | DPO_UNREAD | PPO_ONLY,
    "sft": _TRAINED
    | _STAGE
    | {"task_type": Key("str", "hh"), "max_seq_length": Key("int"), "packing": Key("bool", False)}
    | _idle(
        "output_model_name dataset_text_field dataset_num_proc dataset_batch_size model_init_kwargs dataset_kwargs "
        "eval_packing num_of_sequences chars_per_token"
    ),
    "reward": _TRAINED | _STAGE | {"max_length": Key("int"), "tokenizer_name": Key("str")},
    "relabel": _MODEL
    | {
        "dataset_name": Key("str"),
        "tokenizer_name": Key("str"),
        "train_split": Key("str", "train"),
        "eval_split": Key("str", "validation"),
        "batch_size": Key("int", 32),
        "sanity_check": Key("bool", False),
        "output_name": Key("str"),
        "push_to_hub": Key("bool", False),
    }
    | _idle("template seed"),
    "generate": {
        "model_name_or_path": Key("str", "EleutherAI/pythia-410m"),
        "model_paths": Key("list"),
        "base_model_name": Key("str"),
        "base_model_revision": Key("str"),
        "tokenizer_name": Key("str"),
        "dataset_name": Key("str"),
        "split": Key("str", "validation"),
        "temperature": Key("float", 0.7),
        "top_p": Key("float", 1.0),
        "max_new_tokens": Key("int", 48),
        "torch_dtype": Key("str", "auto"),
        "sanity_check": Key("bool", False),
        "dataset_path": Key("str"),
        "save_generations": Key("bool", False),
        "num_gpus": Key("int", 1),
        "wandb_run_id": Key("str"),
    },
    "evaluate": {
        "model_name_or_path": Key("str"),
        "ref_model_name": Key("str"),
        "gold_model_name": Key("str", "EleutherAI/pythia-410m"),
        "gold_model_revision": Key("str"),
        "gold_tokenizer_name": Key("str"),
        "torch_dtype": Key("str", "auto"),
        "batch_size": Key("int", 16),
        "dataset_path": Key("str"),
        "sanity_check": Key("bool", False),
        "wandb_run_id": Key("str"),
    },
}
"""Every key that the original knows, by our corresponding command."""
