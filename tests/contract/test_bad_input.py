"""Bad input gets an error that names the key, the value and what would be right, before anything is trained."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas
import peft
import pytest
from datasets import Dataset, DatasetDict
from tables import each
from tiny import byte_tokenizer, count_letters, new_reward_model
from transformers import GPTNeoXForSequenceClassification, PreTrainedTokenizerFast

from async_rlhf import GRPOConfig, OnlineDPOConfig, OnlineDPOTrainer, PPOConfig, RLOOConfig
from async_rlhf.algorithms.table import BUILT_IN, find
from async_rlhf.commands.table import COMMANDS, import_attribute
from async_rlhf.commands.train import run_train
from async_rlhf.config import ConfigError, GroupConfig, SFTConfig, engines
from async_rlhf.config.parsing import parse
from async_rlhf.data.formats import RowReader, first_words
from async_rlhf.models.loading import check_reward_model, load_policy, load_reward_model, load_tokenizer
from async_rlhf.models.saving import write_model
from async_rlhf.run.config import DataConfig, RunConfig
from async_rlhf.run.folder import hold_folder
from async_rlhf.system.names import check_names
from async_rlhf.tasks.docstrings.config import DocstringsConfig
from async_rlhf.tasks.docstrings.harvest import run_data

VALID = """
model: {model}
reward_funcs: [{reward}:reward]
data: {{train: {data}}}
train:
  output_dir: {out}
  staleness: 1
  total_episodes: 32
  per_device_train_batch_size: 4
  max_prompt_length: 32
  generation: {{response_length: 8}}
"""


@pytest.fixture
def files(tmp_path, tokenizer, make_policy, prompts) -> dict[str, Path]:
    """A model, data and a reward function on disk, and a configuration that trains with them."""
    places = {name: tmp_path / name for name in ("model", "data.jsonl", "reward.py", "out", "config.yml")}
    write_model(make_policy(), tokenizer, places["model"])
    places["data.jsonl"].write_text("".join(json.dumps(row) + "\n" for row in prompts))
    places["reward.py"].write_text(
        "def reward(prompts, completions, **columns):\n    return [float(len(text)) for text in completions]\n"
    )
    places["config.yml"].write_text(
        VALID.format(model=places["model"], reward=places["reward.py"], data=places["data.jsonl"], out=places["out"])
    )
    return places


def run_command(*words: object, **options: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "async_rlhf.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


def parse_error(*words: object) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(RunConfig, "train", [str(word) for word in words])
    return str(caught.value)


VLLM = ["--train.generation.engine", "vllm"]
UNSEEDED = ["--train.generation.seed_per_request", "false"]
SERVER = [*VLLM, "--train.generation.placement", "server"]
SERVED = [*SERVER, "--train.generation.urls", "[http://a]"]
NETWORK = ["--train.generation.weights_transport", "network"]


@pytest.mark.quick
@each([
    (["--train.stalenes", "1"], "train.stalenes"),
    (["--train.staleness", "often"], "train.staleness: got 'often'; must be an integer"),
    (["--train.generation", "{temprature: 1}"], "train.generation.temprature: .*did you mean train.generation.temp"),
    (["--train.generation", "{nothing: {x: 1}}"], "train.generation.nothing: async-rlhf train has no such key"),
    (["--train.staleness", "-1"], "staleness: got -1; must be at least 0"),
    (["--train.total_episodes", "30"], "total_episodes: got 30; must be a multiple of the batch of 4 .*such as 32"),
    (["--train.loss_type", "hinge"], "train.loss_type.*hinge"),
    (["--train.beta", "0"], "beta: got 0.0; must be above 0"),
    (["--train.samples_per_prompt", "1"], "samples_per_prompt: got 1; must be at least 2"),
    (["--train.generation.placement", "inline", "--train.generation.engine", "vllm"],
     'staleness: got 1; must be 0 with generation.engine "vllm" and placement "inline"'),
    (["--train.generation.temperature", "0"], "temperature: got 0.0; must be 0.001 to 1000"),
    (["--reward_funcs", "[no_colon]"], "reward_funcs: got 'no_colon'; must be \"module:function\""),
    (["--train.lr_scheduler_type", "lineer"], "train.lr_scheduler_type.*lineer"),
    (["--train.device", "gpu"], 'device: got \'gpu\'; must be "cpu", "cuda"'),
    (["--train.eval_steps", "5"], "train.eval_steps: got 5; must be 0 without data.eval"),
    (["--config", "nowhere.yml"], "--config: got 'nowhere.yml'; there is no such file"),
    (["--algorithm", "dpo"],
     "algorithm: got 'dpo'; must be one of online_dpo, best_of_k, rloo, reinforce_pp, ppo, grpo"),
    (["--algorithm", "grpo", "--train.beta", "1"], "beta"),
    (["--algorithm", "rloo", "--train.samples_per_prompt", "1"], "samples_per_prompt: got 1; must be at least 2"),
    (["--algorithm", "rloo", "--train.off_policy.level", "token"], "off_policy.level: got 'token'; must be \"seq"),
    (["--algorithm=ppo", "--train.kl.where", "loss"], 'kl.estimator: got \'k1\'; must be "k2" or "k3" with'),
    (["--algorithm=ppo", "--train.kl.coef", "0", "--train.kl.target", "6"], "kl.coef: got 0.0; must be above 0"),
    (["--algorithm", "ppo", "--train.lam", "1.5"], "lam: got 1.5; must be at most 1"),
    (["--algorithm", "ppo", "--train.cliprange", "1"], "cliprange: got 1.0; must be below 1"),
    (["--algorithm", "grpo", "--train.off_policy.cap", "0.5"], "cap: got 0.5; must be at least 1"),
    (["--algorithm", "grpo", "--train.normalization", "tokens"], "normalization.*tokens"),
    (["--value_model", "somewhere"], "value_model: got 'somewhere'; must be null: 'online_dpo' has no value model"),
    (["--train.reward_weights", "[1, 2]"], r"train.reward_weights: got \[1.0, 2.0\]; .* 1 of reward_funcs"),
    (["--train.reward_timeout", "0"], "reward_timeout: got 0.0; must be above 0"),
    (["--train.penalty_reward_value", ".nan"], "penalty_reward_value: got '.nan'; must be a finite number"),
    (["--algorithm=ppo", "--train.kl.corrected", "true"], "kl.corrected: got True; must be false unless kl.where"),
    (["--algorithm=best_of_k", "--train.kl", "{corrected: true, where: loss, estimator: k3, coef: 1}"],
     "kl.corrected: got True; must be false: the best of K"),
    (["--train.head_float32", "true", "--train.bf16", "false"], "head_float32: got True; must be false without bf16"),
    (["--train.non_eos_penalty", "subtract"], "train.non_eos_penalty.*subtract"),
    (["--train.non_eos_penalty", "add", "--train.penalty_reward_value", "1"],
     'penalty_reward_value: got 1.0; must be at most 0 with non_eos_penalty "add"'),
    (["--algorithm", "ppo", "--train.bootstrap_truncated", "true"],
     "non_eos_penalty: got True; must be false with bootstrap_truncated"),
    (["--algorithm", "ppo", "--train.mask_truncated", "true"], "mask_truncated"),
    (["--train.lora.rank", "-1"], "rank: got -1; must be at least 0"),
    (["--train.generation.engine", "vlm"], 'engine: got \'vlm\'; must be "transformers" or "vllm"'),
    (["--train.generation.placement", "server"], "engine: got 'transformers'; must be \"vllm\" with placement"),
    ([*VLLM, "--train.generation.placement", "server"], r"urls: got \[\]; must name at least one server"),
    ([*VLLM, "--train.generation.urls", "[http://a]"], 'urls: got .*; must be empty unless placement is "server"'),
    ([*SERVER, "--train.generation.urls", "[a:80]"], "urls: got 'a:80'; must begin with http"),
    ([*SERVER, "--train.generation.urls", "[http://a, http://a]"], "urls: got .*; must name each server once"),
    ([*VLLM, "--train.generation.temperature", "0.001"], "temperature: got 0.001; must be at least 0.01"),
    ([*VLLM, "--train.generation.vllm.options", "{seed: 1}"], "options.seed: got 1; is decided by the run"),
    ([*VLLM, "--train.generation.vllm.gpu_memory_utilization", "2"], "gpu_memory_utilization: got 2.0; must be at"),
    ([*SERVED, "--train.generation.vllm.kv_cache_gb", "1"], "vllm: got VLLM.*; must be left out with placement"),
    (["--train.generation.weights_dir", "w"], "weights_dir: got 'w'; must be null unless placement is"),
    ([*SERVED, *NETWORK, "--train.generation.weights_dir", "w"], "weights_dir: got 'w'; must be null unless"),
    (NETWORK, "weights_transport: got 'network'; must be \"folder\" unless placement is"),
    (UNSEEDED, 'seed_per_request: got False; must be true unless engine is "vllm"'),
    ([*VLLM, *UNSEEDED, "--train.deterministic", "true"],
     "deterministic: got True; must be false with generation.seed_per_request"),
    (["--train.generation.vllm.tensor_parallel_size", "2"],
     'vllm.tensor_parallel_size: got 2; must be left out unless engine is "vllm"'),
    ([*VLLM, "--train.generation.vllm.options", "{tensor_parallel_size: 2}"], "options.*; is a key of its own"),
    (["--train.lora.publish", "adapter"], "lora.publish: got 'adapter'; must be \"merged\" but with"),
])  # fmt: skip
def test_a_wrong_key_or_value_is_named(words, expected, files):
    assert re.search(expected, parse_error("--config", files["config.yml"], *words), re.DOTALL)


def test_the_algorithm_decides_the_keys(files, monkeypatch):
    """From the file, the environment or the command line; the later wins."""
    words = ["--config", str(files["config.yml"])]
    text = files["config.yml"].read_text()
    files["config.yml"].write_text(text + "  gamma: 0.9\nalgorithm: ppo\n")
    config, _ = parse(RunConfig, "train", words)
    assert (config.algorithm, type(config.train), config.train.gamma) == ("ppo", PPOConfig, 0.9)
    files["config.yml"].write_text(text)
    monkeypatch.setenv("ASYNC_RLHF_ALGORITHM", "rloo")
    config, _ = parse(RunConfig, "train", words)
    assert (type(config.train), config.train.off_policy.level) == (RLOOConfig, "sequence")
    config, _ = parse(RunConfig, "train", [*words, "--algorithm", "grpo"])
    assert (type(config.train), config.train.kl.where) == (GRPOConfig, "loss")


@pytest.mark.quick
@each([("true", True), ("false", False), ("replace", "replace"), ("add", "add")])
def test_what_becomes_of_a_completion_that_is_cut_off(given, expected, files):
    """True and false keep their meaning; without a word there is no penalty where rewards can be verified."""
    words = ["--config", str(files["config.yml"])]
    for algorithm in BUILT_IN:
        chosen = [*words, "--algorithm", algorithm]
        penalty = parse(RunConfig, "train", chosen)[0].train.non_eos_penalty
        assert penalty is (not issubclass(find(algorithm).config, GroupConfig))
        assert (
            parse(RunConfig, "train", [*chosen, "--train.non_eos_penalty", given])[0].train.non_eos_penalty == expected
        )


def test_a_run_needs_the_configuration_of_its_algorithm():
    with pytest.raises(ConfigError, match="train: got 'OnlineDPOConfig'; must be a PPOConfig with algorithm 'ppo'"):
        RunConfig(model="m", data=DataConfig(train="d"), reward_model="r", algorithm="ppo")


def test_lists_are_given_plainly_or_as_yaml(files):
    def functions(*words: str) -> list[str]:
        return parse(RunConfig, "train", ["--config", str(files["config.yml"]), *words])[0].reward_funcs

    assert functions("--reward_funcs", "a:b") == ["a:b"]
    assert functions("--reward_funcs", "a:b", "--reward_funcs=c:d") == ["a:b", "c:d"]
    assert functions("--reward_funcs", "[a:b, c:d]") == ["a:b", "c:d"]


def test_data_that_was_moved_is_still_done(tmp_path, caplog):
    source = ["logging", "asyncio", "email"]
    made = run_data(DocstringsConfig(out=str(tmp_path / "data"), source=source))
    (tmp_path / "data").rename(tmp_path / "moved")
    caplog.set_level("INFO")
    assert run_data(DocstringsConfig(out=str(tmp_path / "moved"), source=source)) == made
    assert "data: done already" in caplog.text
    with pytest.raises(ConfigError, match="seed: was 0, is 1"):
        run_data(DocstringsConfig(out=str(tmp_path / "moved"), source=source, seed=1))


@pytest.mark.parametrize(("change", "expected"),[
    ({"data.jsonl": None}, "data.train: got .*data.jsonl'; there is no such file"),
    ({"data.jsonl": ""}, "data.train: .*data.jsonl' has no rows"),
    ({"data.jsonl": '{"query": "a"}\n{"question": "b"}\n'},
     "data.train: row 2 of .* has no 'query'; it has 'question'"),
    ({"data.jsonl": '{"query": "a"}\n{"query": \n'}, "data.train: line 2 of .* is not JSON"),
    ({"data.jsonl": '{"query": "a"}\n{"query": "\\udcff"}\n'}, "'query' of row 2 has the character .*Unicode text"),
    ({"data.jsonl": b'{"query": "a"}\n{"query": "\xff"}\n'}, "data.train: line 2 of .* is not UTF-8"),
    ({"data.jsonl": '{"query": "%s"}\n' % ("x" * 40)}, "max_prompt_length: got 32; none of the 1 prompts"),
    ({"reward.py": "x = 1\n"}, "reward_funcs: got .*reward.py has no function 'reward'"),
    ({"reward.py": "import sys\nsys.exit(0)\n"},
     "reward_funcs: got .*, which calls sys.exit\\(\\) when it is imported"),
    ({"reward.py": "def reward(a: pass\n"}, r"reward_funcs: got .*\(reward.py, line 1\)"),
    ({"reward.py": None}, "reward_funcs: got .*there is no file"),
    ({"model": None}, "model: got .*model'; there is no such folder; must be a folder with a model, or"),
])  # fmt: skip
def test_bad_files_are_named(files, change, expected):
    for name, content in change.items():
        if isinstance(content, bytes):
            files[name].write_bytes(content)
        elif content is not None:
            files[name].write_text(content)
        elif files[name].is_dir():
            shutil.rmtree(files[name])
        else:
            files[name].unlink()
    config, _ = parse(RunConfig, "train", ["--config", str(files["config.yml"])])
    with pytest.raises(ConfigError) as caught:
        run_train(config)
    assert re.search(expected, str(caught.value)), str(caught.value)
    assert not (files["out"] / "metrics.jsonl").exists()


def test_prompts_over_the_limit_are_dropped_and_counted(make_policy, tokenizer, prompts, make_args, caplog):
    rows = [*prompts, {"query": "x" * 33, "name": "long"}]
    OnlineDPOTrainer(make_policy(), make_args(), rows, reward_funcs=count_letters, processing_class=tokenizer)
    assert "dropped 1 of 21 prompts: not 1 to 32 tokens" in caplog.text


IGNORED = {
    "pairs --from_ratings r.jsonl --output o.jsonl": ("with from_ratings",
     {"top_p": 0.9, "top_k": 5, "parallel.ranks": 2, "trust_remote_code": "true", "batch_size": 3, "device": "cpu"}),
    "pairs --model m --prompts p --reward_model r --output o.jsonl": ("without from_ratings", {"margin": 1}),
    "evaluate --generations g --output_dir o --reward_model r": ("with generations",
     {"dtype": "bfloat16", "vllm.block_size": 16, "top_k": 5, "seed": 3, "engine": "vllm", "split": "test"}),
    "evaluate --models.a m --data d --output_dir o --reward_model r": ("without judge.url",
     {"judge.model": "j", "judge.max_tokens": 3, "judge.concurrency": 2, "judge.prompt_file": "f"}),
    "evaluate --models.a m --data d --output_dir o --judge.url http://a --judge.model j": ("with judge.url",
     {"reward_model": "r", "reward_funcs": "[a:b]", "penalties": "training", "reward_tokenizer": "t"}),
    "relabel --data d --output_dir o --reward_funcs a:b": (
     "without reward_model", {"batch_size": 3, "dtype": "float16"}),
    "sft --train t --output_dir o --model m": (
     "with model", {"new_model.hidden_size": 64, "new_model.vocab_size": 300, "new_model.architecture": "llama"}),
    "sft --train t --output_dir o": (
     "(with rank 0|without eval)", {"lora.alpha": 3, "lora.target_modules": "[a]", "eval_split": "test"}),
    "reward --train t --output_dir o --model m": ("(with rank 0|without eval|without reference)",
     {"lora.alpha": 3, "eval_split": "test", "reference_split": "test"}),
    "train --model m --data.train d --reward_funcs a:b": (
     "(with rank 0|without (data.eval|max_turns|metric_for_best_model|reward_model))",
     {"train.lora.alpha": 3, "data.eval_split": "test", "train.eval_temperature": 1, "train.early_stopping_patience": 2,
      "train.eval_samples_per_prompt": 2, "train.generation.step_timeout": 3, "train.greater_is_better": "false",
      "train.reward_model_weight": 2}),
    "train --model m --data.train d --reward_funcs a:b --train.staleness 0": (
     'with placement "inline"', {"train.generation.workers": 2, "train.generation.device": "cpu"}),
    "train --model m --data.train d --reward_funcs a:b --train.generation.engine vllm "
    "--train.generation.placement server --train.generation.urls [http://a]": (
     'with placement "server"', {"train.generation.workers": 2, "train.generation.device": "cpu"}),
}  # fmt: skip
"""What is ignored, and by what: each key is refused, and the error names both."""


@pytest.mark.quick
@each(IGNORED)
def test_a_key_that_would_be_ignored_is_refused(line):
    why, keys = IGNORED[line]
    command, *words = line.split()
    kind = import_attribute(COMMANDS[command].config)
    parse(kind, command, words)
    for key, value in keys.items():
        group, _, name = key.rpartition(".")
        told = group.rpartition(".")[2] if group in ("parallel", "vllm") else name  # left out as a whole
        with pytest.raises(ConfigError, match=rf"{told}: got .*; must be left out {why}"):
            parse(kind, command, [*words, f"--{key}={value}"])


@each([
    (pandas.DataFrame({"query": ["a"]}), r"got a DataFrame; .*Dataset.from_pandas\(frame\), or frame.to_dict"),
    (DatasetDict({"train": Dataset.from_list([{"query": "a"}])}), "got a DatasetDict; .*, or one split of a data set"),
    ("prompts.jsonl", "row 1 of 'the data set' is a str; must be a mapping"),
    ([{"query": "a"}, {"query": None}], "row 2 of 'the data set' has null as 'query'; it has 'query'"),
])  # fmt: skip
def test_what_are_no_rows_is_named(rows, expected, make_policy, tokenizer, prompts, make_args):
    options = {"reward_funcs": count_letters, "processing_class": tokenizer}
    for key in ("train_dataset", "eval_dataset"):
        given = {"train_dataset": prompts, key: rows}
        with pytest.raises(ConfigError, match=f"{key}: {expected}"):
            OnlineDPOTrainer(make_policy(), make_args(), **given, **options)


@each([
    ({"prompt": "a", "completion": None}, "row 1 has 'prompt', null as 'completion'; must have"),
    ({"prompt": None, "completion": "a"}, "row 1 has 'completion', null as 'prompt'; must have"),
    ({"text": None}, "row 1 has null as 'text'; must have"),
])  # fmt: skip
def test_null_in_a_column_is_said(row, expected):
    with pytest.raises(ConfigError, match=expected):
        list(RowReader(None, "train").demonstrations([row]))
    with pytest.raises(ConfigError, match="train: row 1 has null as 'rejected'; it has 'chosen', 'rejected'"):
        list(RowReader(None, "train").preferences([{"chosen": "a", "rejected": None}]))
    with pytest.raises(ConfigError, match=expected):
        first_words([row], 1, "train")


@pytest.fixture
def folders(tmp_path, make_policy, tokenizer) -> Path:
    """Models that lack something."""
    write_model(make_policy(), tokenizer, tmp_path / "whole")
    write_model(new_reward_model(num_labels=2), tokenizer, tmp_path / "two labels")
    for lacking in ("config.json", "model.safetensors", "tokenizer*"):
        left_out = shutil.ignore_patterns(lacking)
        shutil.copytree(tmp_path / "whole", tmp_path / f"no {lacking}", ignore=left_out)
    for base, name in ((tmp_path / "whole", "adapters"), (tmp_path / "gone", "adapters of nothing")):
        config = peft.LoraConfig(r=2, target_modules=["dense"], task_type="CAUSAL_LM")
        adapted = peft.get_peft_model(make_policy(), config)
        adapted.peft_config["default"].base_model_name_or_path = str(base)
        adapted.save_pretrained(tmp_path / name)
    return tmp_path


@each([
    ("no config.json", "no config.json'; the folder has no config.json; must be a folder with a model"),
    ("no model.safetensors", "no model.safetensors'; the folder has no weights; must have model.safetensors"),
    ("no tokenizer*", "no tokenizer could be loaded from '.*'; it has none; must be a folder with tokenizer files"),
    ("adapters", "loaded from '.*adapters'; it has none; the folder has only adapters, of '.*whole'; must be"),
    ("adapters of nothing", "of nothing', which has only adapters of '.*gone': base_model.* got '.*gone'; there is no"),
    ("whole/config.json", "whole/config.json', which is a file; must be a folder with a model, or a hub name"),
])  # fmt: skip
def test_a_folder_that_is_no_model_says_what_it_lacks(name, expected, folders):
    source, lacks_tokenizer = str(folders / name), name in ("no tokenizer*", "adapters")
    (folders / "rows.jsonl").write_text('{"text": "a"}')
    config = SFTConfig(str(folders / "rows.jsonl"), "out", model=source)
    for looks in (load_tokenizer,) if lacks_tokenizer else (load_policy, lambda _: check_names((config, ""))):
        with pytest.raises(ConfigError, match=f"model: .*{expected}"):
            looks(source)


def test_a_reward_model_with_two_labels_is_named(folders):
    expected = r"reward_model: got '.*two labels'; it gives each text 2 numbers \(num_labels\); must be a model that"
    with pytest.raises(ConfigError, match=expected):
        load_reward_model(str(folders / "two labels"))
    with pytest.raises(ConfigError, match=r"reward_model: .* it gives each text 2 numbers"):
        check_reward_model(new_reward_model(num_labels=2))


def test_a_tokenizer_needs_an_end_of_sequence_but_no_padding(make_policy, prompts, make_args):
    bare = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer().backend_tokenizer)
    options = {"reward_funcs": count_letters, "processing_class": bare}
    with pytest.raises(ConfigError, match="eos_token: got None; the tokenizer needs one"):
        OnlineDPOTrainer(make_policy(), make_args(), prompts, **options)
    bare.eos_token = "<eos>"
    trainer = OnlineDPOTrainer(make_policy(), make_args(), prompts, **options)
    assert trainer.processing_class.pad_token_id == 256  # what pads is never looked at, so EOS may serve
    assert trainer.train().global_step == 6


def test_a_reward_model_of_another_vocabulary_is_refused(make_policy, make_reward_model, tokenizer, prompts, make_args):
    with pytest.raises(ConfigError, match="reward_model: it has embeddings for 200 tokens, the policy's tokenizer"):
        OnlineDPOTrainer(
            make_policy(),
            make_args(),
            prompts,
            reward_model=make_reward_model(vocab_size=200, bos_token_id=0, eos_token_id=0, pad_token_id=0),
            processing_class=tokenizer,
        )


def test_a_saved_reward_model_of_another_tokenizer_is_refused(
    tmp_path, make_policy, make_reward_model, tokenizer, prompts, make_args
):
    other = byte_tokenizer()
    other.add_tokens(["zebra"])
    model: GPTNeoXForSequenceClassification = make_reward_model(vocab_size=259)
    write_model(model, other, tmp_path / "reward")
    with pytest.raises(ConfigError, match="reward_model: its vocabulary has 259 tokens, the policy's 258"):
        OnlineDPOTrainer(
            make_policy(), make_args(), prompts, reward_model=str(tmp_path / "reward"), processing_class=tokenizer
        )


def test_a_model_too_short_for_prompt_and_response_is_refused(make_policy, tokenizer, prompts, make_args):
    with pytest.raises(ConfigError, match=r"max_prompt_length: prompts of 90 tokens .* must be at most 84"):
        OnlineDPOTrainer(
            make_policy(),
            make_args(max_prompt_length=90),
            prompts,
            reward_funcs=count_letters,
            processing_class=tokenizer,
        )


def test_a_checkpoint_of_the_wrong_kind_is_refused(files, make_reward_model, tokenizer):
    """transformers would load it with a random head, and train against noise."""
    with pytest.raises(ConfigError, match=r"reward_model: .*model' holds no reward model: it lacks the weights score"):
        load_reward_model(str(files["model"]))
    write_model(make_reward_model(), tokenizer, files["model"])
    with pytest.raises(ConfigError, match=r"model: .*model' holds no causal language model: it lacks the weights"):
        load_policy(str(files["model"]))


def test_a_trainer_needs_the_configuration_of_its_algorithm(prompts, make_args):
    with pytest.raises(ConfigError, match="args: got 'RLOOConfig'; must be of type OnlineDPOConfig"):
        OnlineDPOTrainer("no/such/model", make_args(algorithm="rloo"), prompts, reward_funcs=count_letters)


def test_the_reference_must_be_another_model(make_policy, tokenizer, prompts, make_args):
    policy = make_policy()
    options = {"reward_funcs": count_letters, "processing_class": tokenizer}
    with pytest.raises(ConfigError, match="ref_model: got the policy itself"):
        OnlineDPOTrainer(policy, make_args(), prompts, ref_model=policy, **options)


@each([
    ({"report_to": ["wandbb"]}, "report_to: got 'wandbb'; must be one of"),
    ({"eval_steps": 2}, "eval_steps: got 2; must be 0 without eval_dataset"),
])  # fmt: skip
def test_what_cannot_work_is_refused_at_once(changes, expected, make_policy, tokenizer, prompts, make_args):
    with pytest.raises(ConfigError, match=expected):
        OnlineDPOTrainer(
            make_policy(), make_args(**changes), prompts, reward_funcs=count_letters, processing_class=tokenizer
        )


def test_vllm_that_is_not_installed_is_named_before_any_model_is_loaded(prompts, make_args, monkeypatch):
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    args = make_args(generation={"engine": "vllm"})
    with pytest.raises(ConfigError, match=r"generation.engine: got 'vllm'; needs vLLM: in a checkout make setup-vllm"):
        OnlineDPOTrainer("no-such-model", args, prompts, reward_funcs=count_letters)


def test_rows_that_are_no_text_are_named(make_policy, tokenizer, prompts, make_args):
    options = {"reward_funcs": count_letters, "processing_class": tokenizer}
    chat = [{"query": [{"role": "user", "content": "hello"}]}]
    with pytest.raises(ConfigError, match=r"'query' of row 1 is a chat, and no tokenizer with a chat template is"):
        OnlineDPOTrainer(make_policy(), make_args(), chat, **options)
    with pytest.raises(ConfigError, match=r"train_dataset: 'query' of row 1 is a list; must be text, or a list of"):
        OnlineDPOTrainer(make_policy(), make_args(), [{"query": ["hello"]}], **options)
    with pytest.raises(ConfigError, match="eval_dataset: got 0 rows"):
        OnlineDPOTrainer(make_policy(), make_args(), prompts, eval_dataset=[], **options)
    with pytest.raises(ConfigError, match="train_dataset: got a dict; must be a list of rows, or one split"):
        OnlineDPOTrainer(make_policy(), make_args(), {"train": prompts}, **options)


@pytest.mark.parametrize("key", ["train_dataset", "eval_dataset"])
@pytest.mark.parametrize("kind", ["generator", "IterableDataset"])
def test_rows_without_a_length_are_refused_before_any_model_is_loaded(prompts, make_args, kind, key):
    rows = (row for row in prompts) if kind == "generator" else Dataset.from_list(prompts).to_iterable_dataset()
    given = {"train_dataset": prompts, key: rows, "reward_funcs": count_letters}
    right = r"must be a list of rows, or .* without streaming; datasets.Dataset.from_generator\(\.\.\.\) makes one"
    with pytest.raises(ConfigError, match=f"^{key}: got a {kind}, which has no length; {right}"):
        OnlineDPOTrainer("no-such-model", make_args(), **given)


def test_a_trainer_trains_once(make_policy, tokenizer, prompts, make_args):
    trainer = OnlineDPOTrainer(
        make_policy(), make_args(), prompts, reward_funcs=count_letters, processing_class=tokenizer
    )
    trainer.train()
    log = (Path(trainer.args.output_dir) / "metrics.jsonl").read_text()
    with pytest.raises(RuntimeError, match="has trained already"):
        trainer.train()
    assert (Path(trainer.args.output_dir) / "metrics.jsonl").read_text() == log


def test_an_earlier_run_is_not_written_over(make_policy, tokenizer, prompts, make_args):
    options = {"reward_funcs": count_letters, "processing_class": tokenizer}
    OnlineDPOTrainer(make_policy(), make_args(), prompts, **options).train()
    log = Path(make_args().output_dir) / "metrics.jsonl"
    before = log.read_text()
    with pytest.raises(ConfigError, match=r"output_dir: .* holds an earlier run \(metrics.jsonl\)"):
        OnlineDPOTrainer(make_policy(), make_args(), prompts, **options)
    with pytest.raises(ConfigError, match="max_prompt_length"):  # a mistake found before anything is deleted
        OnlineDPOTrainer(make_policy(), make_args(overwrite_output_dir=True, max_prompt_length=95), prompts, **options)
    assert log.read_text() == before
    OnlineDPOTrainer(make_policy(), make_args(overwrite_output_dir=True), prompts, **options).train()
    assert len(log.read_text().splitlines()) == 6


@pytest.mark.rare
def test_the_command_trains_then_skips_what_is_done(files):
    first = run_command("train", "--config", files["config.yml"])
    assert first.returncode == 0, first.stderr
    log = (files["out"] / "metrics.jsonl").read_text()
    assert [json.loads(line)["schedule/version"] for line in log.splitlines()] == [0, 0, 1, 2, 3, 4, 5, 6]
    second = run_command("train", "--config", files["config.yml"])
    assert second.returncode == 0
    assert "train: done already" in second.stderr
    patient = run_command("train", "--config", files["config.yml"], "--train.generation.timeout", "60")
    assert "train: done already" in patient.stderr, "it changes no result"
    relative = os.path.relpath(files["out"])
    moved = run_command("train", "--config", files["config.yml"], "--train.output_dir", relative)
    assert "train: done already" in moved.stderr
    other = run_command("train", "--config", files["config.yml"], "--train.seed", "5")
    assert other.returncode == 2
    assert "train.seed: was 0, is 5\npass --train.overwrite_output_dir true" in other.stderr
    assert (files["out"] / "metrics.jsonl").read_text() == log


def test_help_and_dry_run(files):
    helped = run_command("--help")
    assert helped.returncode == 0
    for command in ("quickstart", "data", "sft", "pairs", "reward", "train", "evaluate"):
        assert f"\n  {command} " in helped.stdout
    dry = run_command("train", "--config", files["config.yml"], "--dry-run")
    assert dry.returncode == 0
    assert "staleness: 1" in dry.stdout
    assert "# batches: 8" in dry.stdout
    assert "# optimiser steps: 8" in dry.stdout
    assert "# lag in batches: 0 at batch 1, rising to 1" in dry.stdout
    assert "# lag in optimiser steps: 0 at the first step, at most 1" in dry.stdout
    assert not files["out"].exists()
    assert run_command("trian").returncode == 2


def test_an_unwritable_output_dir_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output_dir: got .*file/run'; is inside a file; must be in a folder"):
        OnlineDPOConfig(output_dir=str(tmp_path / "file" / "run"), total_episodes=8)
    with pytest.raises(ConfigError, match="output_dir: '/proc' cannot be written to"):
        hold_folder(Path("/proc"))  # where even root can make no file
    with pytest.raises(ConfigError, match=r"output_dir: .*file/run' cannot be made"):
        hold_folder(tmp_path / "file" / "run")
    assert os.listdir(tmp_path) == ["file"]
