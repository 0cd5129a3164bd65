"""Checks episodes by the definition: by forward passes of whole rows, and the words of their environments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from async_rlhf.generation.remote import RemoteGenerator


def watch(patch: pytest.MonkeyPatch):
    """Every batch that a generator gives, and every version of the weights that it is given."""
    batches, weights = [], {}
    collect, publish = RemoteGenerator.collect, RemoteGenerator.publish

    def collect_and_keep(generator, index):
        batches.append(collect(generator, index))
        return batches[-1]

    def publish_and_keep(generator, policy, version):
        weights[version] = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
        publish(generator, policy, version)

    patch.setattr(RemoteGenerator, "collect", collect_and_keep)
    patch.setattr(RemoteGenerator, "publish", publish_and_keep)
    return batches, weights


def answers_of(sample) -> list[slice]:
    """Where each answer of the policy is."""
    edges = np.flatnonzero(np.diff(sample.sampled.astype(int), prepend=0, append=0))
    return [slice(start, end) for start, end in edges.reshape(-1, 2)]


@torch.no_grad()
def check_episode(prompt, sample, tokenizer, weights, generation, temperature=0.7) -> None:
    """One episode, by a forward pass of its row for each version that drew a token of it.

    Args:
        prompt: of the episode.
        sample: the episode.
        tokenizer: of the policy.
        weights: a model of each version.
        generation: options.
        temperature: of the run.
    """
    assert tuple(sample.tokens[: len(prompt.tokens)]) == prompt.tokens
    answers = answers_of(sample)
    assert answers[0].start == len(prompt.tokens)
    assert answers[-1].stop == len(sample) <= len(prompt.tokens) + generation["episode_length"]
    assert len(answers) == sample.metrics["turns"] <= generation["max_turns"]
    for array, nothing in ((sample.logprobs, 0.0), (sample.versions, -1)):
        assert (array[~sample.sampled] == nothing).all()
    stops = {256, *generation["stop_token_ids"]}
    for answer in answers:
        tokens = sample.tokens[answer].tolist()
        assert not stops & set(tokens[:-1])
        assert answer is answers[-1] or tokens[-1] in stops
    later = sample.messages[
        [message["role"] for message in sample.messages].index("assistant") :
    ]  # without the opening
    said = [message["content"] for message in later if message["role"] == "user"]
    between = [(one.stop, other.start) for one, other in pairwise(answers)]
    observed = [tokenizer.decode(sample.tokens[start:end].tolist()) for start, end in between]
    assert observed == said[: len(observed)]
    assert ((sample.rewards != 0) <= np.isin(np.arange(len(sample)), [one.stop - 1 for one in answers])).all()
    versions = sample.versions[sample.sampled].tolist()
    assert versions == sorted(versions)
    for version in set(versions):
        logits_TV = weights[version](torch.tensor(sample.tokens[None, :-1]).long()).logits[0]
        tokens_T1 = torch.tensor(sample.tokens[1:, None]).long()
        expected = torch.log_softmax(logits_TV.float() / temperature, -1).gather(-1, tokens_T1).squeeze(-1).numpy()
        own = sample.versions[1:] == version
        np.testing.assert_allclose(sample.logprobs[1:][own], expected[own], rtol=0, atol=1e-4)


def models_of(weights: Mapping[int, Mapping[str, torch.Tensor]], make: Callable[[], Any]) -> dict[int, Any]:
    """A model with each version's weights."""
    models = {}
    for version, tensors in weights.items():
        models[version] = make()
        models[version].load_state_dict(tensors)
    return models
