"""Rows that ranks share, beside the same rows on rank 0 alone. A rank of several; rank 0 writes down how much differs.

torchrun --nproc-per-node 4 tests/distributed/collectives.py '[{"folder": "/tmp/context"}]'
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

import numpy as np
import torch
import torch.distributed as dist
from families import doubled, in_float64
from ranks import SMOOTH
from test_packing import LENGTHS_B, gradients, made, packed, rows
from tiny import byte_tokenizer, new_args
from torch import Tensor, nn
from transformers import PreTrainedModel

from async_rlhf.algorithms.table import find
from async_rlhf.config import OnlineConfig, ParallelConfig
from async_rlhf.distributed.collectives import WHOLE, ContextGroup, Ranks
from async_rlhf.distributed.parallel import Parallel
from async_rlhf.learner.launch import start_ranks
from async_rlhf.learner.learner import Learner
from async_rlhf.learner.strategies.choice import make_parallel
from async_rlhf.models.chats import ChatTemplate
from async_rlhf.models.forward import end_values, response_logprobs, response_values, reward_scores, score_batch
from async_rlhf.models.routing import replay_routes, route_shape
from async_rlhf.run.factory import make_scorer
from async_rlhf.types import Batch, Group, Prompt, Sample, ScoredBatch

KINDS = ["llama", "gpt_neox", "gpt2", "mistral", "mixtral"]
"""The first and the last two have two key heads, the window of mistral is shorter than the rows."""
SIZES = (2, 4)
Numbers = dict[str, Tensor]


def off(ours: Numbers, right: Numbers, together: bool = True) -> float:
    """The largest difference, relative to the largest number of all ``together``, or of each tensor by itself."""
    assert ours.keys() == right.keys()
    sizes = {name: float(tensor.abs().max()) for name, tensor in right.items()}
    largest = max(sizes.values())
    least = {name: largest if together else max(size, 1e-2) for name, size in sizes.items()}
    return max(float((ours[name] - tensor).abs().max()) / least[name] for name, tensor in right.items())


def passes(kind: str) -> Iterator[tuple[str, PreTrainedModel, Callable[[ContextGroup], Tensor]]]:
    """Each pass of a model of this kind: what it is called, the model, and what computes its numbers."""
    policy, critic, head = doubled(made(kind)), doubled(made(kind, values=True)), nn.Linear(32, 1)
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-1, 1, 32)[None])
    # A row with fewer tokens than ranks, packed rows that the ranks do not divide, and others.
    for part in (slice(3, 4), slice(4), slice(5)):
        lengths_B = LENGTHS_B[part]
        tokens_BT, mask_BT = (x[part, : lengths_B.max()] for x in rows())

        def logprobs(context: ContextGroup, given=(policy, tokens_BT, mask_BT, 0.7, True, head)) -> Tensor:
            output = response_logprobs(*given, context=context)
            return torch.stack([output.logprobs_BT, output.entropies_BT, output.values_BT])

        yield f"log-probabilities of {len(lengths_B)}", policy, logprobs
    yield "values", critic, lambda context: response_values(critic, tokens_BT, mask_BT, context=context)
    if kind == "mixtral":
        replay_routes(policy)
        shape = route_shape(policy.config)
        places = torch.arange(tokens_BT.numel() * shape.layers).view(*tokens_BT.shape, shape.layers, 1)
        routes_BTLE = ((places * 7 // 3 + torch.arange(shape.per_token)) % shape.experts).to(torch.uint8)
        given = (policy, tokens_BT, mask_BT, 0.7)
        yield "routes", policy, lambda c: response_logprobs(*given, context=c, routes_BTLE=routes_BTLE).logprobs_BT
    if kind != KINDS[0]:
        return
    yield "scores", critic, lambda context: reward_scores(critic, tokens_BT, lengths_B, context=context)
    yield "ends", policy, lambda context: end_values(policy, head, tokens_BT, lengths_B, context=context)
    places_BT = torch.arange(30).expand(5, 30) % 11  # a row is several texts
    texts = (critic, tokens_BT, mask_BT * (places_BT > 0), places_BT)
    yield "texts", critic, lambda context: response_values(*texts, context)


def compare_passes(ranks: Ranks, contexts: dict[int, ContextGroup]) -> dict[str, list[float]]:
    """How much numbers and gradients differ."""
    found = {}
    for kind in KINDS:
        for name, model, compute in passes(kind):
            for wanted in (False, True):
                packed(model, wanted)
                if (kind, name, wanted) == ("gpt_neox", "values", True):
                    model.train()
                    model.gradient_checkpointing_enable()
                expected, slopes = numbers_of(model, compute, WHOLE) if ranks.is_main else (None, {})
                for size, context in contexts.items():
                    ours, mine = numbers_of(model, compute, context)
                    for gradient in mine.values():
                        dist.all_reduce(gradient, group=context.group)
                    case = f"{kind}, {name}, {'packed' if wanted else 'padded'}, {size}"
                    if ranks.is_main:
                        found[case] = [off({"": ours}, {"": expected}), off(mine, slopes)]
    return found


def numbers_of(model: PreTrainedModel, compute: Callable[[ContextGroup], Tensor], context: ContextGroup) -> tuple:
    """The numbers, and the gradient of a sum of them in which each counts otherwise, and more than linearly."""
    numbers = compute(context)
    weights = torch.linspace(-1, 1, numbers.numel()).view(numbers.shape)
    return numbers.detach(), gradients(model, (numbers * weights).sum() + numbers.sum().square() / numbers.numel())


LEARNERS = {
    "pairs": {"algorithm": "online_dpo"},
    "values": {"algorithm": "ppo", "max_tokens_per_pass": 150, "annotate_max_tokens": 200, "packing": True},
    "kept products": {"algorithm": "grpo", "samples_per_prompt": 4, "gradient_checkpointing": "selective"},
}
TRIED = [("ddp", 2), ("ddp", 4), ("fsdp", 2), ("fsdp", 4)]


def scored_batch(config: OnlineConfig) -> ScoredBatch:
    """Completions of many lengths, with scores that differ; in the longest rows only the last rank has any of one."""
    random, groups = np.random.default_rng(0), []
    for number in range(config.batch_size):
        long = number % 3 == 0
        prompt = Prompt(number, number, tuple(random.integers(1, 60, 36 if long else 5).tolist()))
        answers = []
        for _ in range(config.samples_per_prompt):
            length = int(random.integers(1, 4) if long else random.integers(3, 30))
            tokens, logprobs = random.integers(1, 60, length), -random.random(length)
            answers.append(Sample.answer(prompt.tokens, tokens, logprobs, [0] * length, "length"))
        groups.append(Group(prompt, tuple(answers)))
    scores_PK = torch.from_numpy(random.random((config.batch_size, config.samples_per_prompt))).float()
    return ScoredBatch(Batch(1, 0, tuple(groups), 0.0), scores_PK, {})


def weights_of(learner: Learner) -> Numbers:
    """All of them, whole."""
    parallel, named = learner.parallel, dict(learner.model.named_parameters())
    with parallel.gathered(list(named.values())):
        return {name: parallel.whole(parameter.detach()).clone() for name, parameter in named.items()}


def learn(
    name: str, config: OnlineConfig, parallel: Parallel, ranks: Ranks
) -> tuple[Numbers, Numbers, dict[str, float]]:
    """What is known of the rows before the update, how the weights move in it, and its metrics; on rank 0."""
    algorithm, policy = find(name), made("llama")
    value = made("llama", values=True) if algorithm.needs(config).values else None
    learner = Learner(policy, made("llama"), algorithm, config, value, parallel)
    before = weights_of(learner)
    scored = scored_batch(config) if ranks.is_main else ScoredBatch(Batch(1, 0, (), 0.0), torch.zeros(0, 0), {})
    experience, metrics = learner.annotate(scored)
    metrics |= learner.update(experience, 1)
    moved = {name: tensor - before[name] for name, tensor in weights_of(learner).items()}
    known = experience.tensors() if ranks.is_main else {}
    return {name: tensor for name, tensor in known.items() if tensor.is_floating_point()}, moved, metrics


def compare_learners(folder: Path, ranks: Ranks) -> dict[str, list[float]]:
    """How much log-probabilities and values, the weights' moves and the metrics differ from one rank's."""
    found = {}
    for name, changes in LEARNERS.items():
        # So large a step that what the weights' own rounding takes from it is little.
        smooth = {**SMOOTH, "learning_rate": 0.4, "max_grad_norm": 0.0}
        same = {**smooth, "num_mini_batches": 1, "total_episodes": 96, "device": "cpu"}
        alone = new_args(folder, **same, **changes, gradient_accumulation_steps=4, parallel=ParallelConfig(ranks=1))
        right = learn(changes["algorithm"], alone, Parallel(), Ranks()) if ranks.is_main else None
        for strategy, size in TRIED:
            shared = ParallelConfig(strategy, context_parallel=size)
            config = new_args(folder, **same, **changes, parallel=shared)
            ours = learn(changes["algorithm"], config, make_parallel(config, ranks), ranks)
            if ranks.is_main:
                metrics = ({key: torch.tensor(x) for key, x in each[2].items()} for each in (ours, right))
                differences = [off(ours[0], right[0], False), off(ours[1], right[1]), off(*metrics, False)]
                found[f"{name}, {strategy}, {size}"] = differences
    return found


def compare_scores(folder: Path, ranks: Ranks) -> dict[str, list[float]]:
    """How much a reward model's scores differ from one rank's, and which part of a pass rank 0 computes. Four ranks
    cannot share the last model's heads.
    """
    rows = [tuple(range(1, length)) for length in (37, 30, 23, 16, 9, 2)]
    batches, found = [rows[:2], rows[2:4], rows[4:]], {}
    alone = torch.cat([score_batch(made("llama", values=True), batch) for batch in batches])
    for strategy, size, packing, heads in (("ddp", 2, False, 4), ("fsdp", 4, True, 4), ("ddp", 4, False, 2)):
        shared = ParallelConfig(strategy, context_parallel=size)
        config = new_args(folder, device="cpu", packing=packing, parallel=shared, total_episodes=96)
        model, seen = made("llama", values=True), []
        model.config.num_attention_heads = heads
        scorer = make_scorer(config, ChatTemplate(byte_tokenizer()), model, (), "query", make_parallel(config, ranks))
        model.base_model.register_forward_pre_hook(
            lambda *given, seen=seen: seen.append(given[-1]["input_ids"].numel()), with_kwargs=True
        )
        scores = scorer.score_batches(batches)
        if ranks.is_main:
            found[f"{strategy}, {size}, {heads}"] = [off({"": torch.cat(scores)}, {"": alone}), max(seen)]
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    (options,) = json.loads(sys.argv[1])
    folder = Path(options["folder"])
    ranks = start_ranks(new_args(folder, device="cpu", total_episodes=96))
    contexts = {size: ContextGroup.of(ranks, size, 60.0) for size in SIZES}
    with in_float64():
        found = {"passes": compare_passes(ranks, contexts), "learners": compare_learners(folder, ranks)}
        found["scores"] = compare_scores(folder, ranks)
    if ranks.is_main:
        (folder / "found.json").write_text(json.dumps(found))
