"""Owns how the threads of one computation wait for each other, which must be said before PyTorch is loaded.

OpenMP's threads spin while they wait. On a busy machine they spin on cores that the others need. After a shorter spin
they go to sleep instead; one of 10,000 rounds costs nothing on a quiet machine (docs/explanation/cpu.md).
"""

import os
import sys
import warnings
from collections.abc import Mapping, MutableMapping

_BY_USER = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # any of these is the user's own choice
# Of GNU's OpenMP, which PyTorch's builds for Linux bring, in rounds of a loop; of Intel's and LLVM's, in milliseconds.
_SHORT_SPIN = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}


def as_the_user_set(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what `set_wait_policy` has added to it."""
    ours = all(environment.get(name) == value for name, value in _SHORT_SPIN.items())
    return {name: value for name, value in environment.items() if not (ours and name in _SHORT_SPIN)}


def set_wait_policy(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have threads of this process and of its children wait asleep, unless the user has said how they wait."""
    if any(name in environment for name in _BY_USER):
        return
    environment.update(_SHORT_SPIN)
    torch = sys.modules.get("torch")
    if torch is not None and not torch.cuda.is_available():
        warnings.warn(
            "PyTorch was imported before spr, so its threads spin while they wait: on a busy machine that is slow. "
            "Import spr first, or set OMP_WAIT_POLICY=passive",
            stacklevel=2,
        )
