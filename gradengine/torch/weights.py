"""Ranks that start from different weights: found before their first step, as they would train two models."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash

from gradengine.engine import GradientEngine
from gradengine.errors import CallerError


def refuse_other_weights(engine: GradientEngine, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Raise `CallerError`, on all ranks alike, if a rank's parameters are not rank 0's; all ranks call this together.

    It reads each parameter once, and on a GPU copies it to the host. Each rank sends 8 bytes for each parameter.
    """
    told = engine.all_gather_object("digests of the weights", [digest(parameter) for parameter in parameters.values()])
    for rank, digests in enumerate(told):
        for name, theirs, first in zip(parameters, digests, told[0], strict=True):
            if theirs != first:
                raise CallerError(
                    f"parameter '{name}' of rank {rank} is not that of rank 0: the ranks would train different models",
                    do="seed all ranks alike before the model is made, or load one checkpoint on all of them",
                )


def digest(parameter: torch.Tensor) -> int:
    """Return a hash of a tensor's values, in the order of its dimensions: the same for any strides and device."""
    values = parameter.detach().cpu().contiguous().flatten()
    found: int = xxhash.xxh3_64_intdigest(values.view(torch.uint8).numpy())
    return found
