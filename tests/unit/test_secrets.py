"""Passwords and keys are in no file, log, message or printed configuration; and a run goes on without them."""

from __future__ import annotations

import base64
import json
import logging
import stat
import threading
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from tiny import PROMPTS, new_args

from async_rlhf import OnlineDPOConfig
from async_rlhf.commands.stage import Stage
from async_rlhf.commands.train import run_train
from async_rlhf.config import ConfigError, EvaluateConfig, GenerationConfig, JudgeConfig
from async_rlhf.config.parsing import parse
from async_rlhf.config.secrets import masked, without_secrets
from async_rlhf.generation.server_client import check_server
from async_rlhf.generation.server_generator import ServerGenerator
from async_rlhf.models.saving import write_model
from async_rlhf.rewards.chat import JudgeError
from async_rlhf.rewards.judge import Pair, PairwiseJudge
from async_rlhf.run.callbacks import training_arguments
from async_rlhf.run.checkpoint import ResumeState, as_saved
from async_rlhf.run.config import DataConfig, RunConfig
from async_rlhf.system.trace import Trace

USER, PASSWORD, KEY = "some-user", "s3cret@word", "k3y-of-the-servers"
SECRETS = (USER, "s3cret", "word@", KEY)


def clean(text: str) -> bool:
    assert not [secret for secret in SECRETS if secret in text], text
    return True


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://host:1/a", "http://host:1/a"),
        ("http://u:p@host:1/a", "http://***@host:1/a"),
        ("https://u:p@ss@host", "https://***@host"),
        ("https://token@host", "https://***@host"),
        ("at 'http://u:p@a' and \"http://v:q@b/x@y\"", "at 'http://***@a' and \"http://***@b/x@y\""),
        ("http://h/?api_key=abc&n=1&token=d", "http://h/?api_key=***&n=1&token=***"),
        ("mail@host and http://h", "mail@host and http://h"),
    ],
)
def test_what_is_masked(text, expected):
    assert masked(text) == expected
    assert masked(expected) == expected


def test_configurations_are_masked_at_any_depth():
    values = {
        "urls": ["http://u:p@a"],
        "vllm": {"options": {"hf_token": "t", "max_tokens": 3, "stop_token": "s"}},
        "generation.api_key": KEY,
        "api_key_variable": "NAME",
    }
    assert without_secrets(values) == {
        "urls": ["http://***@a"],
        "vllm": {"options": {"hf_token": None, "max_tokens": 3, "stop_token": "s"}},
        "generation.api_key": None,
        "api_key_variable": "NAME",
    }


def served(**changes: object) -> GenerationConfig:
    url = f"http://{USER}:{PASSWORD}@127.0.0.1:9"
    fields = {"engine": "vllm", "placement": "server", "urls": [url], "heartbeat_timeout": 0.1}
    return GenerationConfig(**{**fields, **changes})


def test_nothing_that_a_run_is_told_is_printed(monkeypatch):
    words = ["--model", "m", "--data.train", "d", "--reward_funcs", "m:f", "--train.generation.engine", "vllm"]
    words += ["--train.generation.placement", "server", "--train.total_episodes", "8"]
    words += ["--train.generation.urls", f'["http://{USER}:{PASSWORD}@host:1"]']
    monkeypatch.setenv("ASYNC_RLHF_TRAIN__GENERATION__API_KEY", KEY)
    config, text = parse(RunConfig, "train", words)
    assert config.train.generation.urls == [f"http://{USER}:{PASSWORD}@host:1"]
    assert config.train.generation.api_key == KEY
    assert clean(text)
    assert yaml.safe_load(text)["train"]["generation"]["urls"] == ["http://***@host:1"]


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: served(urls=[f"ftp://{USER}:{PASSWORD}@host"]),
        lambda: served(urls=[f"http://{USER}:{PASSWORD}@host"] * 2),
        lambda: served(placement="process"),
        lambda: served(api_key=f"{KEY}\n"),
        lambda: GenerationConfig(api_key=KEY),
        lambda: served(urls=[], api_key=[KEY]),
        lambda: JudgeConfig(url=f"http://{USER}:{PASSWORD}@host"),
        lambda: JudgeConfig(url=f"ftp://{USER}:{PASSWORD}@host", model="m"),
    ],
)
def test_messages_about_mistakes_show_none(mistake):
    with pytest.raises(ConfigError) as caught:
        mistake()
    assert clean(str(caught.value))
    assert clean(repr(caught.value))


def test_what_is_left_of_a_url_is_no_url():
    with pytest.raises(ConfigError, match=r"urls: got 'http://\*\*\*@host'; must have its user and password again"):
        served(urls=["http://***@host"])
    with pytest.raises(ConfigError, match=r"judge.url: got .*; must have its user and password again"):
        JudgeConfig(url="http://***@host", model="m")


class Refusing(BaseHTTPRequestHandler):
    """Answers everything with one status, and notes what it was sent."""

    seen: list[str | None] = []  # noqa: RUF012

    def answer(self) -> None:
        self.seen.append(self.headers["Authorization"])
        healthy = self.path == "/health"
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200 if healthy else 401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST = answer

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def refusing():
    Refusing.seen = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(timeout=10)


def test_a_servers_own_password_is_sent_else_the_key_and_neither_is_said(make_policy, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)
    policy = make_policy()
    basic = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    monkeypatch.setenv("ASYNC_RLHF_API_KEY", KEY)
    with refusing() as place:
        for url, key, sent in (
            (f"http://{USER}:{PASSWORD}@{place}", None, basic),
            (f"http://{place}", "another", "Bearer another"),
            (f"http://{place}", None, f"Bearer {KEY}"),
        ):
            with pytest.raises(ConfigError, match=r"generation.api_key: the server at .* was given ") as caught:
                check_server(url, policy.config, served(urls=[url], api_key=key), 10)
            assert clean(str(caught.value))
            assert set(Refusing.seen) == {sent}
            Refusing.seen.clear()
    with pytest.raises(ConfigError, match="no server answers at") as caught:
        ServerGenerator(OnlineDPOConfig(generation=served()), policy, None, None)
    assert clean(str(caught.value))
    assert clean(caplog.text)


def test_a_judges_password_is_in_no_message_and_no_marker(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with refusing() as place:
        judge = JudgeConfig(url=f"http://{USER}:{PASSWORD}@{place}/v1", model="m", max_retries=0)
        with pytest.raises(JudgeError) as caught:
            PairwiseJudge(judge, tmp_path / "verdicts.jsonl").outcomes([Pair("a", "b", "c")], "label")
    assert clean(str(caught.value))
    assert clean(caplog.text.replace("Authorization", ""))
    config = EvaluateConfig(models={"m": "m"}, data="d", output_dir=str(tmp_path), judge=judge)
    stage = Stage(tmp_path, "evaluation", config, {"data": None})
    stage.publish_files({}, {"mean": 1})
    assert clean(stage.marker.read_text())
    other = replace(config, judge=replace(judge, url=judge.url.replace("s3cret", "n3w")))
    assert Stage(tmp_path, "evaluation", other, {"data": None}).done() == {"mean": 1}
    elsewhere = replace(config, judge=replace(judge, url=f"http://{USER}:{PASSWORD}@elsewhere"))
    with pytest.raises(ConfigError, match=r"judge.url: was 'http://\*\*\*@127") as caught:
        Stage(tmp_path, "evaluation", elsewhere, {"data": None}).done()
    assert clean(str(caught.value))


def test_the_trace_has_none(tmp_path):
    trace = Trace()
    trace.write_to(tmp_path / "trace.json")
    trace.mark("given up", "generator 0", f"no answer from http://{USER}:{PASSWORD}@host/v1?api_key={KEY}")
    trace.close()
    text = (tmp_path / "trace.json").read_text()
    assert "http://***@host/v1?api_key=***" in text
    assert clean(text)


def test_a_marker_of_an_earlier_version_is_compared_without_its_secrets(tmp_path):
    judge = JudgeConfig(url=f"http://{USER}:{PASSWORD}@host", model="m")
    config = EvaluateConfig(models={"m": "m"}, data="d", output_dir=str(tmp_path), judge=judge)
    stage = Stage(tmp_path, "evaluation", config, {"data": None})
    stage.publish_files({}, {"mean": 1})
    found = json.loads(stage.marker.read_text())
    found["config"]["judge.url"] = judge.url
    stage.marker.write_text(json.dumps(found))
    assert Stage(tmp_path, "evaluation", config, {"data": None}).done() == {"mean": 1}


def test_the_state_of_a_run_has_none_and_another_password_resumes(tmp_path):
    args = new_args(tmp_path)
    state = ResumeState(1, as_saved(replace(args, generation=served(api_key=KEY)), "online_dpo"), {}, {}, {})
    assert clean(json.dumps(state.config))
    other = replace(args, generation=served(api_key="new", urls=[f"http://{USER}:n3w@127.0.0.1:9"]))
    state.check(other, "online_dpo")
    state.config["generation.api_key"] = "of an earlier version"
    state.check(other, "online_dpo")
    with pytest.raises(ConfigError, match=r"learning_rate: was 0.001, is 0.5"):
        state.check(replace(other, learning_rate=0.5), "online_dpo")


def test_what_may_hold_secrets_is_for_its_owner_alone(tmp_path, make_policy, tokenizer):
    model, data, reward = tmp_path / "model", tmp_path / "data.jsonl", tmp_path / "reward.py"
    write_model(make_policy(), tokenizer, model)
    data.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    reward.write_text("def reward(prompts, completions, **columns):\n    return [float(len(c)) for c in completions]\n")
    args = new_args(tmp_path, total_episodes=8, save_steps=1)
    run_train(RunConfig(str(model), DataConfig(str(data)), reward_funcs=[f"{reward}:reward"], train=args))
    for file in ("run.yml", "checkpoint-1/resume/state.json"):
        assert stat.S_IMODE((Path(args.output_dir) / file).stat().st_mode) == 0o600, file


def test_the_callbacks_of_integrations_upload_no_secrets(tmp_path):
    arguments = training_arguments(replace(new_args(tmp_path), generation=served(api_key=KEY)))
    assert clean(json.dumps(arguments.to_dict(), default=str))
    assert clean(arguments.to_json_string())
