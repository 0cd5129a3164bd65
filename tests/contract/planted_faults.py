"""Faults of an engine, one planted at a time, and in how many batches the learner's checks find each.

    python tests/contract/planted_faults.py        # prints the table of benchmarks/RESULTS.md

The engine, the requests, the snapshots and the checks are the real ones; only the process boundary is left out. Weights
move a little after every batch, as a small learning rate moves them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPTNeoXForCausalLM

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny import Drawn, all_drawn, answered, tiny_config

from async_rlhf import OnlineDPOConfig
from async_rlhf.config import GenerationConfig
from async_rlhf.generation import transformers_engine as engine_module
from async_rlhf.generation.audit import Agreement
from async_rlhf.generation.dispatch import Worker
from async_rlhf.generation.engines import ModelSpec
from async_rlhf.generation.protocol import Completions, GeneratorError, Request, SamplingParams
from async_rlhf.generation.remote import RemoteGenerator
from async_rlhf.generation.sampling import draw_tokens, row_uniforms
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.generation.worker import RequestHandler, build_handler
from async_rlhf.models.publish import SnapshotRing
from async_rlhf.models.weights import named_weights
from async_rlhf.system.trace import Trace
from async_rlhf.types import Batch, Prompt

PROMPTS, SAMPLES, COMPARED, LENGTH = 16, 4, 8, 16
STOPS = (256, 13, 10)
COMMON = 72
"""A token that this model draws often."""
PARAMS = SamplingParams(SAMPLES, 0.7, LENGTH, STOPS, seed=0)


def peaked_policy() -> GPTNeoXForCausalLM:
    """A random model whose next token has 2 nats of entropy, as those of trained ones."""
    torch.manual_seed(0)
    model = GPTNeoXForCausalLM(tiny_config())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
        model.get_output_embeddings().weight.mul_(6)
    return model.eval()


def prompts_of(batch: int) -> list[Prompt]:
    draws = range((batch - 1) * PROMPTS, batch * PROMPTS)
    return [Prompt(d, d, tuple((7 * d + j * j) % 250 for j in range(3 + d % 6))) for d in draws]


class HereWorker(Worker):
    """A worker in this process, which answers when it is looked at."""

    handler: RequestHandler

    def submit(self, request: Request) -> None:
        self.open.append(request)

    def close(self) -> None:
        pass


class HereGenerator(RemoteGenerator):
    """All of a remote generator but the process."""

    def __init__(self, policy: GPTNeoXForCausalLM, counter_based: bool, steps: int = 1) -> None:
        compared = GenerationConfig(mismatch_samples=COMPARED, mismatch_steps=steps, probe_steps=0)
        config = OnlineDPOConfig(staleness=0, generation=compared)
        super().__init__(config, policy, PARAMS, Trace())
        if not counter_based:  # as of vLLM, whose random numbers are its own
            config = replace(self.config, engine="vllm")
            self.agreement = Agreement(config, PARAMS, torch.float32, None, staleness=0)

    def prepare(self, config, policy):
        ring = SnapshotRing.for_model(policy, torch.float32, 1)
        spec = ModelSpec(type(policy), policy.config, torch.float32, "cpu")
        self.handler = build_handler(spec, PARAMS, ring, heartbeat=lambda: None)
        return ring, 1

    def make(self, number):
        worker = HereWorker(number, "generator 0", self.arrived)
        worker.handler, worker.has_begun = self.handler, True
        return worker

    def _receive(self, seconds: float) -> bool:
        worker = self.workers[0]
        self._on_reply(worker, worker.handler.answer(worker.open[0]))
        return super()._receive(seconds)

    def sample(self, batch: int) -> Batch:
        self.submit(batch, batch - 1, prompts_of(batch))
        return self.collect(batch)


def batches_until_found(
    fault: Fault, counter_based: bool, most: int, steps: int = 1, later: int = 0
) -> tuple[int | None, str]:
    """How many batches with the fault are sampled until one is refused, and why it is; None if none is.

    Args:
        fault: to plant.
        counter_based: whether the random numbers are known, as those of transformers' engine.
        most: batches to sample at most.
        steps: batches between two comparisons.
        later: so many batches are sampled before the fault's own.
    """
    policy, generator = peaked_policy(), torch.Generator().manual_seed(0)
    fault = replace(fault, since=fault.since + later)
    with closing(HereGenerator(policy, counter_based, steps)) as here, pytest.MonkeyPatch.context() as patch:
        for batch in range(1, most + fault.since):
            here.publish(policy, batch - 1)
            if batch == fault.since:
                fault.plant(patch, here.handler.engine)
            try:
                here.sample(batch)
            except (GeneratorError, FloatingPointError) as error:
                return batch - fault.since + 1, str(error)
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.add_(6e-6 * torch.randn(parameter.shape, generator=generator))
    return None, ""


@dataclass(frozen=True)
class Fault:
    """A fault, and in how many batches it is found at the latest: on transformers' engine, and on any other.

    None for one that does no harm: the samples are right, or right to rounding.
    """

    name: str
    what: str
    plant: Callable[[pytest.MonkeyPatch, TransformersEngine], None]
    within: int | None
    within_any: int | None
    found: str = ""
    """What the error says."""
    since: int = 1


FAULTS: list[Fault] = []


def fault(
    what: str, within: int | None, within_any: int | None, found: str = "", since: int = 1
) -> Callable[[Any], Any]:
    def note(plant: Any) -> Any:
        FAULTS.append(Fault(plant.__name__, what, plant, within, within_any, found, since))
        return plant

    return note


# The distribution


def drawn_by(patch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor], reported: bool) -> None:
    """Have tokens drawn from changed logits; ``reported`` says whether their log-probabilities are of these too."""

    def draw(logits_BV: Tensor, uniforms_B: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        tokens_B, logprobs_B = draw_tokens(change(logits_BV.clone()), uniforms_B, temperature)
        if not reported:
            scaled_BV = torch.log_softmax(logits_BV / temperature, dim=-1)
            logprobs_B = scaled_BV.gather(-1, tokens_B[:, None]).squeeze(-1)
        return tokens_B, logprobs_B

    patch.setattr(engine_module, "draw_tokens", draw)


def without(logits_BV: Tensor, tokens: Sequence[int]) -> Tensor:
    logits_BV[:, list(tokens)] = -1e9
    return logits_BV


def only_likely(logits_BV: Tensor, k: int) -> Tensor:
    least_B1 = logits_BV.topk(k).values[:, -1:]
    return logits_BV.masked_fill(logits_BV < least_B1, -1e9)


def nucleus(logits_BV: Tensor) -> Tensor:
    ordered_BV, index_BV = (logits_BV / PARAMS.temperature).softmax(-1).sort(descending=True)
    cut_BV = ordered_BV.cumsum(-1) - ordered_BV > 0.95
    return logits_BV.masked_fill(torch.zeros_like(cut_BV).scatter(-1, index_BV, cut_BV), -1e9)


@fault("temperature x 1.2, log-probabilities of that distribution", 1, 1, "other log-probabilities")
def hotter(patch, engine):
    drawn_by(patch, lambda x: x / 1.2, reported=True)


@fault("temperature x 1.2, log-probabilities as they should be", 1, 15, "draws other tokens|not distributed")
def hotter_in_secret(patch, engine):
    drawn_by(patch, lambda x: x / 1.2, reported=False)


@fault("temperature / 1.05, log-probabilities as they should be", 1, 400, "draws other tokens|not distributed")
def a_little_colder_in_secret(patch, engine):
    drawn_by(patch, lambda x: x * 1.05, reported=False)


@fault("greedy", 1, 2, "draws other tokens|not distributed")
def greedy(patch, engine):
    drawn_by(patch, lambda x: only_likely(x, 1), reported=False)


@fault("top-k 5, log-probabilities of the cut distribution", 1, 1, "other log-probabilities")
def top_5(patch, engine):
    drawn_by(patch, lambda x: only_likely(x, 5), reported=True)


@fault("top-k 5, log-probabilities as they should be", 1, 6, "draws other tokens|not distributed")
def top_5_in_secret(patch, engine):
    drawn_by(patch, lambda x: only_likely(x, 5), reported=False)


@fault("top-p 0.95, log-probabilities as they should be", 1, 60, "draws other tokens|not distributed")
def top_p_in_secret(patch, engine):
    drawn_by(patch, nucleus, reported=False)


@fault("one common token banned, log-probabilities of what is left", 1, 2, "other log-probabilities")
def one_token_banned(patch, engine):
    drawn_by(patch, lambda x: without(x, [COMMON]), reported=True)


@fault("one common token banned, log-probabilities as they should be", 1, 100, "draws other tokens|not distributed")
def one_token_banned_in_secret(patch, engine):
    drawn_by(patch, lambda x: without(x, [COMMON]), reported=False)


@fault("stop tokens never drawn, log-probabilities of what is left", 1, 2, "other log-probabilities")
def no_ends(patch, engine):
    drawn_by(patch, lambda x: without(x, STOPS), reported=True)


@fault("stop tokens never drawn, log-probabilities as they should be", 1, 60, "draws other tokens|not distributed")
def no_ends_in_secret(patch, engine):
    drawn_by(patch, lambda x: without(x, STOPS), reported=False)


@fault("stop tokens made likelier by 1 nat in secret", 1, 900, "draws other tokens|not distributed")
def early_ends_in_secret(patch, engine):
    def change(logits_BV):
        logits_BV[:, list(STOPS)] += PARAMS.temperature
        return logits_BV

    drawn_by(patch, change, reported=False)


def greedy_where(patch: pytest.MonkeyPatch, engine: TransformersEngine, samples: range) -> None:
    """Some samples of the prompt in place 6 are greedy, with the log-probabilities that they should have."""
    greedily = []

    def draw(logits_BV, uniforms_B, temperature):
        tokens_B, logprobs_B = draw_tokens(logits_BV, uniforms_B, temperature)
        if greedily:
            tokens_B = logits_BV.argmax(dim=-1)
            logprobs_B = torch.log_softmax(logits_BV / temperature, dim=-1).gather(-1, tokens_B[:, None]).squeeze(-1)
        return tokens_B, logprobs_B

    generate = engine.generate

    def change(prompts, progress=None):
        groups = all_drawn(generate(prompts))
        greedily.append(True)
        (other,) = all_drawn(generate(prompts[6:7]))
        greedily.clear()
        groups[6] = tuple(other[k] if k in samples else one for k, one in enumerate(groups[6]))
        return answered(prompts, groups)

    patch.setattr(engine_module, "draw_tokens", draw)
    patch.setattr(engine, "generate", change)


@fault("greedy for one prompt of 16", 4, 16, "draws other tokens|not distributed")
def one_greedy_prompt(patch, engine):
    greedy_where(patch, engine, range(SAMPLES))


@fault("greedy for one completion of 64", 30, 150, "draws other tokens|not distributed")
def one_greedy_row(patch, engine):
    greedy_where(patch, engine, range(1, 2))


@fault("greedy for the first token of each completion", 1, 12, "draws other tokens|not distributed")
def greedy_at_first(patch, engine):
    first, generate = [], engine.generate

    def begin(prompts, progress=None):
        first.append(True)
        return generate(prompts)

    def draw(logits_BV, uniforms_B, temperature):
        chosen_BV = only_likely(logits_BV, 1) if first else logits_BV
        first.clear()
        tokens_B, _ = draw_tokens(chosen_BV, uniforms_B, temperature)
        logprobs_BV = torch.log_softmax(logits_BV / temperature, dim=-1)
        return tokens_B, logprobs_BV.gather(-1, tokens_B[:, None]).squeeze(-1)

    patch.setattr(engine, "generate", begin)
    patch.setattr(engine_module, "draw_tokens", draw)


@fault("computes in bfloat16 though float32 was asked for", 1, 1, "other log-probabilities")
def low_precision(patch, engine):
    drawn_by(patch, lambda x: x.bfloat16().float(), reported=True)


# The random numbers


def numbers_by(patch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    patch.setattr(engine_module, "row_uniforms", lambda *arguments: change(row_uniforms(*arguments)))


@fault("equal random numbers for the K samples of a prompt", 1, 1, "draws other tokens|not distributed")
def equal_samples(patch, engine):
    numbers_by(patch, lambda u: u[:, :1].repeat(u.shape[1], axis=1))


@fault("one random number for all tokens of a completion", 1, 10, "draws other tokens|not distributed")
def equal_positions(patch, engine):
    numbers_by(patch, lambda u: u[:, :, :1].repeat(u.shape[2], axis=2))


@fault("random numbers of 3 bits", 1, 10, "draws other tokens|not distributed")
def coarse_numbers(patch, engine):
    numbers_by(patch, lambda u: (u * 8).astype(int) / 8)


@fault("random numbers from 0 to 0.98", 1, 600, "draws other tokens|not distributed")
def short_numbers(patch, engine):
    numbers_by(patch, lambda u: u * 0.98)


@fault("random numbers of the next position", 1, None, "draws other tokens")
def shifted_positions(patch, engine):
    numbers_by(patch, lambda u: u[:, :, [*range(1, u.shape[2]), 0]])


@fault("random numbers of another seed", 1, None, "draws other tokens")
def another_seed(patch, engine):
    patch.setattr(engine_module, "row_uniforms", lambda seed, *rest: row_uniforms(seed + 1, *rest))


@fault("the same random numbers in every batch", 2, 16, "draws other tokens|not distributed")
def equal_batches(patch, engine):
    def of_the_first(seed, prompts, *rest):
        return row_uniforms(seed, [replace(prompt, draw=prompt.draw % PROMPTS) for prompt in prompts], *rest)

    patch.setattr(engine_module, "row_uniforms", of_the_first)


# The answer


Change = Callable[[list[tuple[Drawn, ...]], Sequence[Prompt]], list[tuple[Drawn, ...]]]


def answered_by(patch: pytest.MonkeyPatch, engine: TransformersEngine, change: Change) -> None:
    """Have what was drawn changed, as if the prompts had been answered so."""
    generate = engine.generate

    def generate_and_change(prompts: Sequence[Prompt], progress: object = None) -> Completions:
        changed = change(all_drawn(generate(prompts)), prompts)
        return answered((*prompts, prompts[0])[: len(changed)], changed)

    patch.setattr(engine, "generate", generate_and_change)


def each(change: Callable[[Drawn, int], Drawn]) -> Change:
    """Every completion changed: by itself and its number k."""
    return lambda completions, prompts: [tuple(change(r, k) for k, r in enumerate(group)) for group in completions]


def cut(one: Drawn, length: int, **changes: Any) -> Drawn:
    names = ("tokens", "logprobs", "versions")
    return one._replace(**{name: getattr(one, name)[:length] for name in names}, **changes)


@fault("one completion is the same in every batch", 8, 8, "other log-probabilities", since=2)
def one_fixed_row(patch, engine):
    kept = []

    def change(completions, prompts):
        kept.append(completions[3][1])
        fixed = kept[0]._replace(versions=completions[3][1].versions[:1] * len(kept[0].tokens))
        return [*completions[:3], (completions[3][0], fixed, *completions[3][2:]), *completions[4:]]

    answered_by(patch, engine, change)


@fault("one prompt is sampled twice, another not at all", 3, 3, "other log-probabilities")
def duplicated_prompt(patch, engine):
    generate = engine.generate

    def change(prompts, progress=None):
        twice = [prompts[0], replace(prompts[0], draw=prompts[1].draw), *prompts[2:]]
        return answered(prompts, all_drawn(generate(twice)))

    patch.setattr(engine, "generate", change)


@fault("K - 1 completions of a prompt", 1, 1, "with 3 completions of the prompt of draw 5; samples_per_prompt is 4")
def too_few_samples(patch, engine):
    answered_by(patch, engine, lambda groups, _: [g[:-1] if i == 5 else g for i, g in enumerate(groups)])


@fault("K + 1 completions of a prompt", 1, 1, "with 5 completions of the prompt of draw 5; samples_per_prompt is 4")
def too_many_samples(patch, engine):
    answered_by(patch, engine, lambda groups, _: [(*g, g[0]) if i == 5 else g for i, g in enumerate(groups)])


@fault("a prompt is left out", 1, 1, "with completions of 15 prompts; 16 were asked for")
def too_few_prompts(patch, engine):
    answered_by(patch, engine, lambda groups, _: groups[:-1])


@fault("one more prompt than was asked for", 1, 1, "with completions of 17 prompts; 16 were asked for")
def too_many_prompts(patch, engine):
    answered_by(patch, engine, lambda groups, _: [*groups, groups[0]])


@fault("the first of K completions K times, of every prompt", 1, 1, "draws other tokens|not distributed")
def equal_copies(patch, engine):
    answered_by(patch, engine, lambda groups, _: [g[:1] * len(g) for g in groups])


@fault("the first of K completions twice, of one prompt", 4, 4, "draws other tokens|not distributed")
def one_copy(patch, engine):
    answered_by(patch, engine, lambda groups, _: [*groups[:4], (*groups[4][:1] * 2, *groups[4][2:]), *groups[5:]])


@fault("two completions of a prompt change places", 1, None, "draws other tokens")
def swapped_samples(patch, engine):
    answered_by(patch, engine, lambda groups, _: [(g[1], g[0], *g[2:]) for g in groups])


@fault("the completions of two prompts change places", 3, 3, "other log-probabilities")
def swapped_prompts(patch, engine):
    answered_by(patch, engine, lambda groups, _: [groups[1], groups[0], *groups[2:]])


@fault("the completions in reverse order", 1, 1, "other log-probabilities")
def reversed_prompts(patch, engine):
    answered_by(patch, engine, lambda groups, _: groups[::-1])


@fault("sample k = 1 of every prompt comes from another prompt", 1, 1, "other log-probabilities")
def other_prompts_sample(patch, engine):
    answered_by(patch, engine, lambda groups, _: [(g[0], groups[i - 1][1], *g[2:]) for i, g in enumerate(groups)])


@fault("the completions of the batch before", 1, 1, "other log-probabilities", since=2)
def answers_of_before(patch, engine):
    before = all_drawn(engine.generate(prompts_of(1)))

    def change(completions, prompts):
        version = engine.version
        return [tuple(r._replace(versions=(version,) * len(r.tokens)) for r in group) for group in before]

    answered_by(patch, engine, change)


@fault("the engine is given other prompts than it says", 1, 1, "other prompts than it was asked for")
def other_request(patch, engine):
    from async_rlhf.generation import worker

    fingerprint = worker.fingerprint
    patch.setattr(worker, "fingerprint", lambda prompts: fingerprint(prompts[::-1]))


@fault("the answer begins with another prompt", 1, 1, "the prompt is .* it must be as asked")
def other_prompt_repeated(patch, engine):
    generate = engine.generate
    patch.setattr(
        engine, "generate", lambda prompts, progress=None: answered(prompts[::-1], all_drawn(generate(prompts)))
    )


@fault("a drawn token is not marked as drawn", 1, 1, "the tokens marked as sampled are not those behind the prompt")
def token_not_marked(patch, engine):
    generate = engine.generate

    def change(prompts, progress=None):
        completions = generate(prompts)
        completions[2][1].sampled[-1] = False
        return completions

    patch.setattr(engine, "generate", change)


# Their ends


@fault("the stop token is cut off", 1, 1, "finish_reason is 'stop' and the last token")
def stop_token_cut_off(patch, engine):
    def change(one, k):
        return cut(one, len(one.tokens) - 1) if one.finish_reason == "stop" and len(one.tokens) > 1 else one

    answered_by(patch, engine, each(change))


@fault('every completion says "stop"', 1, 1, "finish_reason is 'stop' and the last token")
def all_stop(patch, engine):
    answered_by(patch, engine, each(lambda r, k: r._replace(finish_reason="stop")))


@fault('every completion says "length"', 1, 1, "finish_reason is 'length'")
def all_length(patch, engine):
    answered_by(patch, engine, each(lambda r, k: r._replace(finish_reason="length")))


@fault('cut at 3 tokens, "length"', 1, 1, "finish_reason is 'length' after 3 tokens; response_length is 16")
def cut_at_3(patch, engine):
    answered_by(patch, engine, each(lambda r, k: cut(r, 3, finish_reason="length") if len(r.tokens) > 3 else r))


@fault('cut at 3 tokens, "stop"', 1, 1, "finish_reason is 'stop' and the last token")
def stopped_at_3(patch, engine):
    answered_by(patch, engine, each(lambda r, k: cut(r, 3, finish_reason="stop") if len(r.tokens) > 3 else r))


@fault("goes on after the stop token", 1, 1, "is the stop token .* follow it")
def stop_token_ignored(patch, engine):
    patch.setattr(engine, "params", replace(engine.params, stop_token_ids=()))


@fault("5 tokens longer than allowed", 1, 1, "the number of tokens is 21; it must be from 1 to response_length, 16")
def too_long(patch, engine):
    patch.setattr(engine, "params", replace(engine.params, response_length=LENGTH + 5))


@fault("an empty completion", 1, 1, "the number of tokens is 0")
def empty(patch, engine):
    answered_by(patch, engine, each(lambda r, k: cut(r, 0) if k == 2 else r))


@fault(
    "an end put in the place of the fifth token, as if it had been drawn", 1, 12, "draws other tokens|not distributed"
)
def planted_end(patch, engine):
    steps = []

    def draw(logits_BV, uniforms_B, temperature):
        tokens_B, logprobs_B = draw_tokens(logits_BV, uniforms_B, temperature)
        steps.append(len(tokens_B))
        if len(tokens_B) == PROMPTS * SAMPLES:
            steps[:] = steps[-1:]
        if len(steps) == 5:
            tokens_B = torch.full_like(tokens_B, STOPS[0])
            logprobs_B = torch.log_softmax(logits_BV / temperature, dim=-1)[:, STOPS[0]]
        return tokens_B, logprobs_B

    patch.setattr(engine_module, "draw_tokens", draw)


# Its numbers


@fault("log-probabilities of samples k = 1 are off by 1 nat", 1, 1, "other log-probabilities")
def off_by_a_nat(patch, engine):
    answered_by(
        patch, engine, each(lambda r, k: r._replace(logprobs=tuple(x - 1 for x in r.logprobs)) if k == 1 else r)
    )


@fault("log-probabilities of one completion are off by 1 nat", 8, 8, "other log-probabilities")
def one_off_by_a_nat(patch, engine):
    def change(completions, prompts):
        wrong = completions[7][2]._replace(logprobs=tuple(x - 1 for x in completions[7][2].logprobs))
        return [*completions[:7], (*completions[7][:2], wrong, completions[7][3]), *completions[8:]]

    answered_by(patch, engine, change)


@fault("one log-probability of 64 completions is off by 0.01", 8, 8, "other log-probabilities", since=20)
def one_token_off(patch, engine):
    def change(completions, prompts):
        one = completions[9][2]
        wrong = one._replace(logprobs=(one.logprobs[0] - 0.01, *one.logprobs[1:]))
        return [*completions[:9], (*completions[9][:2], wrong, completions[9][3]), *completions[10:]]

    answered_by(patch, engine, change)


@fault("NaN for a log-probability of sample k = 1", 1, 1, "a log-probability is nan")
def not_a_number(patch, engine):
    answered_by(patch, engine, each(lambda r, k: r._replace(logprobs=(float("nan"), *r.logprobs[1:])) if k == 1 else r))


@fault("a log-probability above 0", 1, 1, "a log-probability is 0.5")
def positive(patch, engine):
    answered_by(patch, engine, each(lambda r, k: r._replace(logprobs=(0.5, *r.logprobs[1:])) if k == 1 else r))


@fault("all log-probabilities are 0", 1, 1, "other log-probabilities")
def zero(patch, engine):
    answered_by(patch, engine, each(lambda r, k: r._replace(logprobs=(0.0,) * len(r.logprobs))))


@fault("log-probabilities of temperature 1", 1, 1, "other log-probabilities")
def unscaled(patch, engine):
    def draw(logits_BV, uniforms_B, temperature):
        tokens_B, _ = draw_tokens(logits_BV, uniforms_B, temperature)
        return tokens_B, torch.log_softmax(logits_BV, dim=-1).gather(-1, tokens_B[:, None]).squeeze(-1)

    patch.setattr(engine_module, "draw_tokens", draw)


@fault("one log-probability too few", 1, 1, "tokens, .* log-probabilities and .* versions")
def one_logprob_too_few(patch, engine):
    answered_by(patch, engine, each(lambda r, k: r._replace(logprobs=r.logprobs[:-1])))


@fault("a token beyond the vocabulary", 1, 1, "a token is 258; it must be from 0 to 257")
def no_such_token(patch, engine):
    answered_by(patch, engine, each(lambda r, k: r._replace(tokens=(258, *r.tokens[1:])) if k == 3 else r))


@fault("a negative token", 1, 1, "a token is -1; it must be from 0 to 257")
def negative_token(patch, engine):
    answered_by(patch, engine, each(lambda r, k: r._replace(tokens=(-1, *r.tokens[1:])) if k == 3 else r))


# Its weights and what is computed with them


def loaded_by(
    patch: pytest.MonkeyPatch, engine: TransformersEngine, change: Callable[[dict[str, Tensor]], None]
) -> None:
    """Have the weights change after each load, behind the digests."""
    load = engine.load

    def load_and_change(tensors, version):
        found = load(tensors, version)
        with torch.no_grad():
            change(dict(named_weights(engine.model)))
        return found

    patch.setattr(engine, "load", load_and_change)


def flip(bit: int) -> Callable[[dict[str, Tensor]], None]:
    """One bit of one weight, after each load."""

    def change(held):
        held["gpt_neox.layers.0.mlp.dense_h_to_4h.weight"].view(torch.int32)[3, 5] ^= -(2**31) if bit == 31 else 2**bit

    return change


@fault("weights one batch old, behind the digests", 1, 1, "other log-probabilities .* noise of this run", since=2)
def stale_weights(patch, engine):
    old = {name: tensor.clone() for name, tensor in named_weights(engine.model).items()}

    def change(held):
        now = {name: tensor.clone() for name, tensor in held.items()}
        for name, tensor in held.items():
            tensor.copy_(old[name])
        old.update(now)

    loaded_by(patch, engine, change)


@fault("one layer's weights one batch old, behind the digests", 1, 1, "other log-probabilities", since=2)
def stale_layer(patch, engine):
    old = {name: tensor.clone() for name, tensor in named_weights(engine.model).items() if "layers.1" in name}

    def change(held):
        for name, tensor in old.items():
            now = held[name].clone()
            held[name].copy_(tensor)
            tensor.copy_(now)

    loaded_by(patch, engine, change)


@fault("keys and values of the prompt from weights one batch old", 1, 1, "other log-probabilities", since=2)
def stale_cache(patch, engine):
    held, old = named_weights(engine.model), {}
    load, prefill = engine.load, engine.prefill

    def load_and_keep(tensors, version):
        old.update({name: tensor.clone() for name, tensor in held.items()})
        return load(tensors, version)

    def prefill_with_old(*arguments):
        now = {name: tensor.clone() for name, tensor in held.items()}
        for weights in (old, now):
            for name, tensor in held.items():
                tensor.copy_(weights[name])
            if weights is old:
                _, cache = prefill(*arguments)
        logits_BV, _ = prefill(*arguments)
        return logits_BV, cache

    patch.setattr(engine, "load", load_and_keep)
    patch.setattr(engine, "prefill", prefill_with_old)


@fault("a weight's sign flipped behind the digests", 1, 1, "other log-probabilities", since=2)
def sign_bit(patch, engine):
    loaded_by(patch, engine, flip(31))


@fault("the highest bit of a weight's exponent flipped", 1, 1, "log-probabilities|not finite", since=2)
def exponent_bit(patch, engine):
    loaded_by(patch, engine, flip(30))


@fault("the lowest bit of a weight's exponent flipped", 1, 1, "other log-probabilities", since=2)
def low_exponent_bit(patch, engine):
    loaded_by(patch, engine, flip(23))


@fault("the lowest bit of a weight's mantissa flipped", None, None, since=2)
def mantissa_bit(patch, engine):
    loaded_by(patch, engine, flip(0))


@fault("two layers change places", 1, 1, "weights that are not those of version 1: 24 of 28 tensors", since=2)
def swapped_layers(patch, engine):
    layers = engine.model.gpt_neox.layers
    engine.model.gpt_neox.layers = torch.nn.ModuleList(layers[::-1])
    load = engine.load
    patch.setattr(engine, "load", lambda tensors, version: load(_swapped(tensors), version))


def _swapped(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    other = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}
    names = {name: next((name.replace(a, b) for a, b in other.items() if a in name), name) for name in tensors}
    return {names[name]: tensor for name, tensor in tensors.items()}


@fault("padding beside a prompt is not masked", 1, 1, "other log-probabilities")
def padding_seen(patch, engine):
    forward = engine._forward
    patch.setattr(
        engine,
        "_forward",
        lambda tokens, mask, *rest, **options: forward(tokens, torch.ones_like(mask), *rest, **options),
    )


@fault("positions are stretched", 1, 1, "other log-probabilities")
def positions_stretched(patch, engine):
    forward = engine._forward

    def stretched(tokens_BT, mask_BT, positions_BT, cache, **options):
        return forward(tokens_BT, mask_BT, positions_BT * 3 // 2, cache, **options)

    patch.setattr(engine, "_forward", stretched)


@fault("the first token of every prompt is dropped", 1, 1, "other log-probabilities")
def prompt_cut(patch, engine):
    generate = engine.generate

    def change(prompts, progress=None):
        shorter = [replace(prompt, tokens=prompt.tokens[1:]) for prompt in prompts]
        return answered(prompts, all_drawn(generate(shorter)))

    patch.setattr(engine, "generate", change)


@fault("dropout left on", 1, 1, "other log-probabilities")
def dropout(patch, engine):
    forward = engine._forward
    patch.setattr(
        engine, "_forward", lambda *inputs, **options: torch.nn.functional.dropout(forward(*inputs, **options), 0.01)
    )


def main() -> None:
    torch.set_num_threads(1)
    print("| fault | transformers' engine | any engine |\n|---|---|---|")
    for planted in FAULTS:
        found = [batches_until_found(planted, counter_based, 1000)[0] for counter_based in (True, False)]
        print(f"| {planted.what} | {found[0] or 'never'} | {found[1] or 'never'} |", flush=True)


if __name__ == "__main__":
    main()
