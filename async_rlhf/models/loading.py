"""Loading and checking models: policy, reference, reward."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as hf_logging

from async_rlhf.config import ConfigError
from async_rlhf.config.base import require
from async_rlhf.models.chats import ChatTemplate
from async_rlhf.models.quantised import keep_format, quantised, saved_tensors
from async_rlhf.models.weights import checksum, named_weights
from async_rlhf.system.names import base_of, check_folder, check_source, with_revision

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")
SMALL = 10**9
"""Bytes of a model that is loaded or saved within seconds, and needs no bar."""


def bytes_of(name: str) -> float:
    """Bytes of the weights in a folder; infinite for a name on the hub."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return float("inf")
    return sum(path.stat().st_size for kind in ("*.safetensors", "*.bin") for path in folder.glob(kind))


@contextmanager
def quietly(size: float) -> Iterator[None]:
    """Within, transformers reports only errors, and shows bars only for models of at least :data:`SMALL` bytes.

    Its report of missing and unexpected weights is left out: the callers check these themselves.
    """
    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    if size < SMALL:
        hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()


logger = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)


def default_device() -> torch.device:
    """The first GPU, or the CPU."""
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def brings_code(kind: type) -> bool:
    """Whether a class of a model or configuration is code that came with a model, and not transformers' own.

    Such a class exists only if the user has allowed this code to run.
    """
    return kind.__module__.startswith("transformers_modules.")


def from_pretrained(kind: Any, name: str, key: str, trust: bool, **options: Any) -> Any:
    """The only place that loads anything of transformers by name.

    ``trust_remote_code`` is always passed: otherwise transformers would ask on standard input and obey the answer.

    Raises:
        ConfigError: it brings code that the user did not allow.
    """
    check_source(name, key)
    whole, (name, revision) = name, with_revision(name)
    if revision is not None:
        options["revision"] = revision
    try:
        with quietly(bytes_of(name)):
            return kind.from_pretrained(str(Path(name).expanduser()), trust_remote_code=trust, **options)
    except ValueError as error:
        if trust or "trust_remote_code" not in str(error):
            raise
        right = f"must be true to load {key}, {whole!r}, which brings Python code of its own that is run then"
        raise ConfigError(f"trust_remote_code: got False; {right}") from None


def load_tokenizer(name: str, key: str = "model", *, trust: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub name.

    Args:
        name: the folder or hub name.
        key: the configuration key that errors name.
        trust: whether Python code that comes with it may be run.

    Raises:
        ConfigError: there is none, or it has no end-of-sequence token, or it brings code that is not trusted.
    """
    folder = Path(name).expanduser()
    found, right = f"{key}: no tokenizer could be loaded from {name!r}", "must be a folder with tokenizer files"
    if folder.is_dir() and not any(next(folder.glob(kind), None) for kind in _TOKENIZER_FILES):
        adapters = f"; the folder has only adapters, of {base!r}" if (base := base_of(folder)) else ""
        raise ConfigError(f"{found}; it has none{adapters}; {right} beside the model")
    try:
        tokenizer = from_pretrained(AutoTokenizer, name, key, trust)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"{found}: {error}") from error
    # From a folder with only a model, transformers makes a tokenizer without a vocabulary.
    if not tokenizer.encode("a", add_special_tokens=False):
        raise ConfigError(f"{found}; it has none; {right} beside the model")
    return check_tokenizer(tokenizer)


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Require an end-of-sequence token, and use it for padding if there is no padding token.

    This is safe here: lengths come from the sampler, so padding is never recognised by its value.
    """
    if tokenizer.eos_token_id is None:
        raise ConfigError("processing_class.eos_token: got None; the tokenizer needs one, or no completion could end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_policy(
    name: str, device: torch.device | str = "cpu", key: str = "model", *, trust: bool = False
) -> PreTrainedModel:
    """A causal language model in float32 with dropout off.

    Args:
        name: a folder or hub name.
        device: where to put it.
        key: the configuration key that errors name.
        trust: whether code that comes with it may be run.
    """
    return disable_dropout(_load(AutoModelForCausalLM, name, key, trust).to(device))


def load_in_four_bits(name: str, device: torch.device, dtype: torch.dtype, *, trust: bool = False) -> PreTrainedModel:
    """The same with its linear layers but the head in 4 bits, which compute in ``dtype``: the base of adapters."""
    options = {"quantization_config": quantised(dtype), "device_map": {"": device}}
    model = disable_dropout(_load(AutoModelForCausalLM, name, "model", trust, **options))
    keep_format(model)
    return model


def load_reward_model(
    name: str,
    device: torch.device | str = "cpu",
    key: str = "reward_model",
    *,
    trust: bool = False,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """A sequence-classification model with one output, in evaluation mode.

    Args:
        name: a folder or hub name.
        device: where to put it.
        key: the configuration key that errors name.
        trust: see :func:`load_policy`.
        dtype: of the weights.
    """
    model = _load(AutoModelForSequenceClassification, name, key, trust, num_labels=1)
    return check_reward_model(model, key).to(device, dtype).eval()


def check_reward_model(model: PreTrainedModel, key: str = "reward_model") -> PreTrainedModel:
    """Require the head that scores are read from."""
    if not isinstance(getattr(model, "score", None), nn.Module):
        raise ConfigError(f"{key}: {type(model).__name__} has no head named `score`; must be a decoder model with one")
    scores = getattr(model.score, "out_features", 1)
    require(scores == 1, key, model.config.name_or_path or type(model).__name__, _one_score(scores))
    return model


def _one_score(labels: int) -> str:
    return f"it gives each text {labels} numbers (num_labels); must be a model that gives one, its score"


def reward_model_for(
    model: PreTrainedModel | str, tokenizer: PreTrainedTokenizerBase, device: torch.device, trust: bool = False
) -> PreTrainedModel:
    """The given reward model, or the one of that name, which must use the policy's tokens."""
    if isinstance(model, str):
        check_vocabulary(tokenizer, load_tokenizer(model, "reward_model", trust=trust), "reward_model")
        model = load_reward_model(model, device, trust=trust)
    check_embeddings(model, tokenizer, "reward_model")
    return check_reward_model(model).to(device).eval()


def _load(kind: Any, name: str, key: str, trust: bool, **options: Any) -> PreTrainedModel:
    """A complete model, in float32 unless said otherwise: missing weights are an error, as they would be random."""
    what = "causal language model" if kind is AutoModelForCausalLM else "reward model"
    check_folder(name, key)
    try:
        options = {"dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True, **options}
        model, report = from_pretrained(kind, name, key, trust, **options)
    except ConfigError:
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{key}: no {what} could be loaded from {name!r}: {error}") from error
    for wrong, found, right in sorted(report["mismatched_keys"]):
        if kind is not AutoModelForCausalLM:
            labels = from_pretrained(AutoConfig, name, key, trust).num_labels
            require(labels == 1, key, name, _one_score(labels))
        shapes = f"{wrong} has the shape {tuple(found)}; must be {tuple(right)}, as its config.json says"
        raise ConfigError(f"{key}: no {what} could be loaded from {name!r}: {shapes}")
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise ConfigError(f"{key}: {name!r} holds no {what}: it lacks the weights {missing}")
    if report["unexpected_keys"]:
        extra = sorted(report["unexpected_keys"])
        why = f"{len(extra)} weights belong to no {what} and are left out: {extra[0]}"
        logger.warning("%s: %r: %s%s", key, name, why, " ..." if len(extra) > 1 else "")
    return model


def new_reward_model(
    name: str, tokenizer: PreTrainedTokenizerBase, seed: int, *, trust: bool = False
) -> PreTrainedModel:
    """A reward model on the body of a language model, in float32 with dropout off.

    Its head is drawn from a normal distribution of standard deviation 1 / sqrt(hidden size + 1), and depends only on
    the seed (Stiennon et al., "Learning to summarize from human feedback", 2020).
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind = AutoModelForSequenceClassification
        try:
            model = from_pretrained(kind, name, "model", trust, num_labels=1, dtype=torch.float32)
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            raise ConfigError(f"model: no reward model could be made from {name!r}: {error}") from error
        if getattr(model, "score", None) is None:
            raise ConfigError(f"model: {type(model).__name__} has no head named `score`; use a decoder model")
        nn.init.normal_(model.score.weight, std=(model.score.in_features + 1) ** -0.5)
    model.config.pad_token_id = tokenizer.pad_token_id
    return disable_dropout(model)


def frozen_checksum(model: nn.Module) -> str:
    """A checksum of all that decides a model's output, also of one with quantised layers that has just been loaded."""
    quantised_ones = saved_tensors(model)
    return checksum(named_weights(model) if quantised_ones is None else quantised_ones)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, key: str) -> None:
    """Require two tokenizers to give the same meaning to the same token ids."""
    ours, theirs = tokenizer.get_vocab(), other.get_vocab()
    if ours != theirs:
        differing = sum(theirs.get(token) != index for token, index in ours.items())
        raise ConfigError(
            f"{key}: its vocabulary has {len(theirs)} tokens, the policy's {len(ours)}, and {differing} of the "
            "policy's tokens read otherwise; must be a model with the policy's tokenizer"
        )


def disable_dropout(model: Model) -> Model:
    """Set every dropout probability to 0, so that training and evaluation mode compute the same."""
    holders: list[Any] = [getattr(model, "config", None), *model.modules()]
    for holder in holders:
        if isinstance(holder, nn.Dropout):
            holder.p = 0.0
        for name, value in list(getattr(holder, "__dict__", {}).items()):  # modules keep their own copies of numbers
            if isinstance(value, float) and ("drop" in name or name.endswith("pdrop")):
                setattr(holder, name, 0.0)
    return model


@torch.no_grad()
def require_repeatable(model: PreTrainedModel, key: str) -> None:
    """Require that two passes of a model in training mode compute the same: whatever it draws would be noise in every
    ratio of probabilities.

    Raises:
        ConfigError: they do not; names the first module whose outputs differ.
    """
    tokens_BT = torch.arange(1, 9, device=model.device).remainder(model.get_input_embeddings().num_embeddings)[None]
    passes: list[dict[str, Tensor]] = []
    modules = {module: name for name, module in model.named_modules() if not list(module.children())}

    def note(module: nn.Module, _: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        if isinstance(output, Tensor):
            passes[-1].setdefault(modules[module], output)

    training = model.training
    with ExitStack() as stack:
        stack.callback(model.train, training)
        for module in modules:
            stack.callback(module.register_forward_hook(note).remove)
        model.train()
        first, second = (_noted(model, tokens_BT, passes) for _ in range(2))
    if torch.allclose(first, second, rtol=1e-2, atol=1e-3, equal_nan=True):
        return
    before, after = passes
    moved = (name for name in before if name in after and not torch.equal(before[name], after[name]))
    right = "must compute without random numbers: set its dropout or noise to 0 in config.json"
    where = next(moved, next(iter(before)))
    raise ConfigError(f"{key}: two passes in training mode differ, first in its module {where!r}; {right}")


def _noted(model: PreTrainedModel, tokens_BT: Tensor, passes: list[dict[str, Tensor]]) -> Tensor:
    passes.append({})
    return model(input_ids=tokens_BT, use_cache=False).logits.float()


def in_float32(model: PreTrainedModel) -> PreTrainedModel:
    """The model in float32: at RLHF's learning rates, AdamW in bfloat16 would change few weights."""
    if all(parameter.dtype == torch.float32 for parameter in model.parameters()):
        return model
    logger.warning("model: its weights are converted to float32; set bf16 to compute in bfloat16")
    return model.float()


def check_embeddings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, key: str) -> None:
    """Require an embedding for every token of the policy's tokenizer."""
    rows, tokens = model.get_input_embeddings().num_embeddings, len(tokenizer)
    if rows < tokens:
        raise ConfigError(
            f"{key}: it has embeddings for {rows} tokens, the policy's tokenizer has {tokens}; must be a model "
            "with the policy's tokenizer"
        )


def tokenizer_for(
    model: PreTrainedModel | str, tokenizer: PreTrainedTokenizerBase | None, trust: bool = False
) -> PreTrainedTokenizerBase:
    """The given tokenizer, else the model's own."""
    if tokenizer is not None:
        return check_tokenizer(tokenizer)
    name = model if isinstance(model, str) else model.config.name_or_path
    if not name:
        raise ConfigError("processing_class: got None, and the model does not say where it was loaded from; give one")
    return load_tokenizer(name, "processing_class" if not isinstance(model, str) else "model", trust=trust)


def that_stops(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stops: Sequence[int] = ()
) -> GenerationConfig:
    """The model's generation config, with all that ends its completions: the tokenizer's end of sequence, and those
    given. One that says nothing of ends gets the tokenizer's padding, too.
    """
    found = copy.deepcopy(getattr(model, "generation_config", None) or GenerationConfig())
    ends = found.eos_token_id
    own = list(ends) if isinstance(ends, (list, tuple)) else [] if ends is None else [ends]
    more = [stop for stop in stop_token_ids(model, tokenizer, ids=stops) if stop not in own]
    found.eos_token_id = own + more
    if not own:
        found.pad_token_id, found.bos_token_id = tokenizer.pad_token_id, tokenizer.bos_token_id
    return found


def stop_token_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str] = (), ids: Sequence[int] = ()
) -> tuple[int, ...]:
    """Ids that end a completion: those with which the tokenizer's chats and texts end, the model's end of sequence, and
    the given single tokens.
    """
    stops, vocabulary = {*ChatTemplate(tokenizer).ends, *ids}, model.get_input_embeddings().num_embeddings
    right = f"must be below {vocabulary}, the tokens of the model"
    require(max(ids, default=0) < vocabulary, "generation.stop_token_ids", list(ids), right)
    generation_config = getattr(model, "generation_config", None)
    eos = getattr(generation_config, "eos_token_id", None)
    stops.update(eos if isinstance(eos, (list, tuple)) else [] if eos is None else [eos])
    for text in texts:
        found = tokenizer.encode(text, add_special_tokens=False)
        if len(found) != 1:
            raise ConfigError(
                f"generation.stop_tokens: got {text!r}, which is {len(found)} tokens; must be a single token"
            )
        stops.update(found)
    return tuple(sorted(stops))
