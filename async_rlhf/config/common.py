"""Keys that several commands have, with the checks of several together: each is explained once, and inherited.

In Python they are passed by name. ``--help`` lists them after a command's own keys.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from async_rlhf.config.base import DEVICE, FOLDER, REQUIRED, SUMS, Checked, Rule, configuration, key
from async_rlhf.config.episodes import World
from async_rlhf.config.parallel import ParallelConfig, SharedConfig
from async_rlhf.config.rewards import check_functions

SHARE = Rule(lambda share: 0 < share < 1, "must be between 0 and 1")
COLUMN = Rule(bool, "must name a column")
SCORE = "score"
"""The column with a rating, unless the user says otherwise."""
MAX_COEFFICIENT = 1e15
STAYS = "what a weight or a penalty multiplies has to stay a number of 32 bits"
_RATE_LEAVES = "AdamW moves every weight by about the rate at each step, which leaves no model"
LEARNING_RATE: dict[str, Any] = {"gt": 0, "le": 10.0, "why": _RATE_LEAVES}
_WORDS = ("auto", "on_gpu")
TOKENS = Rule(lambda tokens: tokens in _WORDS or tokens >= 1, 'must be "auto", "on_gpu", or at least 1')
TokensOnGPU = int | Literal["auto", "on_gpu"] | None
_BEYOND = "must be 0.001 to 1000: beyond, logits / temperature are no use to float32"
TEMPERATURE = (Rule(lambda value: 1e-3 <= value <= 1e3, _BEYOND),)
"""Below these bounds log-probabilities overflow; above them all tokens are equally likely up to float32 rounding."""


@configuration(kw_only=True)
class RepeatableConfig(Checked):
    """A command that does nothing again unless it is told to."""

    overwrite: bool = key(False, role="place", main="output")
    """Do it again even if it is done already, and replace what is there."""


@configuration(kw_only=True)
class ResultsConfig(RepeatableConfig):
    """A folder of results."""

    output_dir: str = key(REQUIRED, *FOLDER, role="place", main="output")
    """The folder for all results."""


@configuration
class OfRunConfig(Checked):
    """What is done with an earlier run."""

    run: str = key(REQUIRED, names="run")
    """The output folder of a run of ``async-rlhf train``."""


@configuration(kw_only=True)
class SeededConfig(Checked):
    """Work that draws random numbers."""

    seed: int = key(0, ge=0, le=2**32 - 1, why="numpy's generators take no larger")
    """Seed of all that is drawn."""


@configuration(kw_only=True)
class ModelCodeConfig(Checked):
    """Models that may come with code."""

    trust_remote_code: bool = key(False, role="place")
    """Run Python code that comes with a model, wherever it is loaded; with false, a model that needs this is an
    error."""


_A_TIME = "must be a date or a time, such as 2026-11-27 or 2026-11-27T09:30"


def _is_time(text: str) -> bool:
    try:
        return bool(datetime.fromisoformat(text))
    except ValueError:
        return False


_TIME = Rule(_is_time, _A_TIME)


@configuration(kw_only=True)
class ChatConfig(Checked):
    """How chats become text."""

    system: str | None = key(None, Rule(bool, "must not be empty"))
    """The system message of all chats that have none of their own."""
    template_arguments: dict[str, Any] = key({})
    """Variables of the chat template, such as {"enable_thinking": false}; a row's `chat_template_kwargs` come first."""
    renderer: str | None = None
    """Write chats as the package renderers does for a family of models, such as "qwen3.5" or "deepseek-v4", in place of
    the tokenizer's chat template; needs ``pip install 'async-rlhf[renderers]'``."""
    now: str | None = key(None, _TIME, may_change="a checkpoint has the time of its run")
    """The time that templates see which write today's date; null for the start of the command, or of the run that is
    resumed or explained."""

    def time_of(self, started: str | None = None) -> datetime:
        """The time that templates see, in a run that started then; None for one that starts now."""
        time = self.now or started
        return datetime.now() if time is None else datetime.fromisoformat(time)


@configuration(kw_only=True)
class ChattingConfig(ModelCodeConfig):
    """Models that read chats."""

    chat: ChatConfig = key(ChatConfig)
    """How chats are written."""


@configuration(kw_only=True)
class OnRanksConfig(ChattingConfig):
    """Work that ranks can share."""

    device: str | None = key(None, DEVICE, role="place")
    """Where to compute, e.g. "cuda:0"; null takes the first GPU, or the CPU."""
    parallel: SharedConfig = key(SharedConfig)
    """The command on several ranks, which share the work."""

    def check(self) -> None:
        rule = 'must be null, "cpu" or "cuda" with parallel.ranks above 1: each rank takes the GPU of its number'
        self.require(self.parallel.ranks == 1 or self.device in (None, "cpu", "cuda"), "device", rule)
        super().check()


@configuration(kw_only=True)
class TrainingConfig(SeededConfig, OnRanksConfig):
    """Training by the learner, online or supervised."""

    learning_rate: float = key(3e-6, main="training", **LEARNING_RATE)
    """Peak rate of the optimiser."""
    gradient_accumulation_steps: int = key(1, ge=1)
    """Passes of one optimiser step."""
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt"] = (
        "linear"
    )
    """transformers' schedule of that name, stepped once after every optimiser step."""
    warmup_steps: int = key(0, ge=0)
    """Optimiser steps of linear warm-up."""
    weight_decay: float = key(0.0, ge=0, le=MAX_COEFFICIENT, why=STAYS)
    """Weight decay of AdamW; biases and normalisation weights, which have one dimension, do not decay."""
    max_tokens_per_pass: TokensOnGPU = key("on_gpu", TOKENS, without_gpu=None)
    """Tokens of one forward and backward pass at most: real ones where rows are packed, else with their padding. A
    batch keeps its size, and is cut into passes that cost about the same, for all ranks. A row, or pair, with more
    tokens gets a pass of its own. null for no limit but per_device_train_batch_size; "auto" for as many as fit into the
    GPU's memory (the log says how many), on a CPU for as many as are of use. A run that is resumed goes on with that
    number. "on_gpu" is, on a GPU that packs rows in 16 bits, the tokens of per_device_train_batch_size rows that are as
    long as they can be, which shorter ones fill better; elsewhere, and with deterministic, null."""
    bf16: Literal["auto", True, False] = key("auto", without_gpu=False)
    """Forward and backward under bfloat16 autocast; the weights stay float32. "auto" is true on a GPU that has
    bfloat16, and the log says so; elsewhere, and with fp16, false."""
    export_dtype: Literal["float32", "bfloat16"] = key(
        "float32", may_change="it decides how the final model is written"
    )
    """The type of the final model's files. "bfloat16" halves them; they then hold what generators in bfloat16 sample
    from. Checkpoints, a value model, and adapters beside the model stay in the type that is trained."""
    report_to: list[str] = key([], role="log", names="tracker")
    """transformers' integrations, e.g. ["wandb", "tensorboard", "trackio"], or one of them; "none" for none."""
    resume: bool = key(False, role="place", main="output")
    """Go on from the newest whole checkpoint of an interrupted command, bit for bit (on a GPU: with deterministic
    kernels); without one, start at the beginning."""
    resume_anyway: bool = key(False, role="place")
    """Resume even if a key or a file differs that makes the result a different one."""
    checkpoint_format: Literal["auto", "whole", "sharded"] = key("auto", role="speed")
    """ "whole" gathers what is trained, and the optimiser's state, on the first rank, and training waits until it is
    written. "sharded" copies both to the hosts' memory, and training goes on while every rank writes its own part
    (torch.distributed.checkpoint) and the first the policy in the standard format. "auto" is "sharded" with FSDP
    without cpu_offload where 3 billion parameters or more are trained, else "whole". "sharded" holds 12 bytes of host
    memory for each trained parameter, on all ranks together. A run may be resumed with the other format. ZeRO has only
    "whole"."""
    device = key(None, must_stay=SUMS)
    parallel: ParallelConfig = key(ParallelConfig)
    """The learner on several ranks."""

    @property
    def in_bfloat16(self) -> bool:
        """Whether ``bf16`` is true, and not "auto", which a run decides when it begins."""
        return self.bf16 is True


@configuration(kw_only=True)
class CompletionsConfig(Checked):
    """How completions are drawn."""

    temperature: float = key(0.7, *TEMPERATURE)
    """Temperature of the sampling distribution. All log-probabilities are those of the scaled distribution."""
    response_length: int = key(53, ge=1, le=10**7, why="no model reads more tokens", main="sizes")
    """Most new tokens of a completion, the stop token included."""
    batch_size: int = key(512, ge=1)
    """Most completions decoded together."""
    top_p: float = key(1.0, gt=0, le=1)
    """Sample only from the likeliest tokens that have this probability together; 1 samples from all. The
    log-probabilities of what was sampled are then those of the truncated distribution, and so is the KL of `evaluate`;
    a policy that is trained, and its KL, stay the whole one's."""
    top_k: int = key(0, ge=0, le=10**7, why="no vocabulary has more tokens")
    """Sample only from this many of the likeliest tokens; 0 samples from all."""

    @property
    def truncates(self) -> bool:
        """Whether some tokens are never drawn, so that log-probabilities are not those of the whole policy."""
        return self.top_p < 1 or self.top_k > 0


@configuration(kw_only=True)
class EpisodesConfig(Checked):
    """How long an episode with an environment, tools or an agent may be."""

    max_turns: int | None = key(None, ge=1, le=10**6, why="no episode has more")
    """Most answers of the policy in an episode, each of at most response_length tokens; an episode that goes on is cut
    off there. Must be given with an environment, tools or an agent, and null without."""
    episode_length: int | None = key(None, ge=1, le=10**7, why="no model reads more tokens")
    """Most tokens of an episode, or of one conversation of an agent, after its prompt, with what the environment says;
    null for what the model's positions leave beside the longest prompt, but at most 4096, or max_turns times
    response_length if that is more."""
    step_timeout: float | None = key(60.0, gt=0)
    """Seconds that an environment or a tool may take for one answer; null for no limit. One that takes longer has
    failed: a run then does what reward_errors says."""

    def check(self) -> None:
        rule = "must be null without max_turns, which says that there are episodes"
        self.require(self.max_turns is not None or self.episode_length is None, "episode_length", rule)
        super().check()


@configuration(kw_only=True)
class WorldConfig(Checked):
    """What answers the policy."""

    environment: str | None = key(None, names="function", main="data and models")
    """What answers the policy's messages until an episode is over, "module:Class" or "file.py:Class", optionally with
    literal keyword arguments. It may give rewards; max_turns says most answers of the policy."""
    tools: list[str] = key([], names="function", main="data and models")
    """Instead of an environment, functions that the policy may call, as "module:function" or "file.py:function". Some
    come along, in async_rlhf.tasks.tools."""
    agent: str | None = key(None, names="function", main="data and models")
    """Instead, an agent, "module:function" or "file.py:function": an async function of a client and a row, which asks
    the policy by an OpenAI-compatible endpoint and returns a reward."""

    @property
    def world(self) -> World:
        """What answers the policy, by its names."""
        return World(self.environment, self.tools, self.agent)


@configuration(kw_only=True)
class FirstWordsConfig(Checked):
    """Rows of plain text."""

    prompt_words: int | None = key(None, ge=1)
    """For rows of plain `text`: its first so many words are the prompt, the rest is the response; rewards get both as
    `query_reference_response`. Texts with no more words are dropped, and counted."""


@configuration(kw_only=True)
class PromptsConfig(FirstWordsConfig):
    """Rows with prompts."""

    prompt_field: str = "query"
    """The column with the prompt, as text or as messages of a chat."""

    def check(self) -> None:
        rule = f"must be left out with {self._group}prompt_words, which takes the prompt from `text`"
        self.require(self.prompt_words is None or self.prompt_field == "query", "prompt_field", rule)
        super().check()


@configuration(kw_only=True)
class HeldOutShareConfig(Checked):
    """Data of which a share is held out."""

    eval_fraction: float | None = key(None, SHARE)
    """Hold out about this share of the training data instead; null for none. A hash of the prompt (without one, of the
    text) decides, so every command holds out the same rows of the same data, and rows of one prompt stay together."""


@configuration(kw_only=True)
class HeldOutRowsConfig(FirstWordsConfig, HeldOutShareConfig):
    """Training data, of which some may be held out."""

    eval: str | None = key(None, main="data and models", names="data")
    """Held-out data in the same format; null for none, or for eval_fraction."""
    train_split: str = "train"
    """The split to take if there are several."""
    eval_split: str = "validation"
    """The same, for held-out data."""

    def check(self) -> None:
        rule = f"must be null with {self._group}eval, which names the held-out data"
        self.require(self.eval is None or self.eval_fraction is None, "eval_fraction", rule)
        if self.eval is None:
            self.leaves_out(["eval_split"], f"without {self._group}eval", self._group)
        super().check()


@configuration
class TrainRowsConfig(HeldOutRowsConfig):
    """Data to train on."""

    train: str = key(REQUIRED, main="data and models", names="data")
    """A .jsonl, .json, .parquet or .csv file, a folder written by datasets, or a name on the hub."""


@configuration(kw_only=True)
class SamplingConfig(CompletionsConfig, PromptsConfig, SeededConfig, RepeatableConfig, OnRanksConfig):
    """Answers to prompts by models that are not trained."""

    temperature = key(0.7, main="sampling")
    response_length = key(53, main="sampling")
    batch_size = key(256)
    seed = key(0, main="sampling")
    max_prompts: int | None = key(None, ge=1, main="sampling")
    """Take only this many prompts; null for all."""
    max_prompt_length: int | None = key(None, ge=1)
    """Prompts with more tokens are dropped, and counted; null for 512, or less if a model has not so many positions
    besides those of the response."""


@configuration(kw_only=True)
class RewardedConfig(Checked):
    """Completions judged by a reward."""

    reward_model: str | None = key(None, main="judging", names="model")
    """The judge, such as a gold reward: a reward model (folder, owner/model or owner/model@revision), or else
    reward_funcs (``evaluate`` also takes judge)."""
    reward_funcs: list[str] = key([], main="judging", names="function")
    """Or functions, as in ``train``."""

    def check_judge(self) -> None:
        """Require either a reward model or functions."""
        check_functions(self.reward_funcs)
        either = (self.reward_model is not None) != bool(self.reward_funcs)
        self.require(either, "reward_model", "give either a reward_model or reward_funcs")


@configuration(kw_only=True)
class RewardTokensConfig(RewardedConfig):
    """Texts that are judged, which a reward model may read otherwise than the policy."""

    reward_tokenizer: str | None = key(None, names="source", main="judging")
    """Tokenizer of the reward model; null takes the one saved with it. Functions need a tokenizer only for chats, which
    its template turns into text."""


@configuration(kw_only=True)
class AnyVLLMConfig(Checked):
    """What vLLM takes, in a process of a run or in a server."""

    gpu_memory_utilization: float = key(0.9, gt=0, le=1, role="speed")
    """Share of each GPU's memory that vLLM may take in all."""
    kv_cache_gb: float | None = key(None, gt=0, role="speed")
    """GiB for keys and values; null takes what gpu_memory_utilization leaves, and 1 on a CPU."""
    options: dict[str, Any] = key({})
    """More arguments of vLLM (``vllm.LLM``, or of a server ``vllm serve``), by name."""
    tensor_parallel_size: int = key(1, ge=1, le=1024, why="each is a process", role="place")
    """GPUs that share the model of one generator or server; must divide the heads of its attention. Generators take
    GPUs that the learner does not use, so many each; an inline one takes the first GPUs. On a CPU, processes that share
    its threads."""
    enforce_eager: bool | None = None
    """Neither capture CUDA graphs nor compile; null for false on a GPU and true on a CPU, where compiling takes
    minutes."""
