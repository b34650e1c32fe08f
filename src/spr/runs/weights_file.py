"""Owns an agent's weights in a file: written with a checksum, and read with suspicion.

A file is plain safetensors. Its metadata say what it is, with a checksum over the weights, these words and the
configuration; files up to version 0.10 have none.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from spr.agent.networks import Networks
from spr.agent.q_head import num_actions_of
from spr.common import json_files
from spr.common.errors import UnusableError, UserError, one_line
from spr.config.config import Config

LARGEST_DESCRIPTION = 2**22  # bytes
_MOST_ACTIONS = 4096


class About(NamedTuple):
    """What a file of weights says of itself."""

    words: dict[str, Any]
    checksum: str | None


def to_bytes(weights: Mapping[str, Tensor], words: Mapping[str, Any], config: Mapping[str, Any]) -> bytes:
    """Return a file's content; equal agents have equal files."""
    plain = {name: p.detach().float().contiguous().cpu() for name, p in weights.items()}
    sealed = {**words, "sha256": _checksum(plain, words, config)}
    # One entry only: the library writes several in any order.
    return save(plain, {"spr": json.dumps(sealed)})


def about(file: Path) -> About:
    """Return what a file says of itself; nothing of that is checked yet."""
    with _opened(file) as agent:
        metadata = agent.metadata() or {}
    found = json_files.parse(metadata.get("spr", "{}"))
    if not isinstance(found, dict):
        raise UnusableError("what it says of itself is damaged")
    words = {key: value for key, value in metadata.items() if key == "step"} | found
    checksum = words.pop("sha256", None)
    return About(words, None if checksum is None else str(checksum))


def read_weights(file: Path, stored_as: About, config: Config, stored: Mapping[str, Any]) -> dict[str, Tensor]:
    """Read weights that a configuration asks for, as it was stored.

    Names, shapes and sizes are checked before any weight is read; then the checksum, and that all numbers are finite.
    """
    with _opened(file) as agent:
        _check_shapes(agent, config, file.stat().st_size)
        weights = {name: agent.get_tensor(name) for name in agent.keys()}  # noqa: SIM118 - it is no mapping
    if stored_as.checksum is not None and stored_as.checksum != _checksum(weights, stored_as.words, stored):
        raise UserError("its weights or its configuration are not those that were saved")
    for name, tensor in weights.items():
        if not tensor.isfinite().all():
            raise UserError(f"the agent's '{name}' holds numbers that are not finite")
    return weights


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a file of weights; what the library finds wrong with it becomes one line."""
    if not file.is_file():
        raise UnusableError(f"{file.name} is no plain file")
    try:
        with safe_open(file, "pt") as agent:
            yield agent
    except (OSError, SafetensorError) as error:
        raise UnusableError(f"its weights can't be read: {one_line(error)}") from error


def _checksum(weights: Mapping[str, Tensor], words: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps([words, config], sort_keys=True).encode())
    for name in sorted(weights):
        tensor = weights[name]
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


def _check_shapes(agent: Any, config: Config, size: int) -> None:
    """Compare an open file's tensors with what the configuration asks for."""
    found = {name: agent.get_slice(name) for name in agent.keys()}  # noqa: SIM118
    try:
        actions = max(1, num_actions_of(config, {name: piece.get_shape() for name, piece in found.items()}))
    except (KeyError, IndexError):
        raise UnusableError("its agent lacks the values of its actions") from None
    if actions > _MOST_ACTIONS:
        raise UserError(f"an agent with {actions:,} actions is not believable")
    with torch.device("meta"):
        expected = {name: list(p.shape) for name, p in Networks(config, actions).named_parameters()}
    shapes = {name: piece.get_shape() for name, piece in found.items() if piece.get_dtype() == "F32"}
    if shapes != expected:
        wrong = sorted(name for name in found.keys() | expected.keys() if shapes.get(name) != expected.get(name))
        raise UserError(f"the agent's '{wrong[0]}' is not what its configuration asks for")
    if size > 4 * sum(math.prod(shape) for shape in expected.values()) + LARGEST_DESCRIPTION:
        raise UserError("the agent's file is larger than its weights")
