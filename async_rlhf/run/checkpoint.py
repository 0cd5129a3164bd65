"""Checkpoints: the policy in the standard format, and everything else that a run needs to resume.

    checkpoint-12/
      model.safetensors, config.json, tokenizer.json ...   the policy, as ``from_pretrained`` loads it
      adapter/, value_model/                                if there are any
      trainer_state.json                                    transformers' state
      resume/state.json, tensors.safetensors                optimiser, schedules, random generators, log positions
      resume/shards/                                        instead of the optimiser and the adapters in the former, if
                                                            checkpoint_format is "sharded"; and all that is trained
      resume/rollouts.jsonl                                 rollouts of older weights for the next S batches
      resume/evaluation.jsonl                               the evaluation that is under way, if there is one
      manifest.json                                         size and checksum of every file, written last

Nothing here is ever unpickled: safetensors and JSON only.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from async_rlhf.config import ConfigError, OnlineConfig
from async_rlhf.config.base import dotted, may_change, require, with_new_keys, without_gpu
from async_rlhf.config.secrets import without_secrets
from async_rlhf.data.stream import SharedPrompts
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.learner.learner import Learner
from async_rlhf.models.adapters import has_adapters, is_adapter
from async_rlhf.models.forward import PolicyAndValueWrapper
from async_rlhf.models.loading import load_policy, load_reward_model
from async_rlhf.models.saving import write_model, write_value_head
from async_rlhf.models.values import load_value_head
from async_rlhf.run.manifest import CheckpointError
from async_rlhf.run.record import CODE
from async_rlhf.system.files import from_json, naming
from async_rlhf.types import Batch, Group, Prompt, Sample

logger = logging.getLogger(__name__)

FORMAT = 3
"""Version of the resume format. Raise it with every change that an older or newer version could not read."""
_SHARDED_FORMAT = f"{FORMAT}, sharded"
_SAMPLE_TYPES = {"tokens": "int32", "sampled": "bool", "logprobs": "float32", "versions": "int32", "rewards": "float32"}


@dataclass
class ResumeState:
    """What a run needs, besides the models, to resume as if it had never stopped."""

    batch: int
    """Batches trained on."""
    config: dict[str, Any]
    """The configuration, keys with dots."""
    inputs: dict[str, str]
    """Fingerprints of the inputs: prompts, reference policy, reward model."""
    values: dict[str, Any]
    """State of the learner, the random generators and the reward functions, except tensors."""
    logs: dict[str, int]
    """Bytes of each log file."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    ahead: list[Batch] = field(default_factory=list)
    """Batches that are sampled but not yet trained on."""
    evaluation: Batch | None = None
    """Answers to held-out prompts that are not scored yet, and their version; no answers if that version, which is the
    checkpoint's own, is to answer again."""
    sharded: bool = False
    """Whether what is trained is in shards beside this (run/shards.py), and not in :attr:`tensors` and the models."""

    def write(self, folder: Path) -> None:
        """Write everything into ``folder/resume``."""
        self.write_state(folder)
        self.write_ahead(folder)

    def write_ahead(self, folder: Path) -> None:
        """Write what is sampled ahead, which never changes, into ``folder/resume``."""
        kept = {"rollouts": self.ahead} | ({} if self.evaluation is None else {"evaluation": [self.evaluation]})
        for name, batches in kept.items():
            path = folder / "resume" / f"{name}.jsonl"
            with naming(path), path.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in _rollout_rows(batches))

    def write_state(self, folder: Path) -> None:
        """Write everything else."""
        folder = folder / "resume"
        folder.mkdir()
        _save(self.tensors, folder / "tensors.safetensors")
        names = ("batch", "config", "inputs", "values", "logs")
        form = _SHARDED_FORMAT if self.sharded else FORMAT
        text = json.dumps({"format": form, **{name: getattr(self, name) for name in names}}, indent=1)
        path = folder / "state.json"
        with naming(path):
            path.touch(mode=0o600)  # vLLM options may contain secrets that we cannot recognise
            path.write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> ResumeState:
        """Read what :meth:`write` wrote, except the batches sampled ahead: see :meth:`read_ahead`.

        Raises:
            CheckpointError: it cannot be read.
            ConfigError: another version of this package has written it, in another format.
        """
        if (folder / "state.json").is_file():  # of `sft` or `reward` when they had a format of their own
            rule = "go on with the version that has written it, or set overwrite to start at the beginning"
            raise ConfigError(f"resume: {str(folder)!r} is a stage's checkpoint of an older format; {rule}")
        folder = folder / "resume"
        try:
            values = from_json((folder / "state.json").read_text(encoding="utf-8"))
            written = values.pop("format", 1)
            if written in (FORMAT, _SHARDED_FORMAT):
                state = cls(**values, sharded=written == _SHARDED_FORMAT)
                state.tensors = load_file(folder / "tensors.safetensors")
                return state
        except (OSError, ValueError, TypeError, AttributeError, SafetensorError) as error:
            raise CheckpointError(f"{str(folder)!r} cannot be read: {type(error).__name__}: {error}") from error
        raise ConfigError(
            f"resume: {str(folder.parent)!r} is a checkpoint of format {written}; must be of format {FORMAT}: go on "
            "with the version of async_rlhf that has written it, or start a new run from its policy (model)"
        )

    def read_ahead(self, folder: Path, stream: SharedPrompts) -> None:
        """Read the batches sampled ahead; the stream gives their prompts. Every rank must call it, and rank 0 alone
        gets completions.
        """
        self.ahead = _read_batches(folder / "resume" / "rollouts.jsonl", stream)

    def read_evaluation(self, folder: Path, stream: SharedPrompts | None, ranks: Ranks) -> None:
        """The same for the evaluation that was under way; it is left out if its prompts are no longer held out."""
        path = folder / "resume" / "evaluation.jsonl"
        if not path.exists():
            return
        batches = [] if stream is None else _read_batches(path, stream)
        prompts = [group.prompt.tokens for batch in batches for group in batch.groups]
        rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        groups = [group for row in rows for group in row["groups"]]
        same = stream is not None and all(_asked(g, len(p)) == p for g, p in zip(groups, prompts, strict=False))
        if ranks.broadcast("evaluation under way", lambda: same):
            (self.evaluation,) = batches
        elif ranks.is_main:
            logger.warning("WARNING: the evaluation that was under way is left out: eval_dataset is another, or none")

    def forget_weights(self) -> None:
        """Free the tensors that the learner has loaded; those of the random generators are still needed."""
        self.tensors = {name: tensor for name, tensor in self.tensors.items() if name.startswith("random.")}

    def check(self, config: OnlineConfig, algorithm: str) -> None:
        """Require the same configuration, except for keys that may change.

        Raises:
            ConfigError: names every key that differs, unless ``resume_anyway``.
        """
        seen = self.batch * config.batch_size
        rule = f"must be at least the {seen} that the checkpoint has seen"
        name = "total_episodes" if config.batches is None else "batches"
        rule = rule if config.batches is None else f"must be at least the {self.batch} that the checkpoint has seen"
        enough = config.epochs is not None or self.batch <= config.num_batches
        require(enough, name, getattr(config, name), rule)
        known = with_new_keys(without_secrets(self.config), config)
        old, new = (
            {key: value for key, value in values.items() if not may_change(config, key)}
            for values in (without_gpu(each, config) for each in (known, as_saved(config, algorithm)))
        )
        require_same(old, new, config.resume_anyway)

    def check_inputs(self, inputs: Mapping[str, str], anyway: bool) -> None:
        """Require data, models, rewards and their code to be the same, as :meth:`check` does for the configuration."""
        # An older version has noted less code, and a callback may come or go. What decides has a name, which counts.
        one_sided = {name for name in self.inputs.keys() ^ inputs.keys() if name.startswith(CODE)}
        old, new = ({name: x for name, x in each.items() if name not in one_sided} for each in (self.inputs, inputs))
        require_same(old, new, anyway)


def as_saved(config: OnlineConfig, algorithm: str) -> dict[str, Any]:
    """A configuration as read back from JSON, with dotted keys, plus derived values that may not change."""
    derived = {
        "algorithm": algorithm,
        "number of generation.urls": len(config.generation.urls),
        "prompts per batch": config.batch_size,
    }
    return json.loads(json.dumps({**derived, **without_secrets(dotted(asdict(config)))}))


def require_same(old: Mapping[str, Any], new: Mapping[str, Any], anyway: bool) -> None:
    """Require that a checkpoint goes on as the run that wrote it.

    Raises:
        ConfigError: names every value that differs, unless ``anyway``; then a warning does.
    """
    differences = [
        f"{key}: was {old.get(key)!r}, is {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]
    if differences and not anyway:
        raise ConfigError(
            "resume: the checkpoint is of another run, which could not be continued exactly:\n  "
            + "\n  ".join(differences)
            + "\nset them back, or set resume_anyway to go on with the new ones"
        )
    for difference in differences:
        logger.warning("resume_anyway: %s", difference)


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    with naming(path):
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)


def _rollout_rows(batches: Iterable[Batch]) -> Iterator[dict[str, Any]]:
    names = ("index", "version", "generation_seconds", "shares", "metrics")
    for batch in batches:
        groups = [
            {"draw": group.prompt.draw, "prompt": group.prompt.tokens, "samples": list(map(_sample_row, group.samples))}
            for group in batch.groups
        ]
        yield {**{name: getattr(batch, name) for name in names}, "groups": groups}


def _read_batches(path: Path, stream: SharedPrompts) -> list[Batch]:
    """Batches as :func:`_rollout_rows` wrote them. Every rank must call it, and rank 0 alone gets completions."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    draws = [group["draw"] for row in rows for group in row["groups"]]
    drawn = stream.prompts(draws)
    if not drawn:
        rows = [{**row, "groups": []} for row in rows]
    prompts = dict(zip(draws, drawn, strict=bool(drawn)))
    return [_rollout_batch(row, prompts) for row in rows]


def _asked(group: Mapping[str, Any], length: int) -> tuple[int, ...]:
    """The tokens of a prompt; the first ones of its first sample, which were the same when prompts were not written."""
    return tuple(group["prompt"] if "prompt" in group else group["samples"][0]["tokens"][:length])


def _sample_row(sample: Sample) -> dict[str, Any]:
    values = {item.name: getattr(sample, item.name) for item in fields(sample)}
    routes_TLE = values.pop("routes_TLE")
    row = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}
    if routes_TLE is not None:  # as numbers in JSON they would take several times the bytes
        text = base64.b64encode(routes_TLE.tobytes()).decode("ascii")
        row["routes_TLE"] = [str(routes_TLE.dtype), routes_TLE.shape, text]
    return row


def _rollout_batch(row: dict[str, Any], prompts: Mapping[int, Prompt]) -> Batch:
    groups = tuple(Group(prompts[g["draw"]], tuple(map(_sample_of, g["samples"]))) for g in row["groups"])
    return Batch(**{**row, "groups": groups, "shares": tuple(row["shares"])})


def _sample_of(row: dict[str, Any]) -> Sample:
    arrays = {name: np.array(row[name], kind) for name, kind in _SAMPLE_TYPES.items() if row[name] is not None}
    if "routes_TLE" in row:
        kind, shape, text = row["routes_TLE"]
        arrays["routes_TLE"] = np.frombuffer(base64.b64decode(text), kind).reshape(shape)
    return Sample(**{**row, **arrays, "starts": tuple(row.get("starts", ()))})


def save_learner(
    learner: Learner, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: torch.dtype | None = None
) -> None:
    """Write the policy in the standard format, and the value model or head into ``value_model``.

    Every rank must call it; rank 0 writes. The policy's weights are rounded to ``dtype``.
    """
    learner.ranks.barrier("saving")
    write_model(learner.policy, tokenizer, folder, learner.parallel, dtype)
    if isinstance(learner.value, PreTrainedModel):
        write_model(learner.value, tokenizer, folder / "value_model", learner.parallel)
    elif learner.value is not None:
        write_value_head(learner.value, folder / "value_model", learner.parallel)


def load_weights(model: PolicyAndValueWrapper, folder: Path, tensors: Mapping[str, Tensor], trust: bool) -> None:
    """Load the weights of everything that is trained, before it is sharded; where rank 0 alone has weights, it alone
    reads them.

    Args:
        model: policy and values.
        folder: as :func:`save_learner` has written it.
        tensors: of :func:`learner_state`.
        trust: whether code that comes with a model may be run.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.copy_(tensors[f"adapter.{name}"])
    for part, path, key in ((model.policy, folder, "model"), (model.value, folder / "value_model", "value_model")):
        adapted = part is not None and has_adapters(part)
        if isinstance(part, nn.Linear):
            load_value_head(path, part)
        elif part is not None and part.device.type != "meta" and not (part.can_generate() and adapted):
            load, within = load_policy if part.can_generate() else load_reward_model, "score" if adapted else ""
            saved = load(str(path), key=key, trust=trust).get_submodule(within)
            part.get_submodule(within).load_state_dict(saved.state_dict())


def learner_state(learner: Learner, with_tensors: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The learner's state besides the files of :func:`save_learner`: tensors if they are asked for, values for JSON.

    It does not depend on the number of ranks. Every rank must call it, and rank 0 gets the state.
    """
    learner.ranks.barrier("state of the learner")
    parallel, tensors = learner.parallel, {}
    if with_tensors:
        tensors = {f"optimizer.{name}": tensor for name, tensor in parallel.moments().items()}
    for name, parameter in learner.model.named_parameters() if with_tensors else ():
        if is_adapter(name):
            with parallel.gathered([parameter]):
                tensors[f"adapter.{name}"] = parallel.whole(parameter.data)
    values = {"kl_coef": learner.kl_coef, "scheduler_steps": learner.scheduler.last_epoch}
    if learner.config.optimizer == "adafactor":
        values["adafactor_steps"] = "as adamw"
    if learner.own_schedule:
        values["schedule"] = learner.scheduler.state_dict()
    if learner.own_optimizer:
        groups = learner.optimizer.param_groups
        values["groups"] = [{name: x for name, x in group.items() if name != "params"} for group in groups]
    if parallel.loss_scale is not None:
        values["loss_scale"] = parallel.loss_scale.state()
    return tensors, values


def restore_learner(learner: Learner, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Restore what :func:`learner_state` returned, after :func:`load_weights`. Every rank must call it.

    Raises:
        ConfigError: the steps of Adafactor were 50 times smaller in the version that wrote the checkpoint.
    """
    if learner.config.optimizer == "adafactor" and "adafactor_steps" not in values:
        raise ConfigError(
            "resume: the checkpoint is of a version whose adafactor multiplied learning_rate by the RMS of the weights "
            "(about 0.02), which no version can go on with at the same rate; start a new run from its policy (model)"
        )
    if learner.own_optimizer:
        for group, saved in zip(learner.optimizer.param_groups, values["groups"], strict=True):
            group.update(saved)
    if learner.own_schedule:
        learner.scheduler.load_state_dict(values["schedule"])
    else:
        learner.scheduler.last_epoch = values["scheduler_steps"]
        # Recomputed: the length of the run may have changed, and with it the learning rate.
        for group, factor in zip(learner.optimizer.param_groups, learner.scheduler.lr_lambdas, strict=True):
            group["lr"] = group["initial_lr"] * factor(learner.scheduler.last_epoch)
    prefix = "optimizer."
    learner.parallel.load_moments({n[len(prefix) :]: x for n, x in tensors.items() if n.startswith(prefix)})
    learner.kl_coef = values["kl_coef"]
    if learner.parallel.loss_scale is not None and "loss_scale" in values:
        learner.parallel.loss_scale.restore(values["loss_scale"])
