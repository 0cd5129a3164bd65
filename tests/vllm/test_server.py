"""Training with a vLLM server over HTTP: the same as with a process, whatever happens to the server meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import SHORT, SHORT_BATCHES, metrics_of, new_policy, run, same_metrics, served_by
from faulty_vllm import SQUARE, TWIN
from safetensors.torch import save_file
from tiny import PROMPTS, After, count_letters

from async_rlhf.generation.protocol import GeneratorError
from async_rlhf.generation.server_client import ServerClient
from async_rlhf.models.publish import SnapshotFolder
from async_rlhf.models.weights import named_weights

pytestmark = pytest.mark.vllm


@pytest.fixture
def train(server, make_args, tokenizer):
    """Train through the server; nothing may stay behind in the folder of the weights."""

    def train_served(name: str = "run", generation: dict[str, object] | None = None, **options: object):
        reward = options.pop("reward", count_letters)
        callbacks = options.pop("callbacks", [])
        args = make_args(name, {**served_by(server), **(generation or {})}, **{**SHORT, **options})
        try:
            return run(args, tokenizer, PROMPTS, reward=reward, callbacks=callbacks)
        finally:
            assert list((Path(args.output_dir) / "weights").glob("*")) == []

    return train_served


def test_without_seeds_no_two_runs_are_alike_and_each_is_as_well_proven(train):
    """The schedule, the weights and the draws are checked as ever."""
    generation = {"seed_per_request": False, "mismatch_samples": 16}
    ours, theirs = (train(name, generation) for name in ("ours", "theirs"))
    for metrics in (ours, theirs):
        assert [row["schedule/lag"] for row in metrics] == [0, *[1] * (SHORT_BATCHES - 1)]
        assert max(row["engine/logprob_difference"] for row in metrics) < 1e-4
        assert max(row["engine/sampling_evidence"] for row in metrics) < 4.7
    assert all(a["objective/scores"] != b["objective/scores"] for a, b in zip(ours, theirs, strict=True))


def test_a_server_samples_what_a_process_does(train, undisturbed):
    metrics = train()
    assert same_metrics(metrics, undisturbed[:SHORT_BATCHES])
    assert max(row["engine/logprob_difference"] for row in metrics) < 1e-4


def test_a_server_killed_and_started_again_samples_the_same_again(server, train, undisturbed, caplog):
    def restart() -> None:
        server.kill()
        server.start()

    try:
        metrics = train(callbacks=[After(2, restart)])
    finally:
        server.wait()
    assert f"server {server.url}: does not answer" in caplog.text
    assert "is sampled again once it is back" in caplog.text
    assert same_metrics(metrics, undisturbed[:SHORT_BATCHES])


def test_a_label_that_somebody_changes_is_noticed_and_healed(server, train, undisturbed):
    """In the middle of sampling: what was drawn under another label is sampled again."""
    relabel = After(2, lambda: server.post("/update_weight_version", json={"new_version": "somebody:7"}))
    metrics = train(callbacks=[relabel])
    assert same_metrics(metrics, undisturbed[:SHORT_BATCHES])


def meddling(server, file: Path, label: str | None):
    """A reward function that, in the second batch, gives the server other weights; it is idle then, at staleness 0."""
    save_file(named_weights(new_policy(9)), file)
    calls = []

    def reward(prompts, completions, **columns):
        calls.append(1)
        if len(calls) == 2:
            if label is not None:
                server.post("/update_weight_version", json={"new_version": label})
            server.post("/collective_rpc", json={"method": "load_snapshot", "args": [str(file)]})
        return count_letters(prompts, completions)

    reward.__name__ = count_letters.__name__
    return reward


def test_other_weights_between_two_batches_are_replaced(server, train, tmp_path):
    """Labelled with the very number that the next batch needs, but of another run."""
    undisturbed = train("undisturbed", staleness=0)
    assert [row["schedule/lag"] for row in undisturbed] == [0] * SHORT_BATCHES
    reward = meddling(server, tmp_path / "theirs.safetensors", "other-run:2")
    assert same_metrics(train("disturbed", staleness=0, reward=reward), undisturbed)


def test_other_weights_under_the_label_of_the_run_stop_it(server, train, tmp_path, monkeypatch):
    """Loaded at the worst moment, between the proof and the first token: no label tells, but the log-probabilities."""
    file = tmp_path / "theirs.safetensors"
    save_file(named_weights(new_policy(9)), file)
    label = ServerClient.set_weight_version

    async def label_and_meddle(client, version):
        await label(client, version)
        if version.endswith(":1"):
            await client.load(file)

    monkeypatch.setattr(ServerClient, "set_weight_version", label_and_meddle)
    with pytest.raises(GeneratorError, match=r"the engine has the weights of version 1, but computes other"):
        train()
    assert [row["batch"] for row in metrics_of(tmp_path / "run")] == [1, 2]


def test_tensors_that_the_server_did_not_take_stop_the_run(train, tmp_path, monkeypatch):
    """Here the server is handed a file with two tensors exchanged."""
    finish = SnapshotFolder.make_available

    def swap_parameter(folder, version):
        finish(folder, version)
        if version == 1:
            tensors = folder.views(version)
            tensors[SQUARE], tensors[TWIN] = tensors[TWIN], tensors[SQUARE]
            save_file(tensors, folder.file(version))

    monkeypatch.setattr(SnapshotFolder, "make_available", swap_parameter)
    with pytest.raises(GeneratorError, match=rf"not those of version 1: 2 of 28 tensors: {TWIN}, {SQUARE}"):
        train()
    assert [row["batch"] for row in metrics_of(tmp_path / "run")] == [1, 2]
