"""Keys of online training that contradict each other: each error names the key to change, and what would be right."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from async_rlhf.config.base import default_of, require
from async_rlhf.config.engines import able, find
from async_rlhf.config.ray import RayConfig

if TYPE_CHECKING:
    from async_rlhf.config.online import OnlineConfig


def check_together(config: OnlineConfig) -> None:
    """Refuse values that are each right alone.

    Raises:
        ConfigError: see the message.
    """
    _check_sizes(config)
    name, supports = config.generation.engine, find(config.generation.engine).supports
    in_turn = config.generation.placement == "inline" and "policy" not in supports
    right = f'must be 0 with generation.engine "{name}" and placement "inline", where the two take turns'
    right += '; use placement "process"'
    config.require(not in_turn or config.staleness == 0, "staleness", right)
    if not config.push_to_hub:
        config.leaves_out(("hub_model_id", "hub_strategy", "hub_private_repo", "hub_token"), "without push_to_hub")
    right = "must be false with resume: a run that is resumed cannot also be deleted"
    config.require(not (config.overwrite_output_dir and config.resume), "overwrite_output_dir", right)
    _check_trained(config)
    key, shares = "generation.urls" if config.generation.urls else "generation.workers", config.generation.shares
    right, size = f"must be at most the batch of {config.batch_size} prompts", config.generation.prompts_per_request
    require(shares <= config.batch_size, key, shares, right)
    config.require(size is None or size <= config.batch_size, "generation.prompts_per_request", right)
    right = 'must be null with placement "inline", where nothing is sent'
    config.require(size is None or config.placement != "inline", "generation.prompts_per_request", right)
    _check_evaluation(config)
    _check_generation(config)
    if config.router_replay:
        _check_router_replay(config)
    _check_precision_and_penalty(config)
    _check_parallel(config)
    _check_own_devices(config)
    _check_launch(config)
    _check_deterministic(config)


def _check_sizes(config: OnlineConfig) -> None:
    """Refuse sizes that do not divide, or that are said twice and differ."""
    completions, per_unit = config.completions_per_batch, config.samples_per_prompt * config.num_mini_batches
    factors = (
        f"per_device_train_batch_size {config.units_by_pass} x gradient_accumulation_steps "
        f"{config.gradient_accumulation_steps} x num_mini_batches {config.num_mini_batches} x {config.parallel.ranks} "
        "ranks"
    )
    if completions is not None:
        nearest = max(1, round(completions / per_unit)) * per_unit
        right = (
            f"must be a multiple of samples_per_prompt {config.samples_per_prompt} x num_mini_batches "
            f"{config.num_mini_batches}, such as {nearest}"
        )
        config.require(completions % per_unit == 0, "completions_per_batch", right)
        agree = config.gradient_accumulation_steps == 1 or config.prompts_by_passes == config.batch_size
        right = (
            f"must be {config.prompts_by_passes * config.samples_per_prompt}, as {factors} x samples_per_prompt "
            f"{config.samples_per_prompt} say, or gradient_accumulation_steps be left out"
        )
        config.require(agree, "completions_per_batch", right)
    if config.num_train_epochs is not None:
        for name, default in (("batches", None), ("total_episodes", default_of(config, "total_episodes"))):
            right = f"must be null with {name} {getattr(config, name)}: both say how long the run is"
            config.require(getattr(config, name) == default, "num_train_epochs", right)
        return
    if config.batches is not None:
        prompts = config.batches * config.batch_size
        right = (
            f"must be {config.total_episodes / config.batch_size:g}, as total_episodes {config.total_episodes} of "
            f"{config.batch_size} prompts a batch says, or one of the two be left out"
        )
        agree = config.total_episodes in (default_of(config, "total_episodes"), prompts)
        config.require(agree, "batches", right)
        return
    said = factors if completions is None else f"completions_per_batch {completions}"
    size = config.batch_size
    nearest = max(1, round(config.total_episodes / size)) * size
    right = f"must be a multiple of the batch of {size} prompts ({said}), such as {nearest}; or say batches instead"
    config.require(config.total_episodes % size == 0, "total_episodes", right)


def _check_trained(config: OnlineConfig) -> None:
    """Refuse to choose among prompts that cannot be told apart, or that are not there."""
    most, size, steps = config.trained_prompts, config.batch_size, config.num_mini_batches
    right = f"must be at most {size}, the prompts of a batch; completions_per_batch says how many are sampled"
    config.require(most is None or most <= size, "trained_prompts", right)
    right = f"must be a multiple of num_mini_batches {steps}, which divides them"
    config.require(most is None or most % steps == 0, "trained_prompts", right)
    right = "must be null with samples_per_prompt 1: the rewards of a single completion cannot differ"
    config.require(most is None or config.samples_per_prompt > 1, "trained_prompts", right)


def _check_evaluation(config: OnlineConfig) -> None:
    """Refuse temperatures that an engine cannot sample at, and ends that can never come."""
    engine = config.generation.engine
    coldest = find(engine).coldest
    right = f'must be at least {coldest:g} with generation.engine "{engine}", which samples no colder'
    config.require((config.eval_temperature or 1.0) >= coldest, "eval_temperature", right)
    name = config.stop_at
    if config.best_metric is None:
        config.leaves_out(["greater_is_better"], "without metric_for_best_model and stop_at")
    if name is None:
        config.leaves_out(["stop_patience"], "without stop_at")
        return
    right = 'must be a result of evaluations, such as "eval_objective/scores" or "eval_reward/NAME"'
    config.require(name.startswith("eval_"), "stop_at", right)
    config.require(config.eval_steps > 0, "eval_steps", "must be at least 1 with stop_at")
    right = f"must be null or {name!r}, which stop_at names: the peak is where the best checkpoint is"
    config.require(config.best_metric == name, "metric_for_best_model", right)


def _check_generation(config: OnlineConfig) -> None:
    """Check what a place ignores, and what an engine needs to load only adapters and to change weights in flight."""
    if config.placement != "process":
        elsewhere = f'with placement "{config.placement}", which has no processes of its own'
        config.leaves_out(["generation.workers", "generation.device"], elsewhere)
    alone = "adapters" in find(config.generation.engine).supports and config.placement != "server"
    right = f'must be "merged" but with generation.engine {able("adapters")} in placement "process" or "inline"'
    config.require(config.lora.publish == "merged" or alone, "lora.publish", right)
    measured, in_flight = config.generation.mismatch_samples > 0, config.generation.in_flight
    right = 'must be above 0 with lora.publish "adapter": nothing else shows that vLLM has taken the adapter'
    config.require(config.lora.publish == "merged" or measured, "generation.mismatch_samples", right)
    right = "must be at least 1 with generation.in_flight: else there are never weights to load meanwhile"
    config.require(not in_flight or config.staleness >= 1, "staleness", right)


def _check_router_replay(config: OnlineConfig) -> None:
    """Refuse what brings no routes, or brings more than one for a token."""
    right = f"must be false unless generation.engine is {able('routes')}, which say where each token was sent"
    config.require("routes" in find(config.generation.engine).supports, "router_replay", right)
    right = "must be false with generation.in_flight: new weights read all tokens again, and send them elsewhere"
    config.require(not config.generation.in_flight, "router_replay", right)
    right = "must be false with torch_compile, which would compile a block again for each layer's routes"
    config.require(not config.torch_compile, "router_replay", right)


def _check_precision_and_penalty(config: OnlineConfig) -> None:
    """Refuse keys that would have no effect, and penalties that would reward."""
    right = "must be false with bf16: there is one type to compute in"
    config.require(not (config.in_bfloat16 and config.fp16), "fp16", right)
    right = "must be false without bf16 and fp16, where everything is float32"
    config.require(config.bf16 is not False or config.fp16 or not config.head_float32, "head_float32", right)
    if config.optimizer == "adafactor":
        names = ("adam_beta1", "adam_beta2", "adam_epsilon")
        config.leaves_out(names, 'with optimizer "adafactor", which has no such number')
    right = 'must be at most 0 with non_eos_penalty "add": what is cut off would be rewarded for it'
    config.require(config.non_eos_penalty != "add" or config.penalty_reward_value <= 0, "penalty_reward_value", right)


def _check_deterministic(config: OnlineConfig) -> None:
    """Refuse what cannot be repeated, or cannot be told to be."""
    if not config.deterministic:
        return
    right = "must be a number or null with deterministic: another time, other memory may be left"
    for name in ("max_tokens_per_pass", "annotate_max_tokens"):
        config.require(getattr(config, name) != "auto", name, right)
    right = "must be false with generation.in_flight: which weights draw a token depends on timing"
    config.require(not config.generation.in_flight, "deterministic", right)
    right = "must be false with generation.seed_per_request false: nothing says what is sampled"
    config.require(config.generation.seed_per_request, "deterministic", right)
    right = "must be false with servers: start them with VLLM_BATCH_INVARIANT=1, which cannot be seen from here"
    config.require(config.placement != "server", "deterministic", right)
    engine = config.generation.engine
    right = f'must be false with launch "ray" and engine "{engine}": its nodes have environments of their own'
    config.require(config.launch == "local" or find(engine).environment is None, "deterministic", right)


def _check_parallel(config: OnlineConfig) -> None:
    """Refuse what does not work with a learner on several ranks."""
    parallel, engine = config.parallel, config.generation.engine
    alone = f'must be "process" or "server" with parallel.ranks above 1 and generation.engine "{engine}"'
    in_turn = config.placement == "inline" and "policy" not in find(engine).supports
    config.require(parallel.ranks == 1 or not in_turn, "generation.placement", alone)
    right = 'must be "merged" with weights spread over ranks (parallel.strategy)'
    spread = parallel.ranks > 1 and parallel.strategy in ("fsdp", "zero3")
    config.require(not spread or config.lora.publish == "merged", "lora.publish", right)
    parallel.require_format(config.checkpoint_format)
    right = "must be null with weights spread over ranks (parallel.strategy)"
    config.require(not spread or config.lora.base_bits is None, "lora.base_bits", right)
    right = 'must be false with parallel.strategy "zero3", whose parallel.cpu_offload does the same'
    config.require(parallel.strategy != "zero3" or not config.offload_frozen, "offload_frozen", right)


def _check_own_devices(config: OnlineConfig) -> None:
    """Refuse a device for a frozen model that is somewhere else."""
    right = "must be null with ray.reward_workers, which have devices of their own (ray.reward_num_gpus)"
    config.require(config.reward_model_device is None or config.ray.reward_workers == 0, "reward_model_device", right)
    right = "must be false with reward_model_device and reference_device, where frozen models are alone"
    config.require(not config.own_devices or not config.offload_frozen, "offload_frozen", right)


def _check_launch(config: OnlineConfig) -> None:
    """Nothing that would be ignored may be set."""
    if config.launch == "local":
        config.ray.leaves_out([item.name for item in fields(RayConfig)], 'unless launch is "ray"', "ray.")
        return
    right = "must be a number or null with ray.reward_workers: what fits there cannot be seen from here"
    config.require(config.annotate_max_tokens != "auto" or config.ray.reward_workers == 0, "annotate_max_tokens", right)
    right = 'must be "process", or "auto" with a staleness of at least 1, with launch "ray"'
    config.require(config.placement == "process", "generation.placement", right)
    right = 'must be null with launch "ray": ray.num_gpus says whether generators run on GPUs'
    config.require(config.generation.device is None, "generation.device", right)
    gpus = config.generation.vllm.tensor_parallel_size
    right = f"must be {gpus}, as generation.vllm.tensor_parallel_size says, or 0 to sample on CPUs"
    config.require(gpus == 1 or config.ray.num_gpus in (0, gpus), "ray.num_gpus", right)
    right = 'must be "merged" with launch "ray": the weights below the adapters would have to be on every node'
    config.require(config.lora.publish == "merged", "lora.publish", right)
