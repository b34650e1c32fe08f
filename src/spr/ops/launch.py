"""Owns what launches of kernels have in common: how products are taken, and how many programs fill a GPU."""

import torch
from torch import Tensor

PROGRAMS = 528  # four for each processor of an H200


def precision_of(x: Tensor) -> str:
    """Return how products are taken: float32 ones as torch is told to."""
    return "ieee" if x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest" else "tf32"
