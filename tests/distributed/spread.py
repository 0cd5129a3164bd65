"""Spreads models that rank 0 alone loads over the ranks, of which this process is one, and compares what comes.

torchrun --nproc-per-node 3 tests/distributed/spread.py '[["/tmp/model", "fsdp"]]'
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from tiny import new_args

from async_rlhf.config import ParallelConfig
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.distributed.parallel import Parallel
from async_rlhf.learner.launch import start_ranks
from async_rlhf.learner.strategies.choice import make_parallel
from async_rlhf.models.frozen_models import frozen
from async_rlhf.models.loading import load_policy
from async_rlhf.models.sharded_loading import loaded_once, only_on_rank_0


def spread(folder: str, strategy: str, ranks: Ranks) -> None:
    """Require every parameter to be the whole model's, bit for bit, in the same type; and a saved buffer rank 0's."""
    args = new_args(Path(folder), parallel=ParallelConfig(strategy=strategy), bf16=True)
    parallel, alone = make_parallel(args, ranks), Parallel()
    alone.casts_gathered = parallel.casts_gathered
    model, whole = loaded_once(ranks, "model", partial(load_policy, folder)), load_policy(folder)
    assert {p.is_meta for p in model.parameters()} == {not ranks.is_main}
    model.register_buffer("noted", torch.full((2,), float(ranks.rank)))
    for each in (model, whole):
        each.requires_grad_(False)
    frozen(model, args, parallel)
    frozen(whole, args, alone)
    assert not only_on_rank_0(model)
    assert model.noted.tolist() == [0.0, 0.0]
    for (name, parameter), (right_name, right) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        with parallel.gathered([parameter]):
            found = parallel.whole(parameter.data)
            assert name == right_name
            assert found.dtype == right.dtype
            assert torch.equal(found, right.data), name
    print(f"spread: {folder}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    together = start_ranks(new_args(Path()))
    for words in json.loads(sys.argv[1]):
        spread(*words, together)
