"""What a configuration may ask of Ray; needs no Ray."""

from __future__ import annotations

import pytest

from async_rlhf.config import ConfigError, LoRAConfig, RayConfig
from async_rlhf.run.checkpoint import ResumeState, as_saved


def ray_error(**values: object) -> str:
    with pytest.raises(ConfigError) as caught:
        RayConfig(**values)
    return str(caught.value)


def test_what_ray_cannot_do_is_named():
    assert ray_error(address="ray://head:10001").startswith(
        'address: got \'ray://head:10001\'; must be "auto", "local"'
    )
    assert "must be" in ray_error(address="head")
    assert RayConfig(address="head:6379").address == "head:6379"
    assert ray_error(num_gpus=1.5) == "num_gpus: got 1.5; must be a part of one GPU, or a whole number"
    assert RayConfig(num_gpus=0.5).num_gpus == 0.5
    assert ray_error(labels={"zone": ["a", "b"]}).endswith("must be a mapping of names to a string each")
    assert ray_error(labels={"zone": "in(a,b)"}).endswith("must give each label one value, as text")
    assert ray_error(room_timeout=0) == "room_timeout: got 0; must be above 0"


@pytest.mark.parametrize(
    ("key", "value"),
    [("reward_num_cpus", 2.0), ("reward_num_gpus", 1.0), ("reward_labels", {"a": "b"}), ("reward_max_restarts", 1)],
)
def test_keys_of_reward_workers_need_some(key, value):
    assert ray_error(**{key: value}).startswith(f"{key}: got {value!r}; must be left out with reward_workers 0")
    assert getattr(RayConfig(reward_workers=1, **{key: value}), key) == value


def test_what_would_be_ignored_is_refused(make_args):
    def error(generation: dict[str, object] | None = None, **values: object) -> str:
        with pytest.raises(ConfigError) as caught:
            make_args(generation=generation, **values)
        return str(caught.value)

    right = 'must be left out unless launch is "ray"'
    assert error(ray=RayConfig(num_gpus=1)) == f"ray.num_gpus: got 1.0; {right}"
    assert error(ray=RayConfig(labels={"a": "b"})) == f"ray.labels: got {{'a': 'b'}}; {right}"
    assert error(launch="ray").startswith('generation.placement: got \'auto\'; must be "process", or "auto" with a')
    server = {"placement": "server", "engine": "vllm", "urls": ["http://localhost:8000"]}
    assert error(server, launch="ray", staleness=1).startswith("generation.placement: got 'server'; must be")
    assert error({"device": "cuda:1"}, launch="ray", staleness=1).startswith("generation.device: got 'cuda:1'; must be")
    lora = {"lora": LoRAConfig(rank=4, publish="adapter"), "launch": "ray", "staleness": 1}
    assert error({"engine": "vllm"}, **lora).startswith("lora.publish: got 'adapter'; must be \"merged\" with launch")
    assert make_args(generation={"placement": "process"}, launch="ray").placement == "process"
    assert make_args(launch="ray", staleness=1).summary()["generation"] == "transformers, Ray actors"


def test_where_a_run_runs_may_change_when_it_is_resumed(make_args):
    ray = RayConfig(labels={"a": "b"}, runtime_env={"pip": ["c"]}, reward_workers=2)
    here, there = make_args(staleness=1), make_args(staleness=1, launch="ray", ray=ray)
    ResumeState(batch=1, config=as_saved(here, "online_dpo"), inputs={}, values={}, logs={}).check(there, "online_dpo")
    ResumeState(batch=1, config=as_saved(there, "online_dpo"), inputs={}, values={}, logs={}).check(here, "online_dpo")
    workers = make_args(generation={"workers": 2}, staleness=1, launch="ray", ray=ray)
    with pytest.raises(ConfigError, match=r"generation.workers: was 1, is 2\nset them back") as caught:
        ResumeState(batch=1, config=as_saved(here, "online_dpo"), inputs={}, values={}, logs={}).check(
            workers, "online_dpo"
        )
    assert "ray" not in str(caught.value).partition("set them back")[0]
