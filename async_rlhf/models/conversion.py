"""Weights under the names and in the shapes that checkpoints have.

transformers computes some models with other tensors than their checkpoints hold: all experts of a mixture in one
tensor, for example. Other programs, such as vLLM, know only those of checkpoints.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def as_in_checkpoints(config: PretrainedConfig, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """What ``save_pretrained`` would write, one layer at a time.

    Args:
        config: of the model.
        tensors: of the model, layer by layer, under their names there.
    """
    model = _without_weights(config.model_type, config.to_json_string())
    if model is None or not get_model_conversion_mapping(model, add_legacy=False):
        yield from tensors
        return
    for _, layer in groupby(tensors, key=lambda named: layer_of(named[0])):
        yield from revert_weight_conversion(model, dict(layer)).items()


@lru_cache(maxsize=4)
def _without_weights(model_type: str, config: str) -> PreTrainedModel | None:
    """A model that knows how its tensors are converted; None for one that brings its own code, which converts none."""
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None
    known = AutoConfig.for_model(**json.loads(config))
    with torch.device("meta"):
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(known)]._from_config(known)


def layer_of(name: str) -> str:
    """``model.layers.3`` for all tensors of that layer; the name itself for one that is in no layer."""
    found = re.match(r"(.*?\.\d+)\.", name)
    return name if found is None else found.group(1)
