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
    require(not in_turn or config.staleness == 0, "staleness", config.staleness, right)
    if not config.push_to_hub:
        config.leaves_out(("hub_model_id", "hub_strategy", "hub_private_repo", "hub_token"), "without push_to_hub")
    right = "must be false with resume: a run that is resumed cannot also be deleted"
    require(not (config.overwrite_output_dir and config.resume), "overwrite_output_dir", True, right)
    right = 'must be null with staleness_mode "exact", which needs no record to be repeated'
    needed = config.replay_from is None or config.staleness_mode == "bounded"
    require(needed, "replay_from", config.replay_from, right)
    _check_trained(config)
    key, shares = "generation.urls" if config.generation.urls else "generation.workers", config.generation.shares
    right, size = f"must be at most the batch of {config.batch_size} prompts", config.generation.prompts_per_request
    require(shares <= config.batch_size, key, shares, right)
    require(size is None or size <= config.batch_size, "generation.prompts_per_request", size, right)
    right = 'must be null with placement "inline", where nothing is sent'
    require(size is None or config.placement != "inline", "generation.prompts_per_request", size, right)
    _check_evaluation(config)
    _check_feedback(config)
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
        require(completions % per_unit == 0, "completions_per_batch", completions, right)
        agree = config.gradient_accumulation_steps == 1 or config.prompts_by_passes == config.batch_size
        right = (
            f"must be {config.prompts_by_passes * config.samples_per_prompt}, as {factors} x samples_per_prompt "
            f"{config.samples_per_prompt} say, or gradient_accumulation_steps be left out"
        )
        require(agree, "completions_per_batch", completions, right)
    if config.num_train_epochs is not None:
        for name, default in (("batches", None), ("total_episodes", default_of(config, "total_episodes"))):
            right = f"must be null with {name} {getattr(config, name)}: both say how long the run is"
            require(getattr(config, name) == default, "num_train_epochs", config.num_train_epochs, right)
        return
    if config.batches is not None:
        prompts = config.batches * config.batch_size
        right = (
            f"must be {config.total_episodes / config.batch_size:g}, as total_episodes {config.total_episodes} of "
            f"{config.batch_size} prompts a batch says, or one of the two be left out"
        )
        agree = config.total_episodes in (default_of(config, "total_episodes"), prompts)
        require(agree, "batches", config.batches, right)
        return
    said = factors if completions is None else f"completions_per_batch {completions}"
    size, episodes = config.batch_size, config.total_episodes
    nearest = max(1, round(episodes / size)) * size
    right = f"must be a multiple of the batch of {size} prompts ({said}), such as {nearest}; or say batches instead"
    require(episodes % size == 0, "total_episodes", episodes, right)


def _check_trained(config: OnlineConfig) -> None:
    """Refuse to choose among prompts that cannot be told apart, or that are not there."""
    most, size = config.trained_prompts, config.batch_size
    right = f"must be at most {size}, the prompts of a batch; completions_per_batch says how many are sampled"
    require(most is None or most <= size, "trained_prompts", most, right)
    steps = config.num_mini_batches
    right = f"must be a multiple of num_mini_batches {steps}, which divides them"
    require(most is None or most % steps == 0, "trained_prompts", most, right)
    right = "must be null with samples_per_prompt 1: the rewards of a single completion cannot differ"
    require(most is None or config.samples_per_prompt > 1, "trained_prompts", most, right)
    share, right = config.curriculum, "must be 0 with samples_per_prompt 1: the rewards of one completion cannot differ"
    require(not share or config.samples_per_prompt > 1, "curriculum", share, right)
    right = 'must be 0 with staleness_mode "bounded", whose record says which weights sampled a batch, not its prompts'
    require(not share or config.staleness_mode == "exact", "curriculum", share, right)


def _check_feedback(config: OnlineConfig) -> None:
    """Refuse questions that cannot be asked, and lags that no batch has."""
    feedback = config.feedback
    if feedback.ask is None:
        feedback.leaves_out(("answers", "max_lag", "labels_from"), "without feedback.ask", "feedback.")
        return
    right = "must be at least 2 to compare two completions of a prompt"
    samples = config.samples_per_prompt
    require(feedback.ask == "rate" or samples > 1, "samples_per_prompt", samples, right)
    right = f"must be at least the staleness, which is {config.staleness}"
    most = feedback.max_lag
    require(most is None or most >= config.staleness, "feedback.max_lag", most, right)
    mode = config.staleness_mode
    require(mode == "exact", "staleness_mode", mode, 'must be "exact" with feedback.ask')


def _check_evaluation(config: OnlineConfig) -> None:
    """Refuse temperatures that an engine cannot sample at, and ends that can never come."""
    engine = config.generation.engine
    coldest = find(engine).coldest
    right = f'must be at least {coldest:g} with generation.engine "{engine}", which samples no colder'
    require((config.eval_temperature or 1.0) >= coldest, "eval_temperature", config.eval_temperature, right)
    name = config.stop_at
    if name is None:
        config.leaves_out(["stop_patience"], "without stop_at")
        return
    right = 'must be a result of evaluations, such as "eval_objective/scores" or "eval_reward/NAME"'
    require(name.startswith("eval_"), "stop_at", name, right)
    require(config.eval_steps > 0, "eval_steps", config.eval_steps, "must be at least 1 with stop_at")
    right = f"must be null or {name!r}, which stop_at names: the peak is where the best checkpoint is"
    require(config.best_metric == name, "metric_for_best_model", config.metric_for_best_model, right)


def _check_generation(config: OnlineConfig) -> None:
    """Check what an engine needs to load only adapters, and to change weights in flight."""
    alone = "adapters" in find(config.generation.engine).supports and config.placement != "server"
    right = f'must be "merged" but with generation.engine {able("adapters")} in placement "process" or "inline"'
    require(config.lora.publish == "merged" or alone, "lora.publish", config.lora.publish, right)
    measured = config.generation.mismatch_samples > 0
    right = 'must be above 0 with lora.publish "adapter": nothing else shows that vLLM has taken the adapter'
    require(config.lora.publish == "merged" or measured, "generation.mismatch_samples", 0, right)
    in_flight = config.generation.in_flight
    right = 'must be "bounded" with generation.in_flight: which weights draw a token depends on timing'
    require(not in_flight or config.staleness_mode == "bounded", "staleness_mode", config.staleness_mode, right)
    right = "must be null with generation.in_flight: a record of versions by batch cannot repeat it"
    require(not in_flight or config.replay_from is None, "replay_from", config.replay_from, right)
    right = "must be null with generation.seed_per_request false: nothing says what was sampled"
    repeats = config.generation.seed_per_request or config.replay_from is None
    require(repeats, "replay_from", config.replay_from, right)
    right = "must be at least 1 with generation.in_flight: else there are never weights to load meanwhile"
    require(not in_flight or config.staleness >= 1, "staleness", config.staleness, right)


def _check_router_replay(config: OnlineConfig) -> None:
    """Refuse what brings no routes, or brings more than one for a token."""
    generation, supports = config.generation, find(config.generation.engine).supports
    right = f"must be false unless generation.engine is {able('routes')}, which say where each token was sent"
    require("routes" in supports, "router_replay", True, right)
    right = "must be false with generation.in_flight: new weights read all tokens again, and send them elsewhere"
    require(not generation.in_flight, "router_replay", True, right)
    right = "must be false with torch_compile, which would compile a block again for each layer's routes"
    require(not config.torch_compile, "router_replay", True, right)


def _check_precision_and_penalty(config: OnlineConfig) -> None:
    """Refuse keys that would have no effect, and penalties that would reward."""
    right = "must be false with bf16: there is one type to compute in"
    require(not (config.in_bfloat16 and config.fp16), "fp16", True, right)
    right = "must be false without bf16 and fp16, where everything is float32"
    narrow = config.bf16 is not False or config.fp16
    require(narrow or not config.head_float32, "head_float32", config.head_float32, right)
    if config.optimizer == "adafactor":
        names = ("adam_beta1", "adam_beta2", "adam_epsilon")
        config.leaves_out(names, 'with optimizer "adafactor", which has no such number')
    right = "must be false with reward_model_bits, whose scales stay on the GPU"
    require(not config.offload_frozen or config.reward_model_bits is None, "offload_frozen", True, right)
    right = 'must be at most 0 with non_eos_penalty "add": what is cut off would be rewarded for it'
    adds = config.non_eos_penalty == "add"
    require(not adds or config.penalty_reward_value <= 0, "penalty_reward_value", config.penalty_reward_value, right)


def _check_deterministic(config: OnlineConfig) -> None:
    """Refuse what cannot be repeated, or cannot be told to be."""
    if config.deterministic:
        for name in ("max_tokens_per_pass", "annotate_max_tokens"):
            right = "must be a number or null with deterministic: on resuming, other memory may be left"
            require(getattr(config, name) != "auto", name, "auto", right)
        right = "must be false with generation.in_flight: which weights draw a token depends on timing"
        require(not config.generation.in_flight, "deterministic", True, right)
        right = "must be false with generation.seed_per_request false: nothing says what is sampled"
        require(config.generation.seed_per_request, "deterministic", True, right)
        right = "must be false with servers: start them with VLLM_BATCH_INVARIANT=1, which cannot be seen from here"
        require(config.placement != "server", "deterministic", True, right)
        engine = config.generation.engine
        right = f'must be false with launch "ray" and engine "{engine}": its nodes have environments of their own'
        require(config.launch == "local" or find(engine).environment is None, "deterministic", True, right)


def _check_parallel(config: OnlineConfig) -> None:
    """Refuse what does not work with a learner on several ranks."""
    parallel = config.parallel
    engine = config.generation.engine
    alone = f'must be "process" or "server" with parallel.ranks above 1 and generation.engine "{engine}"'
    in_turn = config.placement == "inline" and "policy" not in find(engine).supports
    require(parallel.ranks == 1 or not in_turn, "generation.placement", config.generation.placement, alone)
    right = 'must be "merged" with weights spread over ranks (parallel.strategy)'
    spread = parallel.ranks > 1 and parallel.strategy in ("fsdp", "zero3")
    require(not spread or config.lora.publish == "merged", "lora.publish", config.lora.publish, right)
    parallel.require_format(config.checkpoint_format)
    right = "must be null with weights spread over ranks (parallel.strategy)"
    require(not spread or config.lora.base_bits is None, "lora.base_bits", config.lora.base_bits, right)
    right = 'must be false with parallel.strategy "zero3", whose parallel.cpu_offload does the same'
    require(parallel.strategy != "zero3" or not config.offload_frozen, "offload_frozen", True, right)
    right = "must be null with weights spread over ranks (parallel.strategy) and with ray.reward_workers"
    here = not spread and config.ray.reward_workers == 0
    require(here or config.reward_model_bits is None, "reward_model_bits", config.reward_model_bits, right)


def _check_own_devices(config: OnlineConfig) -> None:
    """Refuse a device for a frozen model that is somewhere else."""
    device = config.reward_model_device
    right = "must be null with ray.reward_workers, which have devices of their own (ray.reward_num_gpus)"
    require(device is None or config.ray.reward_workers == 0, "reward_model_device", device, right)
    right = "must be false with reward_model_device and reference_device, where frozen models are alone"
    require(not config.own_devices or not config.offload_frozen, "offload_frozen", True, right)


def _check_launch(config: OnlineConfig) -> None:
    """Nothing that would be ignored may be set."""
    if config.launch == "local":
        config.ray.leaves_out([item.name for item in fields(RayConfig)], 'unless launch is "ray"', "ray.")
        return
    right = "must be a number or null with ray.reward_workers: what fits there cannot be seen from here"
    fixed = config.annotate_max_tokens != "auto" or config.ray.reward_workers == 0
    require(fixed, "annotate_max_tokens", config.annotate_max_tokens, right)
    generation = config.generation
    right = 'must be "process", or "auto" with a staleness of at least 1, with launch "ray"'
    require(config.placement == "process", "generation.placement", generation.placement, right)
    right = 'must be null with launch "ray": ray.num_gpus says whether generators run on GPUs'
    require(generation.device is None, "generation.device", generation.device, right)
    gpus, reserved = generation.vllm.tensor_parallel_size, config.ray.num_gpus
    right = f"must be {gpus}, as generation.vllm.tensor_parallel_size says, or 0 to sample on CPUs"
    require(gpus == 1 or reserved in (0, gpus), "ray.num_gpus", reserved, right)
    right = 'must be "merged" with launch "ray": the weights below the adapters would have to be on every node'
    require(config.lora.publish == "merged", "lora.publish", config.lora.publish, right)
