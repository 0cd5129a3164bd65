"""Uploads by the real huggingface_hub to a stand-in of the Hub's API, and the model card."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
import yaml
from huggingface_hub import ModelCard
from tiny import count_letters, new_args
from transformers import AutoModelForCausalLM, TrainerCallback

from async_rlhf import OnlineDPOTrainer
from async_rlhf.config import ConfigError, VLLMConfig
from async_rlhf.run.card import Card
from async_rlhf.run.checkpoint import ResumeState
from async_rlhf.run.manifest import verify
from async_rlhf.run.record import Record

TOKEN = "hf_T0kenOfNobody"


class Hub:
    """Repositories as the API shows them: name -> path -> content, and their commits."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.commits: list[tuple[str, str, list[str]]] = []
        self.private: dict[str, str | None] = {}
        self.lfs: dict[str, bytes] = {}
        self.refused = 0
        """Commits to refuse."""
        self.gate, self.reached = threading.Event(), threading.Event()
        """Uploads wait for the first; the second says that one has begun."""
        self.gate.set()


class Handler(BaseHTTPRequestHandler):
    @property
    def hub(self) -> Hub:
        return self.server.hub

    def answer(self, content: dict | list, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.answer({"error": "Invalid credentials in Authorization header"}, 401)
        elif self.path == "/api/repos/create":
            self.create(json.loads(body))
        elif self.path == "/api/validate-yaml":
            head = re.match(r"---\n(.*?)\n---\n", json.loads(body)["content"], re.DOTALL)
            good = head is not None and isinstance(yaml.safe_load(head[1]), dict)
            self.answer({"errors": [] if good else [{"message": "no metadata"}]}, 200 if good else 400)
        elif found := re.fullmatch(r"/api/models/(.+)/preupload/main", self.path):
            self.hub.reached.set()
            self.hub.gate.wait(60)
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = {path: "lfs" if path.endswith(".safetensors") else "regular" for path in files}
            told = [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]
            self.answer({"files": told}, 200 if found[1] in self.hub.files else 404)
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            self.answer({"transfer": "basic", "objects": [self.wanted(one) for one in objects]})
        elif found := re.fullmatch(r"/api/models/(.+)/commit/main", self.path):
            self.commit(found[1], [json.loads(line) for line in body.splitlines()])
        else:
            self.answer({"error": f"POST {self.path}"}, 404)

    def create(self, asked: dict) -> None:
        name = f"{asked.get('organization') or 'nobody'}/{asked['name']}"
        new = name not in self.hub.files
        self.hub.files.setdefault(name, {})
        if new:
            self.hub.private[name] = asked.get("visibility") or ("private" if asked.get("private") else None)
        place = f"http://127.0.0.1:{self.server.server_port}/{name}"
        self.answer({"url": place, "error": "exists"}, 200 if new else 409)

    def wanted(self, one: dict) -> dict:
        place = f"http://127.0.0.1:{self.server.server_port}/lfs/{one['oid']}"
        known = {"oid": one["oid"], "size": one["size"]}
        return known if one["oid"] in self.hub.lfs else {**known, "actions": {"upload": {"href": place}}}

    def commit(self, name: str, lines: list[dict]) -> None:
        if self.hub.refused > 0:
            self.hub.refused -= 1
            self.answer({"error": "no write access"}, 403)
            return
        head, *operations = lines
        changed = {}
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "deletedFile":
                del self.hub.files[name][value["path"]]
                continue
            large = operation["key"] == "lfsFile"
            changed[value["path"]] = self.hub.lfs[value["oid"]] if large else base64.b64decode(value["content"])
        self.hub.files[name] |= changed
        self.hub.commits.append((name, head["value"]["summary"], sorted(changed)))
        number = f"{len(self.hub.commits):040x}"
        place = f"http://127.0.0.1:{self.server.server_port}/{name}/commit/{number}"
        self.answer({"commitUrl": place, "commitOid": number})

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        number = self.path.rpartition("/")[2]
        assert hashlib.sha256(data).hexdigest() == number
        self.hub.lfs[number] = data
        self.answer({})

    def do_GET(self) -> None:
        if found := re.fullmatch(r"/api/models/(.+)/tree/main\?.*", self.path):
            files = self.hub.files[found[1]]
            rows = [{"type": "file", "path": path, "oid": "0" * 40, "size": len(files[path])} for path in files]
            self.answer(rows)
            return
        self.answer({"error": f"GET {self.path}"}, 404)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def standing_in(monkeypatch):
    hub = Hub()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.hub = hub
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)  # its service is another one
        yield hub
        hub.gate.set()
        server.shutdown()
        thread.join(timeout=10)


@pytest.fixture
def hub(monkeypatch):
    with standing_in(monkeypatch) as found:
        yield found


@pytest.fixture
def pushing(make_args):
    """Arguments of a run of four batches with a checkpoint after every second, which is uploaded."""

    def make(strategy: str = "every_save", **changes):
        known = {"push_to_hub": True, "hub_token": TOKEN, "hub_strategy": strategy, "hub_model_id": "ours/policy"}
        return make_args(**{"total_episodes": 32, "save_steps": 2, **known, **changes})

    return make


def trainer_of(make_policy, tokenizer, prompts, args, **options):
    known = {"reward_funcs": count_letters, "processing_class": tokenizer}
    return OnlineDPOTrainer(make_policy(), args, prompts, **known, **options)


MODEL = {"README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}


@pytest.mark.parametrize("strategy", ["end", "every_save", "checkpoint", "all_checkpoints"])
def test_what_each_strategy_uploads(hub, make_policy, tokenizer, prompts, pushing, strategy):
    args = pushing(strategy)
    trainer = trainer_of(make_policy, tokenizer, prompts, args)
    trainer.train()
    folder, files = Path(args.output_dir), hub.files["ours/policy"]
    said = [message for _, message, _ in hub.commits]
    saves = {"end": [], "every_save": ["After batch 2", "After batch 4"]}
    both = [f"After batch {b}{rest}" for b in (2, 4) for rest in ("", ", with all that resuming needs")]
    # A checkpoint whose upload has not begun gives way to a newer one, unless all are wanted.
    expected = [*saves.get(strategy, both), "End of training"]
    assert said[-1] == expected[-1]
    assert set(said) <= set(expected)
    if strategy in ("end", "all_checkpoints"):
        assert said == expected
    top = {path for path in files if "/" not in path}
    assert top >= MODEL
    assert not {"manifest.json", "trainer_state.json"} & top
    assert files["model.safetensors"] == (folder / "final" / "model.safetensors").read_bytes()
    folders = {path.split("/")[0] for path in files if "/" in path}
    if strategy == "all_checkpoints":
        assert folders == {"checkpoint-2", "checkpoint-4"}
    elif strategy != "checkpoint":
        assert folders == set()
    assert not list(folder.glob(".*"))
    everything = [path.read_bytes() for path in folder.rglob("*") if path.is_file()] + list(files.values())
    assert not any(TOKEN.encode() in content for content in everything)


def test_a_checkpoint_from_the_hub_is_resumed(hub, make_policy, tokenizer, prompts, pushing, make_args, tmp_path):
    """Also where the run has deleted its own before the upload began."""
    hub.gate.clear()

    class Release(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            hub.gate.set()

    args = pushing("all_checkpoints", save_total_limit=1)
    trainer = trainer_of(make_policy, tokenizer, prompts, args, callbacks=[Release()])
    trainer.train()
    assert [path.name for path in Path(args.output_dir).glob("checkpoint-*")] == ["checkpoint-4"]
    for path, content in hub.files["ours/policy"].items():
        (tmp_path / "fetched" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fetched" / path).write_bytes(content)
    checkpoint = tmp_path / "fetched" / "checkpoint-2"
    verify(checkpoint)
    assert ResumeState.read(checkpoint).batch == 2
    again = make_args("again", total_episodes=32, resume_from=str(checkpoint))
    resumed = trainer_of(make_policy, tokenizer, prompts, again)
    resumed.train()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "fetched").state_dict()
    assert all(theirs[name].equal(tensor) for name, tensor in resumed.model.state_dict().items())


def test_training_goes_on_while_an_upload_is_stuck(hub, make_policy, tokenizer, prompts, pushing):
    """The first checkpoint's upload waits until training has ended; those in between give way to the last."""
    hub.gate.clear()
    seen = []

    class Release(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            assert state.global_step == 0 or hub.reached.wait(60)

        def on_train_end(self, args, state, control, **kwargs):
            seen.append((state.global_step, len(hub.commits)))
            hub.gate.set()

    args = pushing(save_steps=1)
    trainer_of(make_policy, tokenizer, prompts, args, callbacks=[Release()]).train()
    assert seen == [(4, 0)]
    assert [message for _, message, _ in hub.commits] == ["After batch 1", "End of training"]
    assert not list(Path(args.output_dir).glob(".*"))


def test_a_failed_upload_is_a_warning_and_said_at_the_end(hub, make_policy, tokenizer, prompts, pushing, caplog):
    hub.refused = 100
    caplog.set_level(logging.WARNING)
    args = pushing("all_checkpoints")
    state = trainer_of(make_policy, tokenizer, prompts, args).train()
    assert state.global_step == 4
    said = [record.getMessage() for record in caplog.records if "hub:" in record.getMessage()]
    assert [line.split(" is not")[0] for line in said[:3]] == [
        f"WARNING: hub: {name}" for name in ("checkpoint-2", "checkpoint-4", "final")
    ]
    assert "403" in said[3]
    assert said[3].endswith(f"by hand: hf upload ours/policy {args.output_dir}/final")
    assert not list(Path(args.output_dir).glob(".*"))
    assert TOKEN not in caplog.text


def test_a_wrong_token_is_said_at_the_beginning(hub, make_policy, tokenizer, prompts, pushing, caplog):
    said = []

    class Listener(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            until = time.monotonic() + 60
            while "the repository is not on the Hub" not in caplog.text and time.monotonic() < until:
                time.sleep(0.01)
            said.append("the repository is not on the Hub" in caplog.text)

    args = pushing("end", hub_token="hf_Wrong")
    trainer_of(make_policy, tokenizer, prompts, args, callbacks=[Listener()]).train()
    assert said == [True] * 4
    assert hub.commits == []
    assert (Path(args.output_dir) / "final" / "model.safetensors").exists()


def test_pushing_from_python_and_private_names(hub, make_policy, tokenizer, prompts, make_args, monkeypatch):
    trainer = trainer_of(make_policy, tokenizer, prompts, make_args("mine", total_episodes=8))
    with pytest.raises(RuntimeError, match="call train"):
        trainer.push_to_hub(token=TOKEN)
    trainer.train()
    place = trainer.push_to_hub(private=True, token=TOKEN, commit_message="By hand")
    assert hub.commits[0][:2] == ("nobody/mine", "By hand")
    assert hub.private == {"nobody/mine": "private"}
    assert place.endswith(f"/nobody/mine/commit/{1:040x}")


def test_the_card_says_how_the_policy_was_made(make_policy, tokenizer, prompts, make_args):
    args = make_args(staleness=1, total_episodes=16, save_steps=1, beta=0.25, run_name="mine|b")
    trainer_of(make_policy, tokenizer, prompts, args, eval_dataset=prompts[:4]).train()
    card = ModelCard.load(Path(args.output_dir) / "final" / "README.md")
    meta = card.data.to_dict()
    assert meta["tags"] == ["async-rlhf", "rlhf", "reinforcement-learning", "online-dpo", "staleness-1"]
    assert (meta["library_name"], meta["pipeline_tag"]) == ("transformers", "text-generation")
    assert "| staleness in batches | 1, exactly, for every token |" in card.text
    assert "2 batches of 8 prompts with 2 completions each; 4 optimiser steps" in card.text
    first, last = [json.loads(x) for x in (Path(args.output_dir) / "metrics.jsonl").read_text().splitlines()][:2]
    shown = f"| objective/scores | {first['objective/scores']:.4g} | {last['objective/scores']:.4g} |"
    assert shown in card.text
    assert "| eval_objective/scores |" in card.text
    assert "--train.beta 0.25" in card.text
    assert str(args.output_dir) not in card.text
    assert "async_rlhf: " in card.text


def test_a_card_has_no_text_that_may_be_a_secret(tmp_path):
    words = {"options": {"anything": "s3cret"}}
    args = new_args(tmp_path, staleness=0, generation={"engine": "vllm", "vllm": VLLMConfig(**words)})
    names = [f"{tmp_path}/judge.py:judge(auth='s3cret', limit=3)"]
    values = {"model": "o/m", "algorithm": "online_dpo", "data": {"train": "o/d"}, "reward_funcs": names}
    text = Card("a", args, Record({**values, "train": asdict(args)}), None).text({}, {})
    assert "s3cret" not in text
    assert "--reward 'judge.py:judge(auth=***, limit=3)'" in text
    assert str(tmp_path) not in text
    meta = ModelCard(text).data.to_dict()
    assert (meta["base_model"], meta["datasets"]) == ("o/m", ["o/d"])


def test_keys_of_the_hub_need_push_to_hub_and_a_name_that_can_be_one(make_args):
    for name, value in {
        "hub_model_id": "a/b",
        "hub_strategy": "end",
        "hub_token": TOKEN,
        "hub_private_repo": True,
    }.items():
        with pytest.raises(ConfigError, match=rf"{name}: got .*; must be left out without push_to_hub") as caught:
            make_args(**{name: value})
        assert TOKEN not in str(caught.value)
    for name in ("a/b/c", "-a", "a--b", "a b", "/a", "a/"):
        with pytest.raises(ConfigError, match=r"hub_model_id: got .*; must be "):
            make_args(push_to_hub=True, hub_model_id=name)


def test_weights_that_were_in_other_files_are_replaced(hub, make_policy, tokenizer, prompts, pushing):
    """transformers would load a single file that is left beside several."""
    args = pushing("checkpoint")
    trainer_of(make_policy, tokenizer, prompts, args).train()
    left = {
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "value_model/model.safetensors",
        "mine.txt",
    }
    resumed = {f"last-checkpoint/{name}" for name in ("model-00001-of-00002.safetensors", "resume/tensors.safetensors")}
    hub.files["ours/policy"] |= dict.fromkeys(left | resumed, b"old")
    trainer_of(make_policy, tokenizer, prompts, replace(args, overwrite_output_dir=True)).train()
    files = hub.files["ours/policy"]
    assert left & files.keys() == {"value_model/model.safetensors", "mine.txt"}
    assert files["model.safetensors"] != b"old"
    assert "last-checkpoint/model-00001-of-00002.safetensors" not in files
    assert files["last-checkpoint/resume/tensors.safetensors"] != b"old"
