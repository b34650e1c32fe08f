"""Owns what this machine offers: the device to run on, its precision, its name, its cores and its free memory."""

import ctypes
import gc
import os
from pathlib import Path

import torch

from spr.errors import UserError

DEVICES = ("auto", "cpu", "cuda")
PRECISIONS = ("auto", "fp32", "tf32", "bf16")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # names of mallopt's parameters in glibc's malloc.h


def choose_device(name: str) -> torch.device:
    """Turn auto, cpu, cuda or cuda:N into a device that is really there."""
    kind, colon, number = name.partition(":")
    if kind not in DEVICES or (colon and (kind != "cuda" or not number.isdecimal())):
        raise UserError(f"unknown device '{name}'; there are {', '.join(DEVICES)}, and cuda:N for one of several GPUs")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA GPU can be used here: 'spr doctor' says what there is; --device cpu works everywhere")
    if colon and int(number) >= torch.cuda.device_count():
        raise UserError(f"there is no {name}: the GPUs here are cuda:0 to cuda:{torch.cuda.device_count() - 1}")
    if kind == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def choose_precision(name: str, device: torch.device) -> str:
    """Turn auto, fp32, tf32 or bf16 into how matrix products are taken while learning; auto is the fastest here."""
    if name not in PRECISIONS:
        raise UserError(f"unknown precision '{name}'; there are {', '.join(PRECISIONS)}")
    if name in ("tf32", "bf16") and device.type != "cuda":
        raise UserError(f"precision {name} needs a GPU; on the {device.type} there is fp32")
    if name == "auto":
        return "bf16" if device.type == "cuda" else "fp32"
    return name


def product_dtype(precision: str) -> torch.dtype:
    """Return the dtype of matrix products; TF32 is a way of multiplying float32."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def device_name(device: torch.device) -> str:
    """Return a device's name for people and for result.json."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads"


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def free_memory(device: torch.device) -> int:
    """Return the bytes that can still be taken on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise UserError("can't read the free memory of this machine from /proc/meminfo")


def free_unused(device: torch.device) -> None:
    """Give back the memory of what is no longer in use, for other programs to take."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def tune(device: torch.device, precision: str) -> None:
    """Set what holds for the whole process: how a GPU multiplies float32, where it keeps compiled code, the allocator.

    An update on a CPU takes and frees tens of megabytes several times over, and each time the system hands out fresh
    pages it clears them first. So the C library is asked to keep freed memory for the next allocation; other libraries
    than glibc are left as they are. Four benches each, in turn: 100 to 105 ms with it, 99 to 141 ms without.
    """
    if device.type == "cuda":
        if device.index is not None:
            torch.cuda.set_device(device)  # streams and graphs are of the current one
        # What is compiled is kept for the next run; the library's own choice is a folder that a reboot empties.
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "spr" / "compiled"))
        # With bf16, what is still multiplied in float32 (out layers, acting) may use TF32 too.
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
        # The library's convolutions, which wide networks use, have settings of their own; some of their ways to sum
        # would give other bits another time.
        torch.backends.cudnn.allow_tf32 = precision != "fp32"
        torch.backends.cudnn.deterministic = True
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 2**30)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
