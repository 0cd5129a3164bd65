"""Tokens of whole data sets: computed on all cores, and kept for the next run.

A fast tokenizer itself spreads a list of texts over the cores. Large data sets are kept in a file named by a hash of
the tokenizer and of every text, so a file that is found is always valid, and a change of either makes a new file.
"""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import xxhash
from transformers import PreTrainedTokenizerBase

from async_rlhf.reports.progress import progress_bar
from async_rlhf.system.files import cache_folder

logger = logging.getLogger(__name__)

CACHED_FROM = 1_000_000
"""Characters from which texts are cached; fewer are tokenised as fast as a cache is read."""
_CHUNK = 10_000  # texts per step of the progress bar


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], label: str = "texts"
) -> list[tuple[int, ...]]:
    """Token ids of each text, without special tokens.

    Args:
        tokenizer: any.
        texts: any number.
        label: their name on the progress bar.
    """
    if sum(map(len, texts)) < CACHED_FROM:
        return _tokenise(tokenizer, texts)
    path = cache_folder() / f"tokens-{_key(tokenizer, texts)}.npz"
    found = _read(path, len(texts))
    if found is not None:
        logger.info("%s: tokens of %d texts, from %s", label, len(texts), path)
        return found
    encoded: list[tuple[int, ...]] = []
    with progress_bar(f"{label}: tokenising", len(texts)) as progress:
        for start in range(0, len(texts), _CHUNK):
            encoded += _tokenise(tokenizer, texts[start : start + _CHUNK])
            progress(len(encoded))
    _write(path, encoded)
    return encoded


def _tokenise(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[tuple[int, ...]]:
    if not texts:
        return []
    return [tuple(ids) for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]


def _key(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> str:
    """Hash of everything that the tokens depend on. A slow tokenizer is identified by its vocabulary and its class."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = f"{type(tokenizer)} {sorted(tokenizer.get_vocab().items())}" if backend is None else backend.to_str()
    digest = xxhash.xxh3_128(state.encode())
    for text in texts:
        raw = text.encode()
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.hexdigest()


def _read(path: Path, count: int) -> list[tuple[int, ...]] | None:
    """The tokens, or None if there is no file or it is not what was written."""
    try:
        with np.load(path) as file:
            ids, lengths = file["ids"], file["lengths"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        logger.warning("cache file %s is damaged; tokenising again", path)
        return None
    if len(lengths) != count or lengths.sum() != len(ids):
        logger.warning("cache file %s is damaged; tokenising again", path)
        return None
    flat = ids.tolist()
    return [tuple(flat[start:end]) for start, end in pairwise([0, *accumulate(lengths.tolist())])]


def _write(path: Path, encoded: Sequence[tuple[int, ...]]) -> None:
    """Write the file whole or not at all; a cache that cannot be written is no reason to stop."""
    temporary = path.with_suffix(f".{os.getpid()}.npz")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
        ids = np.fromiter((i for row in encoded for i in row), dtype=np.int32, count=int(lengths.sum()))
        np.savez(temporary, ids=ids, lengths=lengths)
        temporary.replace(path)
    except OSError as error:
        logger.warning("the cache file %s could not be written: %s", path, error)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
