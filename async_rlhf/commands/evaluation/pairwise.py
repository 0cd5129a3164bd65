"""A language model behind an OpenAI-compatible URL that says which of two completions is better."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import xxhash

from async_rlhf.config import ConfigError, JudgeConfig
from async_rlhf.config.secrets import apart, masked
from async_rlhf.system.files import whole_lines
from async_rlhf.system.progress import progress_bar

logger = logging.getLogger(__name__)

QUESTION = """Here are a request and two answers to it. Which answer is the better one: the more correct, helpful and \
clear? Length in itself is no merit, nor is the order in which they are shown.

[Request]
{prompt}

[Answer A]
{first}

[Answer B]
{second}

Reply with the letter of the better answer, A or B, and nothing else."""
_RETRIED = {408, 409, 425, 429, 500, 502, 503, 504}


class Pair(NamedTuple):
    """Two answers to one prompt."""

    prompt: str
    ours: str
    theirs: str


class JudgeError(OSError):
    """A request to the judge failed. Earlier verdicts are kept."""

    def __init__(self, message: str) -> None:
        super().__init__(masked(message))


class PairwiseJudge:
    """Asks for a verdict on every pair in both orders.

    Args:
        config: with a URL.
        memory: a .jsonl file to which every verdict is added at once; verdicts in it are not requested again.

    Raises:
        ConfigError: the file with the question lacks a place for the prompt or an answer.
    """

    def __init__(self, config: JudgeConfig, memory: Path) -> None:
        assert config.url is not None
        self.config, self.memory = config, memory
        self._url, self._login = apart(config.url)
        self._question = QUESTION
        if config.prompt_file is not None:
            try:
                self._question = Path(config.prompt_file).read_text(encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"judge.prompt_file: got {config.prompt_file!r}: {error}") from error
        for place in ("{prompt}", "{first}", "{second}"):
            if place not in self._question:
                raise ConfigError(f"judge.prompt_file: got {config.prompt_file!r}; must have {place} in it")
        self._answered = False
        """Whether the judge has answered at all; if so, a later refusal is the fault of one text."""
        self._known: dict[str, str] = {}
        if memory.is_file():
            lines = whole_lines(memory)
            self._known = {one["key"]: one["reply"] for one in map(json.loads, lines)}

    def outcomes(self, pairs: Sequence[Pair], label: str) -> tuple[list[float], dict[str, float]]:
        """For each pair 1 where ours is the better answer, 0 where theirs is, 1/2 where the two orders disagree or the
        texts are the same.

        Args:
            pairs: any number.
            label: of the progress bar.

        Returns:
            The outcomes, and the shares of pairs whose two verdicts contradicted each other (`inconsistent`) and
            of verdicts that were neither A nor B (`unreadable`, which count as half).

        Raises:
            JudgeError: a request failed, after its retries.
        """
        # [pair][order]: ours is shown first, then second. Equal answers need no verdict.
        texts = [
            [self._text(pair.prompt, pair.ours, pair.theirs), self._text(pair.prompt, pair.theirs, pair.ours)]
            for pair in pairs
        ]
        asked = [both for pair, both in zip(pairs, texts, strict=True) if pair.ours != pair.theirs]
        self._ask(list(dict.fromkeys(text for both in asked for text in both)), label)
        outcomes, inconsistent, unreadable = [], 0, 0
        for pair, both in zip(pairs, texts, strict=True):
            if pair.ours == pair.theirs:
                outcomes.append(0.5)
                continue
            first, second = (verdict(self._known[self._key(text)]) for text in both)
            for_us = [{"A": 1.0, "B": 0.0}.get(first, 0.5), {"A": 0.0, "B": 1.0}.get(second, 0.5)]
            unreadable += (first == "") + (second == "")
            inconsistent += first == second != ""
            outcomes.append({0.0: 0.0, 2.0: 1.0}.get(sum(for_us), 0.5))
        shares = {"inconsistent": inconsistent / len(pairs), "unreadable": unreadable / (2 * len(pairs))}
        return outcomes, shares

    def _text(self, prompt: str, first: str, second: str) -> str:
        places = {"{prompt}": prompt, "{first}": first, "{second}": second}
        # In one pass: an answer may itself contain {second}.
        return re.sub(r"\{(?:prompt|first|second)\}", lambda match: places[match.group()], self._question)

    def _key(self, text: str) -> str:
        config = self.config
        return xxhash.xxh3_128(
            f"{config.model}\0{config.max_tokens}\0{text}".encode(errors="backslashreplace")
        ).hexdigest()

    def _ask(self, texts: Sequence[str], label: str) -> None:
        """Get a reply for every text, with several requests at the same time."""
        new = [text for text in texts if self._key(text) not in self._known]
        if not new:
            return
        self.memory.parent.mkdir(parents=True, exist_ok=True)
        key = os.environ.get(self.config.api_key_variable)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        with (
            httpx.Client(headers=headers, auth=self._login, timeout=self.config.timeout) as client,
            ThreadPoolExecutor(self.config.concurrency) as pool,
            self.memory.open("a", encoding="utf-8") as file,
            progress_bar(label, len(new)) as progress,
        ):
            stop = threading.Event()
            futures = {pool.submit(self._reply, client, text, stop): text for text in new}
            failure: BaseException | None = None
            try:
                for done, future in enumerate(as_completed(futures), start=1):
                    if future.cancelled():
                        continue
                    if (error := future.exception()) is not None:
                        failure = failure or error  # replies to requests under way are still recorded
                        stop.set()
                        for other in futures:
                            other.cancel()
                        continue
                    known = {"key": self._key(futures[future]), "reply": future.result()}
                    self._known[known["key"]] = known["reply"]
                    file.write(json.dumps(known) + "\n")
                    file.flush()
                    progress(done)
            except BaseException:  # Ctrl-C
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                client.close()
                raise
            if failure is not None:
                raise failure

    def _reply(self, client: httpx.Client, text: str, stop: threading.Event) -> str:
        config = self.config
        body = {
            "model": config.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0.0,
            "max_tokens": config.max_tokens,
        }
        url = f"{self._url.rstrip('/')}/chat/completions"
        said = ""
        for attempt in range(config.max_retries + 1):
            if attempt > 0 and _wait(stop, min(2.0 ** (attempt - 1), 30.0)):
                break
            try:
                answer = client.post(url, json=body)
            except httpx.HTTPError as error:
                said = f"{type(error).__name__}: {error}"
                continue
            if answer.status_code == 200:
                self._answered = True
                return _content(answer, url)
            if (
                answer.status_code == 400 and self._answered
            ):  # a refusal of this text only, such as a filter's: no verdict
                logger.warning("judge.url: %s refused a pair: %s", masked(url), answer.text[:200])
                return ""
            said = f"status {answer.status_code}: {answer.text[:200]}"
            if answer.status_code not in _RETRIED:
                break
        raise JudgeError(f"judge.url: {url} gave no verdict ({said}); what was said so far is in {self.memory}")


def _wait(stop: threading.Event, seconds: float) -> bool:
    """Wait. Returns whether ``stop`` cut it short."""
    return stop.wait(seconds)


def verdict(reply: str) -> str:
    """ "A" or "B", whichever letter stands alone in the reply; "" if none does, or both."""
    found = set(re.findall(r"(?<![A-Za-z])([AB])(?![A-Za-z'])", reply))
    return found.pop() if len(found) == 1 else ""


def _content(answer: httpx.Response, url: str) -> str:
    try:
        content: Any = answer.json()["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError) as error:
        raise JudgeError(f"judge.url: {url} replied {answer.text[:200]!r}; must be a chat completion") from error
    return str(content or "")
