"""vLLM answers held-out prompts beside training: at the evaluation's own temperature, with just its version."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import SHORT, SHORT_BATCHES, run, same_metrics, served_by
from tiny import PROMPTS, json_rows

from async_rlhf.data.stream import PromptStream
from async_rlhf.data.tokenizer import decode_samples
from async_rlhf.generation.protocol import SamplingParams
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.models.loading import load_policy

pytestmark = pytest.mark.vllm
HELD = [{"query": f"def held{i}(x):"} for i in range(6)]


@pytest.mark.parametrize("where", ["process", "server"])
def test_answers_are_those_of_the_version_and_training_is_the_same(where, request, make_args, tokenizer, undisturbed):
    generation = served_by(request.getfixturevalue("server")) if where == "server" else {}
    asked = {"eval_steps": 2, "eval_temperature": 0.01, "eval_samples_per_prompt": 2, "save_steps": 2}
    args = make_args(generation=generation, **asked, **SHORT)
    metrics = run(args, tokenizer, PROMPTS, eval_dataset=HELD)
    assert same_metrics([row for row in metrics if "objective/scores" in row], undisturbed[:SHORT_BATCHES])
    assert [row["batch"] for row in metrics if "eval_objective/scores" in row] == [2, 4, 5]
    table = json_rows(Path(args.output_dir, "eval_samples.jsonl"))
    assert [(r["batch"], r["row"], r["sample"]) for r in table] == [
        (b, i, k) for b in (2, 4, 5) for i in range(6) for k in range(2)
    ]
    stream = PromptStream(HELD, tokenizer, shuffle=False)
    for batch in (2, 4):
        engine = TransformersEngine(
            load_policy(f"{args.output_dir}/checkpoint-{batch}"), SamplingParams(1, 0.001, 12, (256,), 0)
        )
        likeliest = [sample for (sample,) in engine.generate([stream.prompt(i) for i in range(6)])]
        wanted = [text for text in decode_samples(tokenizer, likeliest) for _ in range(2)]
        found = [row["completion"] for row in table if row["batch"] == batch]
        # Two tokens may be nearly equally likely.
        assert sum(ours == theirs for ours, theirs in zip(found, wanted, strict=True)) >= 8
