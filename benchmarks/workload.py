"""The runs that benchmarks measure: the real trainer, on prompts and with a reward that mean nothing."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from async_rlhf import GenerationConfig
from async_rlhf.algorithms.table import find
from async_rlhf.run.trainer import OnlineTrainer

WARM_UP = 4  # batches: the first ones fill the pipeline
PROMPT_TOKENS, VOCABULARY = 16, 2048


class Run(NamedTuple):
    """What a run wrote: the lines of metrics.jsonl, and trace.json."""

    logs: list[dict[str, Any]]
    trace: str

    def mean_times(self, first: int = WARM_UP, last: int | None = None) -> dict[str, float]:
        """Means of times over a slice of the batches, without the "time/" of their names."""
        logs = [log for log in self.logs if "time/batch" in log][first:last]
        names = [name for name in logs[0] if name.startswith("time/")]
        return {name.removeprefix("time/"): statistics.fmean(log[name] for log in logs) for name in names}


def neox(
    vocabulary: int, hidden: int, layers: int, heads: int, positions: int = 2048, **more: Any
) -> GPTNeoXForCausalLM:
    """A model of random weights, always the same; ``kind`` is a class derived from GPT-NeoX."""
    torch.manual_seed(0)
    kind = more.pop("kind", GPTNeoXForCausalLM)
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    more = {"intermediate_size": 4 * hidden, "max_position_embeddings": positions, **more}
    return kind(GPTNeoXConfig(vocab_size=vocabulary, **sizes, **more))


def tokenizer(vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """One token for each number: the text does not matter here."""
    words = {f"w{i}": i for i in range(vocabulary - 1)} | {"<eos>": vocabulary - 1}
    raw = Tokenizer(models.WordLevel(words, unk_token="w0"))
    raw.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>")


def prompts(tokens: int = PROMPT_TOKENS) -> list[dict[str, str]]:
    """256 prompts of so many tokens, which differ in the first."""
    words = " ".join(f"w{i}" for i in range(1, tokens))
    return [{"query": f"w{i + 20} {words}"} for i in range(256)]


def reward(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    return [float(sum(map(len, text.split()))) for text in completions]


def train(
    algorithm: str,
    model: PreTrainedModel,
    rows: Sequence[Mapping[str, Any]],
    generation: Mapping[str, Any],
    options: Mapping[str, Any],
    vocabulary: int = VOCABULARY,
    **of_trainer: Any,
) -> Run:
    """Train with one generator process, unless ``generation`` says otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        # Comparing 8 of these few completions would be a third of a batch: see docs/engine_checks.md.
        alone = {"placement": "process", "num_threads": 1, "mismatch_samples": 0}
        defaults = {"output_dir": folder, "overwrite_output_dir": True, "save_steps": 0, "progress": False}
        config = find(algorithm).config(
            **{**defaults, "non_eos_penalty": False, "num_threads": 1, **options},
            generation=GenerationConfig(**{**alone, **generation}),
        )
        OnlineTrainer(model, config, list(rows), processing_class=tokenizer(vocabulary), **of_trainer).train()
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
        return Run([json.loads(line) for line in lines], (Path(folder) / "trace.json").read_text())
