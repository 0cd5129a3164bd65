"""Code that comes with a model is run where the user says so, and nowhere else; nobody is asked on standard input."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import tiny
import transformers.dynamic_module_utils as dynamic
from tiny import byte_tokenizer, count_letters
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from async_rlhf import OnlineDPOTrainer
from async_rlhf.commands.evaluate import run_evaluate
from async_rlhf.commands.generate import run_generate
from async_rlhf.commands.pairs import run_pairs
from async_rlhf.commands.relabel import run_relabel
from async_rlhf.commands.reward import run_reward
from async_rlhf.commands.sft import run_sft
from async_rlhf.config import ConfigError, EvaluateConfig, GenerateConfig, PairsConfig, RewardConfig, SFTConfig
from async_rlhf.config.stages import RelabelConfig
from async_rlhf.data.loading import load_rows
from async_rlhf.models.loading import brings_code, load_policy, load_reward_model, load_tokenizer, new_reward_model
from async_rlhf.models.saving import write_model

PACKAGE = Path(load_rows.__code__.co_filename).parents[1]
CODE = """
from pathlib import Path
import transformers as hf

Path({ran!r}).open("a").write("x")

class TheirConfig(hf.LlamaConfig):
    model_type = "their_own"

class TheirModel(hf.LlamaForCausalLM):
    config_class = TheirConfig

class TheirBody(hf.LlamaModel):
    config_class = TheirConfig

class TheirRewardModel(hf.LlamaForSequenceClassification):
    config_class = TheirConfig

class TheirTokenizer(hf.PreTrainedTokenizerFast):
    pass

hf.AutoModel.register(TheirConfig, TheirBody)
"""


@pytest.fixture
def theirs(tmp_path, tokenizer, monkeypatch):
    """A folder with a model, a reward model, and code for both that notes in the file beside it when it is run."""
    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))  # who asks there is told yes
    llama = LlamaConfig(**tiny.LLAMA_SIZES, vocab_size=258, eos_token_id=256, pad_token_id=257, num_labels=1)
    kinds = {"policy": (LlamaForCausalLM, "TheirModel"), "reward": (LlamaForSequenceClassification, "TheirRewardModel")}
    for name, (kind, architecture) in kinds.items():
        folder = tmp_path / name
        write_model(kind(llama), tokenizer, folder)
        (folder / "their_code.py").write_text(CODE.format(ran=str(tmp_path / "ran")))
        config = json.loads((folder / "config.json").read_text())
        config |= {"model_type": "their_own", "architectures": [architecture]}
        config["auto_map"] = {
            "AutoConfig": "their_code.TheirConfig",
            "AutoModelForCausalLM": "their_code.TheirModel",
            "AutoModelForSequenceClassification": "their_code.TheirRewardModel",
        }
        (folder / "config.json").write_text(json.dumps(config))
        fields = json.loads((folder / "tokenizer_config.json").read_text())
        fields |= {
            "tokenizer_class": "TheirTokenizer",
            "auto_map": {"AutoTokenizer": [None, "their_code.TheirTokenizer"]},
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


def loaders(folder: Path):
    """Every way in which this package loads something of transformers by name."""
    policy, reward = str(folder / "policy"), str(folder / "reward")
    return [
        lambda trust: load_policy(policy, trust=trust),
        lambda trust: load_reward_model(reward, trust=trust),
        lambda trust: load_tokenizer(policy, trust=trust),
        lambda trust: new_reward_model(policy, byte_tokenizer(), 0, trust=trust),
    ]


def test_code_is_refused_without_a_question_and_the_key_named(theirs):
    for load in loaders(theirs):
        with pytest.raises(ConfigError, match=r"trust_remote_code: got False; must be true to load .*, which brings"):
            load(False)
    assert not (theirs / "ran").exists()
    assert sys.stdin.read() == "y\n" * 100  # nobody has asked


def test_code_is_run_where_the_user_says_so(theirs):
    for load in loaders(theirs):
        load(True)
    assert (theirs / "ran").exists()
    assert brings_code(type(load_policy(str(theirs / "policy"), trust=True)))
    assert not brings_code(LlamaForCausalLM)


def test_every_command_refuses_it_before_it_does_anything(theirs):
    policy, reward, data = str(theirs / "policy"), str(theirs / "reward"), theirs / "data.jsonl"
    row = {"query": "a", "prompt": "a", "chosen": "b", "rejected": "c", "query_reference_response": "ab"}
    data.write_text(json.dumps(row) + "\n" + json.dumps({**row, "query": "a", "prompt": "d"}) + "\n")
    out, common = str(theirs / "out"), {"train": str(data), "output_dir": str(theirs / "out")}
    letters = [f"{Path(tiny.__file__)}:count_letters"]
    commands = [
        lambda: run_sft(SFTConfig(model=policy, **common)),
        lambda: run_reward(RewardConfig(model=policy, **common)),
        lambda: run_pairs(PairsConfig(policy, str(data), f"{out}.jsonl", reward_funcs=letters)),
        lambda: run_relabel(RelabelConfig(data=str(data), output_dir=out, reward_model=reward)),
        lambda: run_generate(GenerateConfig(models={"their": policy}, data=str(data), output_dir=out)),
        lambda: run_evaluate(
            EvaluateConfig(models={"their": policy}, data=str(data), output_dir=out, reward_model=reward)
        ),
        lambda: OnlineDPOTrainer(policy, tiny.new_args(theirs), tiny.PROMPTS, reward_funcs=count_letters),
    ]
    for command in commands:
        with pytest.raises(ConfigError, match="trust_remote_code: got False; must be true to load"):
            command()
    assert not (theirs / "ran").exists()


def test_a_run_that_trusts_it_samples_in_processes_with_it_saves_it_and_resumes(theirs):
    """The generators are other processes, which have to find the same code."""
    options = {"staleness": 1, "trust_remote_code": True, "save_steps": 1, "total_episodes": 16}
    args = tiny.new_args(theirs, **options)
    OnlineDPOTrainer(str(theirs / "policy"), args, tiny.PROMPTS, reward_funcs=count_letters).train()
    final = Path(args.output_dir) / "final"
    assert type(load_policy(str(final), trust=True)).__name__ == "TheirModel"
    with pytest.raises(ConfigError, match="trust_remote_code"):
        load_policy(str(final))
    shutil.rmtree(Path(args.output_dir) / "final")
    shutil.rmtree(Path(args.output_dir) / "checkpoint-2", ignore_errors=True)
    again = tiny.new_args(theirs, **options, resume=True)
    OnlineDPOTrainer(str(theirs / "policy"), again, tiny.PROMPTS, reward_funcs=count_letters).train()
    assert final.is_dir()


def test_a_data_set_with_a_script_is_not_run(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "data.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (folder / "train.csv").write_text("query\na\n")
    assert [row["query"] for row in load_rows(str(folder))] == ["a"]
    (folder / "train.csv").unlink()
    with pytest.raises(ConfigError, match="data: "):
        load_rows(str(folder))
    assert not (tmp_path / "ran").exists()


def test_one_place_loads_by_name():
    """Anything else would ask, or forget to."""
    pattern = r"\.from_pretrained\(|(?<!_)from_config\(|pipeline\(|torch\.load\(|pickle\.loads?\(|\beval\(|\bexec\("
    found = {
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(pattern, line) and ".eval(" not in line and not line.lstrip().startswith(('"""', "#"))
    }
    assert found == {
        "config/import_by_name.py: "
        'exec(compile(source, path, "exec"), module.__dict__)  # not what an older file was compiled to',
        "models/loading.py: "
        "return kind.from_pretrained(str(Path(name).expanduser()), trust_remote_code=trust, **options)",
        # Models of transformers' own: others are refused before.
        "models/weights.py: model: PreTrainedModel = AutoModelForCausalLM.from_config(known, trust_remote_code=False)",
        # Numbers: peft reads adapters without running anything of theirs, for a model that is loaded already.
        "models/adapters.py: "
        "return unwrap(PeftModel.from_pretrained(base, str(Path(name).expanduser()), is_trainable=True))",
        "models/gpu_defaults.py: model = AutoModelForCausalLM.from_config(described, trust_remote_code=trust)",
        "models/values.py: model = AutoModelForSequenceClassification.from_config("
        "config, trust_remote_code=brings_code(type(policy)))",
        # What this very process has pickled, for a process that it has started, over a pipe that nobody else has.
        "rewards/ray.py: self._functions = SharedFunctions(cloudpickle.loads(self._pickled), self._seed)",
        "rewards/sandbox.py: return pickle.loads(function)",
        # What the run has pickled of the user's, for a process that it has started.
        "generation/episodes/spec.py: return Sent(what(), what, name) if callable(what) else "
        "Sent(cloudpickle.loads(what), name=name)",
        # What a policy wrote, in a process with limits, if the user names this tool.
        'tasks/tools.py: exec(compile(sys.stdin.buffer.read(), "<code>", "exec"), {"__name__": "__main__"})',
        # What another rank of this run has pickled, over the group that torch.distributed pickles objects for as well.
        "distributed/messages.py: head, lengths = pickle.loads(view[8 : 8 + size])",
        "distributed/messages.py: return pickle.loads(head, buffers=[view[s : s + n] for s, n in zip(starts, lengths, "
        "strict=False)])",
        "rewards/sandbox.py: arguments, limit, threads, before = pickle.loads(pipe.recv_bytes())",
    }
