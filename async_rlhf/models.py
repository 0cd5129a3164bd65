"""Loading, making, running and saving models: policy, reference, reward.

Rows are padded on the right, so that under causal attention no real token ever sees padding: no attention mask and
no position ids are needed, and any causal language model of transformers works.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from async_rlhf.config import ConfigError, NewModelConfig
from async_rlhf.files import whole_folder
from async_rlhf.objectives.logprobs import entropies, selected_logprobs

logger = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)


def default_device() -> torch.device:
    """The first GPU, or the CPU."""
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def _check_source(name: str, key: str) -> None:
    looks_local = name.startswith((".", "/", "~")) or name.count("/") != 1
    if looks_local and not Path(name).is_dir():
        raise ConfigError(f"{key}: got {name!r}; must be a folder with a model, or a hub name such as owner/model")


def load_tokenizer(name: str, key: str = "model") -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub name.

    Raises:
        ConfigError: there is none, or it has no end-of-sequence token.
    """
    _check_source(name, key)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: no tokenizer could be loaded from {name!r}: {error}") from error
    return check_tokenizer(tokenizer)


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Require an end-of-sequence token, and give a tokenizer without padding token that one.

    That is safe here: lengths come from the sampler, so padding is never recognised by its value.
    """
    if tokenizer.eos_token_id is None:
        raise ConfigError("processing_class.eos_token: got None; the tokenizer needs one, or no completion could end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_policy(name: str, device: torch.device | str = "cpu", key: str = "model") -> PreTrainedModel:
    """A causal language model in float32 with dropout off."""
    _check_source(name, key)
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: no causal language model could be loaded from {name!r}: {error}") from error
    return disable_dropout(model.to(device))


def load_reward_model(name: str, device: torch.device | str = "cpu", key: str = "reward_model") -> PreTrainedModel:
    """A sequence-classification model with one output, in float32, in evaluation mode."""
    _check_source(name, key)
    try:
        model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=1, dtype=torch.float32)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{key}: no reward model could be loaded from {name!r}: {error}") from error
    return model.to(device).eval()


def new_reward_model(name: str, tokenizer: PreTrainedTokenizerBase, seed: int, key: str = "model") -> PreTrainedModel:
    """A reward model on the body of a language model, in float32 with dropout off.

    Its head starts from a normal distribution of standard deviation 1 / sqrt(hidden size + 1) that depends on the
    seed alone (Stiennon et al., "Learning to summarize from human feedback", 2020).
    """
    _check_source(name, key)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=1, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{key}: no reward model could be made from {name!r}: {error}") from error
        if getattr(model, "score", None) is None:
            raise ConfigError(f"{key}: {type(model).__name__} has no head named `score`; use a decoder model")
        nn.init.normal_(model.score.weight, std=(model.score.in_features + 1) ** -0.5)
    model.config.pad_token_id = tokenizer.pad_token_id
    return disable_dropout(model)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, key: str) -> None:
    """Require two tokenizers to read the same token ids alike."""
    ours, theirs = tokenizer.get_vocab(), other.get_vocab()
    if ours != theirs:
        differing = sum(theirs.get(token) != index for token, index in ours.items())
        raise ConfigError(
            f"{key}: its vocabulary has {len(theirs)} tokens, the policy's {len(ours)}, and {differing} of the "
            "policy's tokens read otherwise; must be a model with the policy's tokenizer"
        )


def disable_dropout(model: Model) -> Model:
    """Set every dropout probability to 0, so that train and eval mode compute the same."""
    names = ("attention_dropout", "hidden_dropout", "resid_pdrop", "attn_pdrop", "embd_pdrop", "dropout")
    holders: list[Any] = [getattr(model, "config", None), *model.modules()]
    for holder in holders:
        if isinstance(holder, nn.Dropout):
            holder.p = 0.0
        for name in names:  # attention reads its own copy of the number
            if isinstance(getattr(holder, name, None), float):
                setattr(holder, name, 0.0)
    return model


def new_gpt_neox(size: NewModelConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """A GPT-NeoX with random weights that depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPTNeoXForCausalLM(
            GPTNeoXConfig(
                vocab_size=len(tokenizer),
                hidden_size=size.hidden_size,
                num_hidden_layers=size.num_layers,
                num_attention_heads=size.num_heads,
                intermediate_size=4 * size.hidden_size,
                max_position_embeddings=size.max_positions,
                # GPT-NeoX's own 0.02 suits widths in the thousands; 1 / sqrt(width) is what a narrow model needs.
                initializer_range=size.hidden_size**-0.5,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
                bos_token_id=tokenizer.eos_token_id,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                attention_dropout=0.0,
                hidden_dropout=0.0,
            )
        )


def stop_token_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str] = ()
) -> tuple[int, ...]:
    """Ids that end a completion: the tokenizer's and the model's end of sequence, and the given single tokens."""
    stops = {tokenizer.eos_token_id}
    generation_config = getattr(model, "generation_config", None)
    eos = getattr(generation_config, "eos_token_id", None)
    stops.update(eos if isinstance(eos, (list, tuple)) else [] if eos is None else [eos])
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise ConfigError(
                f"generation.stop_tokens: got {text!r}, which is {len(ids)} tokens; must be a single token"
            )
        stops.update(ids)
    return tuple(sorted(stops))


@contextmanager
def _logits_at(model: PreTrainedModel, mask_BT: Tensor) -> Iterator[None]:
    """Within, the model's head sees only the hidden states at ``mask_BT``: logits come out as (N, V).

    The head is the largest matrix of many models and its output the largest tensor; prompts and padding need none.
    """
    head = model.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda _module, inputs: (inputs[0][mask_BT],))
    try:
        yield
    finally:
        handle.remove()


def response_logits(model: PreTrainedModel, tokens_BT: Tensor, response_mask_BT: Tensor) -> Tensor:
    """Logits that predict the response tokens, in the order of ``tokens_BT[response_mask_BT]``.

    Args:
        model: any causal language model.
        tokens_BT: rows of prompt and response, padded on the right.
        response_mask_BT: nonzero at response tokens. The first token of a row cannot be one.

    Returns:
        (N, V) float32 for the N response tokens.
    """
    # The logits that predict token t stand at t - 1.
    predicts_BT = torch.zeros_like(response_mask_BT, dtype=torch.bool)
    predicts_BT[:, :-1] = response_mask_BT[:, 1:].bool()
    with _logits_at(model, predicts_BT):
        logits_NV = model(input_ids=tokens_BT, use_cache=False).logits
    return logits_NV.reshape(-1, logits_NV.shape[-1]).float()


def response_logprobs(
    model: PreTrainedModel, tokens_BT: Tensor, response_mask_BT: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probability of each response token, and the entropy of the distribution it was drawn from.

    Args:
        model: any causal language model.
        tokens_BT: rows of prompt and response, padded on the right.
        response_mask_BT: nonzero at response tokens. The first token of a row cannot be one.
        temperature: logits are divided by it.

    Returns:
        Two (B, T) float32 tensors, 0 outside the response. The entropy, in nats, carries no gradient.
    """
    logits_NV = response_logits(model, tokens_BT, response_mask_BT) / temperature
    response_BT = response_mask_BT.bool()
    shape = response_mask_BT.shape
    empty_BT = torch.zeros(shape, dtype=torch.float32, device=logits_NV.device)
    logprobs_BT = empty_BT.masked_scatter(response_BT, selected_logprobs(logits_NV, tokens_BT[response_BT]))
    with torch.no_grad():
        entropies_BT = empty_BT.masked_scatter(response_BT, entropies(logits_NV))
    return logprobs_BT, entropies_BT


def reward_scores(model: PreTrainedModel, tokens_BT: Tensor, lengths_B: Tensor) -> Tensor:
    """Score of each row, read at its last real token.

    Args:
        model: a sequence-classification model with a linear head named ``score`` (as all of transformers' decoder
            models have) and one output.
        tokens_BT: rows of prompt and response, padded on the right.
        lengths_B: real tokens of each row.

    Returns:
        (B,) float32.
    """
    head = getattr(model, "score", None)
    if head is None:
        raise ConfigError(f"reward_model: {type(model).__name__} has no head named `score`; use a decoder model")
    hidden_BTH = model.base_model(input_ids=tokens_BT, use_cache=False).last_hidden_state
    last_BH = hidden_BTH[torch.arange(len(lengths_B), device=hidden_BTH.device), lengths_B - 1]
    return head(last_BH).squeeze(-1).float()


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write model and tokenizer in the standard format, whole or not at all."""
    with whole_folder(folder) as temporary:
        write_model(model, tokenizer, temporary)


def write_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write model and tokenizer into a folder.

    The generation config states the end-of-sequence token, so that generation from the saved model stops.
    """
    if model.can_generate():
        model.generation_config = GenerationConfig(
            eos_token_id=list(stop_token_ids(model, tokenizer)),
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
        )
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # a full disk comes as this, not as an OSError
        raise OSError(f"the model could not be written to {str(folder)!r}: {error}") from error
    tokenizer.save_pretrained(folder)
