"""Chat templates for tokenizers that have none: the template, its special tokens, and the one that ends an answer."""

from __future__ import annotations

import re
from pathlib import Path

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from async_rlhf.config import ConfigError

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {"chatml": CHATML}
"""Templates that have a name."""

# <|im_end|>, </s>, <start_of_turn>, [/INST] and the like: what templates write that nobody types.
_SPECIAL = re.compile(r"<\|[\w.:/-]+\|>|</?s>|<(?:start|end)_of_\w+>|\[/?[A-Z][A-Z_]+\]")
_QUESTION, _ANSWER = "the question", "the answer"


def read_template(template: str) -> str:
    """The Jinja text of a named template, of a file, or the given text itself.

    Raises:
        ConfigError: it is none of these.
    """
    if template in TEMPLATES:
        return TEMPLATES[template]
    if (path := template_file(template)) is not None:
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat_template: {template!r} could not be read: {error}") from error
    if "{%" in template or "{{" in template:
        return template
    named = " or ".join(f'"{name}"' for name in TEMPLATES)
    raise ConfigError(
        f"chat_template: got {template!r}; there is no such file; must be {named}, a Jinja file, or its text"
    )


def template_file(template: str) -> Path | None:
    """The file with that name, if there is one."""
    try:
        path = Path(template).expanduser()
        return path if path.is_file() else None
    except (OSError, RuntimeError):  # a text that is too long for a name
        return None


def use_template(tokenizer: PreTrainedTokenizerBase, template: str) -> list[str]:
    """Give a tokenizer a chat template, and make the template's special tokens single tokens.

    The special token that the template writes first after an answer, if any, becomes the end of sequence: a model that
    learns from such chats ends its answers with it.

    Args:
        tokenizer: changed in place; with an end-of-sequence token.
        template: Jinja text.

    Returns:
        The tokens that were added to the vocabulary.

    Raises:
        ConfigError: the template is no Jinja, or cannot write a question with its answer.
    """
    tokenizer.chat_template = template
    whole = _rendered(tokenizer)
    special = list(dict.fromkeys(_SPECIAL.findall(template) + _SPECIAL.findall(whole)))
    known = tokenizer.get_vocab()
    added = [token for token in special if token not in known]
    tokenizer.add_tokens(added, special_tokens=True)
    after = whole.rpartition(_ANSWER)[2]
    ends = [token for token in {*special, tokenizer.eos_token} if token in after]
    if ends:
        tokenizer.eos_token = min(ends, key=after.index)
    return added


def _rendered(tokenizer: PreTrainedTokenizerBase) -> str:
    """A question with its answer, as the template writes them."""
    chat = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    try:
        whole = str(tokenizer.apply_chat_template(chat, tokenize=False))
    except (TemplateError, TypeError, KeyError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"chat_template: it cannot write a question and its answer: {error}") from error
    for text in (_QUESTION, _ANSWER):
        if text not in whole:
            raise ConfigError(f"chat_template: it writes {text!r} as {whole!r:.200}; must have every message's content")
    return whole
