"""Reward models that do not share the policy's tokenizer, several together, or behind a URL: they are given texts."""

from __future__ import annotations

import ast
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakValueDictionary

import httpx

from async_rlhf.config.base import REQUIRED, Checked, configuration, key, require
from async_rlhf.config.rewards import EndpointConfig
from async_rlhf.config.secrets import masked
from async_rlhf.rewards.chat import JudgeError, client_of, described, placed, post

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Message = dict[str, Any]


class _Loaded:
    """A model and its tokenizer."""

    def __init__(self, name: str, device: str, trust: bool) -> None:
        from async_rlhf.models.loading import load_reward_model, load_tokenizer

        self.model: PreTrainedModel = load_reward_model(name, device, "reward_models.models", trust=trust)
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(name, "reward_models.models", trust=trust)
        self.trained_here = (Path(name) / "reward.json").is_file()
        """Whether the command ``reward`` trained it; it then reads what the policy read and wrote."""

    def rows(
        self, prompts: Sequence[str], completions: Sequence[str], chats: Sequence[Sequence[Message] | None]
    ) -> list[tuple[int, ...]]:
        """Tokens of each prompt with its completion; ``chats`` has the messages of prompts that are chats."""
        from async_rlhf.data.tokenizer import Rendered, encode_prompts, encode_responses
        from async_rlhf.models.chats import ChatTemplate

        if self.trained_here:
            read = [p if chat is None else Rendered(p) for p, chat in zip(prompts, chats, strict=True)]
            answers = encode_responses(ChatTemplate(self.tokenizer), completions)
            return [a + b for a, b in zip(encode_prompts(self.tokenizer, read), answers, strict=True)]
        return [_tokens(self.tokenizer, *each) for each in zip(prompts, completions, chats, strict=True)]


_LOADED: WeakValueDictionary[tuple[str, str, bool], _Loaded] = WeakValueDictionary()
"""Models that functions have now; a run loads each once."""


class _Latest:
    """The scores computed last, for functions of one run that make different rewards of them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.asked: Any = None
        self.scores_MR: Any = None


_LATEST = _Latest()


@configuration
class RewardModels(Checked):
    """Scores of one or several sequence-classification models with one output, each with its own tokenizer.

    A model that ``reward`` has trained reads what the policy read and wrote, as it was trained. Of others, one whose
    tokenizer has a chat template gets prompt and completion as a chat, any other one after the other. The models
    compute in the thread of reward functions: on a CPU or a GPU of their own, beside training.
    """

    _group = "reward_models."

    models: list[str] = key(REQUIRED)
    """Folders or hub names."""
    how: Literal["mean", "minimum", "mean_less_deviation", "deviation"] = "mean"
    """How several scores make one: "mean_less_deviation" is the mean less ``factor`` standard deviations between the
    models. "deviation" is that standard deviation, to be watched with the weight 0 beside another of these."""
    factor: float = key(1.0, ge=0)
    """See ``how``."""
    batch_size: int = key(16, ge=1)
    """Texts of a pass."""
    device: str = "cpu"
    """Such as "cpu" or "cuda:3"."""
    trust_remote_code: bool = False
    """Run Python code that comes with a model."""

    @property
    def __name__(self) -> str:
        """Its name in metrics and messages."""
        return "reward_models_deviation" if self.how == "deviation" else "reward_models"

    def check(self) -> None:
        require(len(self.models) > 0, "reward_models.models", self.models, "must name one at least")

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
        """The rewards."""
        chats = _chats_of(len(prompts), columns)
        asked = self.models, self.batch_size, self.device, self.trust_remote_code, [*prompts], [*completions], chats
        with _LATEST.lock:  # whoever asks for the same scores at the same time waits for them
            if _LATEST.asked != asked:
                _LATEST.asked, _LATEST.scores_MR = None, self._scores(prompts, completions, chats)
                _LATEST.asked = asked
            scores_MR = _LATEST.scores_MR
        return self._together(scores_MR).tolist()

    def _scores(
        self, prompts: Sequence[str], completions: Sequence[str], chats: Sequence[Sequence[Message] | None]
    ) -> Any:
        """(M, R): of each model."""
        import torch

        from async_rlhf.models.forward import score_rows

        scores = []
        for loaded in self._loaded:
            model = loaded.model
            rows = loaded.rows(prompts, completions, chats)
            limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
            longest = max(map(len, rows))
            if limit is not None and longest > limit:
                name = model.config.name_or_path
                raise ValueError(f"reward model {name!r} reads {limit} tokens, and a text has {longest}")
            with torch.no_grad():
                scores.append(score_rows(model, rows, self.batch_size).double())
        return torch.stack(scores)

    def _together(self, scores_MR: Any) -> Any:
        if self.how == "minimum":
            return scores_MR.amin(dim=0)
        if self.how == "deviation":
            return scores_MR.std(dim=0, correction=0)
        less = self.factor * scores_MR.std(dim=0, correction=0) if self.how == "mean_less_deviation" else 0.0
        return scores_MR.mean(dim=0) - less

    @cached_property
    def _loaded(self) -> list[_Loaded]:
        """Functions of one run share the models that both have."""
        models = []
        for name in self.models:
            what = name, self.device, self.trust_remote_code
            model = _LOADED.get(what) or _Loaded(*what)
            _LOADED[what] = model
            models.append(model)
        return models


def _chats_of(count: int, columns: Mapping[str, Any]) -> list[Sequence[Message] | None]:
    """The messages of each prompt that is a chat."""
    whole, said = columns.get("messages"), columns.get("completion_messages")
    if whole is None or said is None:
        return [None] * count
    return [chat[: len(chat) - len(answer)] or None for chat, answer in zip(whole, said, strict=True)]


def _tokens(
    tokenizer: PreTrainedTokenizerBase, prompt: str, completion: str, chat: Sequence[Message] | None
) -> tuple[int, ...]:
    if tokenizer.chat_template is None:
        tokens, end = tokenizer.encode(prompt + completion), tokenizer.eos_token_id
        return (*tokens, end) if tokens[-1:] != [end] else tuple(tokens)  # some tokenizers add it
    whole = [*(chat or _messages(prompt)), {"role": "assistant", "content": completion}]
    text = tokenizer.apply_chat_template(whole, tokenize=False)
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _messages(prompt: str) -> list[Message]:
    """The messages of a prompt: of one that is a chat, which reward functions see as text, or of a question."""
    if prompt.startswith("[{"):
        try:
            messages = ast.literal_eval(prompt)
        except (ValueError, SyntaxError):
            messages = None
        if isinstance(messages, list) and all(isinstance(message, dict) and "role" in message for message in messages):
            return messages
    return [{"role": "user", "content": prompt}]


@configuration
class RewardServer(EndpointConfig):
    """Scores of a classification server, asked for many texts at a time: vLLM's ``/classify`` (``vllm serve MODEL
    --runner pooling``), or any that answers {"scores": [...]}; ``url`` is that of the endpoint.
    """

    _group = "reward_server."

    template: str = "{prompt}{completion}"
    """The text that is scored."""
    batch_size: int = key(32, ge=1)
    """Texts of a request."""

    __name__ = "reward_server"
    by_prompt = True

    def check(self) -> None:
        self.require_public()
        rule = "must have {completion} in it"
        require("{completion}" in self.template, "reward_server.template", self.template, rule)

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
        """The rewards."""
        both = zip(prompts, completions, strict=True)
        texts = [placed(self.template, {"prompt": prompt, "completion": completion}) for prompt, completion in both]
        parts = [texts[start : start + self.batch_size] for start in range(0, len(texts), self.batch_size)]
        with ThreadPoolExecutor(self.concurrency) as pool:
            return [score for scores in pool.map(self._ask, parts) for score in scores]

    def _ask(self, texts: list[str]) -> list[float]:
        assert self.url is not None
        # vLLM would give the sigmoid of a single score.
        body = {"model": self.model, "input": texts, "use_activation": False}
        answer = post(self._client, self.url, body, self.max_retries)
        if isinstance(answer, Exception) or answer.status_code != 200:
            raise JudgeError(f"reward server {self.url} gave no scores ({described(answer)})")
        scores = _scores_in(answer)
        if len(scores) != len(texts):
            rule = f'must be {len(texts)} scores, as {{"data": [{{"probs": [...]}}, ...]}} or {{"scores": [...]}}'
            raise JudgeError(f"reward server {masked(self.url)} replied {answer.text[:200]!r}; {rule}")
        return scores

    @cached_property
    def _client(self) -> httpx.Client:
        return client_of(self)


def _scores_in(answer: httpx.Response) -> list[float]:
    """The scores of a reply; none of one that cannot be read. Of several classes the last counts."""
    try:
        body = answer.json()
        if "scores" in body:
            return [float(score) for score in body["scores"]]
        return [float(entry["probs"][-1]) for entry in sorted(body["data"], key=lambda entry: entry["index"])]
    except (ValueError, LookupError, TypeError):
        return []


reward_models, reward_server = RewardModels, RewardServer
"""``async_rlhf.rewards.reward_models:reward_models(models=['a', 'b'])`` and ``...:reward_server(url='...')``."""
