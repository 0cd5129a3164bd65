"""recipes/evaluation: the commands of its page, by the tools themselves, against a server of a tiny model."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import torch
import transformers as hf
from conftest import CACHE, apart, beside
from ports import free_port
from tiny import LLAMA_SIZES, byte_tokenizer, is_installed, json_rows

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "recipes" / "evaluation" / "README.md"
QUESTIONS, KEY = 6, "0123456789abcdef"


class Served(NamedTuple):
    """A folder as the page has it, whose model a server answers for."""

    folder: Path
    port: int
    model: hf.PreTrainedModel
    tokenizer: hf.PreTrainedTokenizerBase


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    if not is_installed("vllm"):
        pytest.skip("needs vLLM: make setup-vllm")
    folder, port = tmp_path_factory.mktemp("harness"), free_port()
    for name in ("evaluation", "smollm"):
        shutil.copytree(ROOT / "recipes" / name, folder / "recipes" / name)
    sums = [sys.executable, "recipes/smollm/sums.py", "--largest", "9", "--held_out", str(QUESTIONS)]
    subprocess.run([*sums, "--out", "runs/smollm/sums"], cwd=folder, check=True)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    torch.manual_seed(0)
    sizes = {
        **LLAMA_SIZES,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "max_position_embeddings": 256,
        "vocab_size": 258,
    }
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, eos_token_id=256, pad_token_id=257)).eval()
    for parameter in model.parameters():
        parameter.data.mul_(3)
    for part in (model, tokenizer):
        part.save_pretrained(folder / "runs/smollm/model")
    command = next(line for line in commands() if line.startswith("async-rlhf serve"))
    words = [sys.executable, "-m", "async_rlhf.cli", *shlex.split(command.replace("8000", str(port)))[1:]]
    with (folder / "log").open("w") as log:
        options = ["--kv_cache_gb", "0.05", "--num_threads", "1"]
        known = {**os.environ, "ASYNC_RLHF_API_KEY": KEY}
        process = subprocess.Popen([*words, *options], cwd=folder, stdout=log, stderr=subprocess.STDOUT, env=known)
    try:
        deadline = time.monotonic() + 240
        while True:
            with suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).is_success:
                    break
            assert process.poll() is None, (folder / "log").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.5)
        yield Served(folder, port, model, tokenizer)
    finally:
        process.terminate()
        process.wait(timeout=60)


def commands() -> list[str]:
    """Of the page, each on one line."""
    text = PAGE.read_text("utf-8").replace("\\\n", " ")
    return [" ".join(line.split()) for line in text.splitlines() if line.startswith("    ")]


def run(served: Served, python: str, start: str, *options: str, environment: Mapping[str, str] | None = None) -> None:
    """The page's command that begins so, with the server's port."""
    command = next(line for line in commands() if line.startswith(start))
    tool, *words = shlex.split(command.replace("8000", str(served.port)))
    variables = {**os.environ, "OPENAI_API_KEY": KEY, "HF_DATASETS_OFFLINE": "1", **(environment or {})}
    variables |= {"NO_PROXY": "*", "PYTHONPATH": ""}
    program = [str(Path(python).with_name(tool)), *words, *options]
    done = subprocess.run(program, cwd=served.folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def loglikelihood(served: Served, context: str, text: str) -> float:
    """By the model itself, in nats."""
    tokens_T = torch.tensor(served.tokenizer(context + text)["input_ids"])
    first = len(served.tokenizer(context)["input_ids"])
    with torch.no_grad():
        logps_TV = served.model(tokens_T[None]).logits[0].log_softmax(-1)
    return sum(float(logps_TV[t - 1, tokens_T[t]]) for t in range(first, len(tokens_T)))


def greedy(served: Served, question: str) -> str:
    """At most 12 tokens of the model's own; vLLM leaves out bytes at the end that are no whole character."""
    prompt = served.tokenizer(f"{question}\n", return_tensors="pt")
    with torch.no_grad():
        tokens_BT = served.model.generate(**prompt, max_new_tokens=12, do_sample=False)
    text = served.tokenizer.decode(tokens_BT[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return text.rstrip("\N{REPLACEMENT CHARACTER}")


@pytest.mark.foreign
def test_trl_trains_on_the_same_sums(served):
    """The script that puts TRL's curve beside ours, with a tiny model: a line of what it logged."""
    beside("trl", "trl==1.16.0")
    places = [str(CACHE / "trl"), str(ROOT)]
    words = [sys.executable, "recipes/smollm/trl_grpo.py", "--batches", "2", "--results", "results.jsonl"]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(words, cwd=served.folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = json_rows(served.folder / "results.jsonl")
    assert (row["task"], row["way"], row["seed"], len(row["scores"])) == ("sums", "TRL 1.16.0", 0, 2)
    assert 0 < row["seconds"][0] < row["seconds"][1]


LM_EVAL = ("lm-eval", "lm_eval[api]==0.4.13", "transformers")


def asked(served: Served, model: str, task: str) -> list[dict]:
    """What lm-evaluation-harness logged of each question."""
    run(served, apart(*LM_EVAL), f"lm-eval run --model {model}", "--output_path", "out", "--log_samples")
    (file,) = served.folder.glob(f"out/**/samples_{task}_*.jsonl")
    found = json_rows(file)
    assert len(found) == QUESTIONS
    return found


@pytest.mark.foreign
def test_lm_eval_gets_the_models_log_likelihoods(served):
    for row in asked(served, "local-completions", "sums_choice"):
        assert len(row["filtered_resps"]) == 4
        for arguments, (value, _) in zip(row["arguments"].values(), row["filtered_resps"], strict=True):
            assert float(value) == pytest.approx(loglikelihood(served, *arguments.values()), abs=1e-3)


@pytest.mark.foreign
def test_lm_eval_gets_the_models_chats(served):
    for row in asked(served, "local-chat", "sums_generate"):
        said = greedy(served, row["doc"]["messages"][0]["content"])
        assert row["resps"][0][0] == said.split("\n\n")[0]


@pytest.mark.foreign
def test_inspect_gets_the_models_chats(served):
    python = apart("inspect", "inspect-ai==0.3.285", "openai")
    url = {"ASYNC_RLHF_BASE_URL": f"http://127.0.0.1:{served.port}/v1", "ASYNC_RLHF_API_KEY": KEY}
    run(served, python, "inspect eval", "--log-format", "json", "--log-dir", "logs", environment=url)
    (file,) = (served.folder / "logs").glob("*.json")
    log = json.loads(file.read_text())
    assert log["status"] == "success"
    assert len(log["samples"]) == QUESTIONS
    for sample in log["samples"]:
        said = sample["output"]["choices"][0]["message"]["content"]
        assert said.strip() == greedy(served, sample["input"][0]["content"]).strip()
