"""Mistakes that only show on a GPU, planted one at a time: the runs and the budgets of this folder find each."""

from __future__ import annotations

import pytest
from simulated_runs import Fault, Published, publish, publish_float32, train, with_fault
from test_budgets import (
    decode_twice,
    require_decoding,
    require_publishing,
    require_update,
    update_in_chunks,
    update_twice,
)

DEVICES = r"Expected all tensors to be on the same device"
INDEX = r"indices should be either on cpu or on the same device"
GRPO = {"algorithm": "grpo", "samples_per_prompt": 4}
WORKER = {"generation": {"placement": "process"}}


def refused(place: str, right: str, wrong: str, options: dict[str, object] = GRPO, said: str = DEVICES):
    """A fault, the run that meets it, and what that must end with."""
    return Fault(place, right, wrong), options, said


REFUSED = {
    "tokens of the learner left on the host": refused(
        "learner.reference:Reference.logprobs", "device=device,\n", "device=None,\n"
    ),
    "micro-batch left on the host": refused(
        "learner.learner:Learner._backward", "in_one_copy(of_loss.tensors(), device)", "of_loss.tensors()"
    ),
    "tokens of the reward model left on the host": refused(
        "models.forward:score_batch", "context=context, device=device", "context=context"
    ),
    "prompts left on the host": refused(
        "generation.transformers_engine:TransformersEngine.prefill",
        "tokens_PT.to(device), mask_PT.to(device)",
        "tokens_PT, mask_PT.to(device)",
    ),
    "mask of the prompts left on the host": refused(
        "generation.transformers_engine:TransformersEngine.prefill",
        "tokens_PT.to(device), mask_PT.to(device)",
        "tokens_PT.to(device), mask_PT",
    ),
    "random numbers left on the host": refused(
        "generation.transformers_engine:Decoding._begin", ".reshape(count, -1).to(device)", ".reshape(count, -1)"
    ),
    "stop tokens left on the host": refused(
        "generation.transformers_engine:Decoding.__init__",
        "torch.tensor(self.params.stop_token_ids, device=device)",
        "torch.tensor(self.params.stop_token_ids)",
    ),
    "completions compared on the host": refused(
        "generation.audit:Agreement.compare", 'batch["tokens_BT"].to(device)', 'batch["tokens_BT"]', said=INDEX
    ),
    "the reward model is not moved": refused(
        "models.loading:reward_model_for",
        "check_reward_model(model).to(device)",
        "check_reward_model(model)",
        said=r"is on the wrong device",
    ),
    "the value head is not moved": refused(
        "run.inputs:_value",
        "new_value_head(policy, value_model).to(device)",
        "new_value_head(policy, value_model)",
        {"algorithm": "ppo", "shared_trunk": True},
    ),
    "numpy of a tensor of the device": refused(
        "generation.transformers_engine:Decoding._deliver",
        "self._tokens_RT[places_B, :longest].cpu().numpy()",
        "self._tokens_RT[places_B, :longest].numpy()",
        said=r"can't convert cuda:0 device type tensor to numpy",
    ),
    "rows of the host chosen by an index of the device": refused(
        "generation.decode_cache:keep_rows", "torch.tensor(stays)", "torch.tensor(stays, device=device)", said=INDEX
    ),
    "units chosen by an index of the device": refused(
        "learner.learner:Learner._backward",
        "experience.select(passes[number])",
        'experience.select(passes[number].to("cuda:0"))',
    ),
    "scores of the device written to the host by index": refused(
        "models.forward:score_batch", ".float().cpu()", ".float()"
    ),
    "the probe's generator is of another device": refused(
        "generation.audit:probe_tokens",
        "(vocabulary, (ROWS, LENGTH)",
        '(vocabulary, (ROWS, LENGTH), device="cuda:0"',
        WORKER,
        r"Expected a 'cuda' device type for generator",
    ),
    "mask of the monitor on the host": refused(
        "algorithms.estimators:ImportanceRatioStats.add", "* rows.sampled_BT", "* sampled_BT"
    ),
    "zeros made on the host": refused(
        "models.forward:_in_rows", "dtype=torch.float32, device=values_N.device", "dtype=torch.float32"
    ),
    "tokens on another GPU": refused(
        "models.forward:score_batch", "context=context, device=device", 'context=context, device=torch.device("cuda:1")'
    ),
}
REQUIRED = {
    update_twice: require_update,
    update_in_chunks: require_update,
    decode_twice: require_decoding,
    publish: require_publishing,
    publish_float32: require_publishing,
}


def too_dear(measure, place: str, right: str, wrong: str):
    """A fault, what measures it, and the budget that it must exceed."""
    return Fault(place, right, wrong), measure, REQUIRED[measure]


TOO_DEAR = {
    "metrics read one by one": too_dear(
        update_twice,
        "learner.learner:Learner._backward",
        "torch.as_tensor(value, dtype=torch.float64, device=device).detach()",
        "torch.as_tensor(float(value), dtype=torch.float64)",
    ),
    "response tokens counted on the device": too_dear(
        update_twice, "learner.learner:Learner._backward", "rows.sampled_BT,\n", "micro_batch.sampled_BT,\n"
    ),
    "ratios read after every micro-batch": too_dear(
        update_twice,
        "algorithms.estimators:ImportanceRatioStats.add",
        "log_ratios_BT.sum(dim=1)",
        "log_ratios_BT.sum(dim=1).cpu()",
    ),
    "micro-batch moved while the host waits": too_dear(
        update_twice,
        "learner.learner:Learner._backward",
        "in_one_copy(of_loss.tensors(), device)",
        "{name: x.to(device) for name, x in of_loss.tensors().items()}",
    ),
    "what the model reads comes from memory that is not pinned": too_dear(
        update_twice, "models.rows:moved", "tensor = tensor.pin_memory()", "pass"
    ),
    "logits in float64": too_dear(
        update_twice,
        "models.head:LogprobsAndEntropies.__call__",
        "torch.log_softmax(logits_CV / self.temperature, dim=-1)",
        "torch.log_softmax(logits_CV.double() / self.temperature, dim=-1).float()",
    ),
    "logits of a chunk in float64": too_dear(
        update_in_chunks,
        "models.head:_logits",
        "F.linear(states_CH, weight_VH, bias_V).float()",
        "F.linear(states_CH, weight_VH, bias_V).double()",
    ),
    "weights that leave the device in float32": too_dear(
        publish,
        "models.publish:AsyncCopy.copy",
        "partial(self._leave, copied, target, name)",
        "partial(target.copy_, tensor.clone())",
    ),
    "weights that the learner's thread copies to the host": too_dear(
        publish,
        "models.publish:AsyncCopy.copy",
        "partial(self._leave, copied, target, name)",
        "target.copy_(copied).size",
    ),
    "weights that are not copied within the device": too_dear(
        publish_float32, "models.publish:AsyncCopy.copy", "copied = copied.clone()", "pass"
    ),
    "checksums before the copies have arrived": too_dear(
        publish, "models.publish:AsyncCopy._on_stream", "self._stream.synchronize()", "None"
    ),
    "ended rows found on the device": too_dear(
        decode_twice, "generation.decode_cache:keep_rows", "places.to(device, non_blocking=True)", "places.to(device)"
    ),
    "live rows found by a mask": too_dear(
        decode_twice,
        "generation.transformers_engine:Decoding._draw",
        "self._tokens_RT[at], self._logprobs_RT[at] = tokens_B, logprobs_B",
        "self._tokens_RT[at], self._logprobs_RT[at] = tokens_B[tokens_B >= 0], logprobs_B",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_fault_is_refused_as_on_a_gpu(on_gpu, tmp_path, name):
    fault, options, said = REFUSED[name]
    with pytest.raises((RuntimeError, TypeError, AssertionError), match=said):
        on_gpu(with_fault, fault, train, tmp_path, 1, **options)


@pytest.mark.parametrize("options", [GRPO, WORKER, {"algorithm": "ppo"}, {"algorithm": "ppo", "shared_trunk": True}])
def test_the_same_runs_pass_without_a_fault(on_gpu, tmp_path, options):
    assert len(on_gpu(train, tmp_path, 1, **options)) == 1


@pytest.mark.parametrize("name", TOO_DEAR)
def test_a_fault_exceeds_a_budget(on_gpu, tmp_path, name):
    fault, measure, require = TOO_DEAR[name]
    given = {"decode_twice": (), "update_twice": (tmp_path,), "publish": ("SnapshotRing", tmp_path)}
    given |= {"publish_float32": given["publish"], "update_in_chunks": (tmp_path, 0)}
    found = on_gpu(with_fault, fault, measure, *given[measure.__name__])
    with pytest.raises(AssertionError):
        require(found) if isinstance(found, Published) else require(*found)
