"""Owns what this machine offers: the device to run on, its precision, its name, its cores and its free memory."""

import ctypes
import gc
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

from spr.common.errors import UserError

DEVICES = ("auto", "cpu", "cuda")
PRECISIONS = ("auto", "fp32", "tf32", "bf16")
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
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
    """Turn auto, fp32, tf32 or bf16 into how matrix products are taken while learning; auto is bf16 on a GPU only."""
    if name not in PRECISIONS:
        raise UserError(f"unknown precision '{name}'; there are {', '.join(PRECISIONS)}")
    if name == "tf32" and device.type != "cuda":
        raise UserError(f"precision tf32 needs a GPU; on the {device.type} there is fp32")
    if name == "bf16" and device.type == "cpu" and not _cpu_multiplies_bf16():
        raise UserError("precision bf16 needs a processor that computes it (AVX512-BF16 or AMX): use fp32 here")
    if name == "auto":
        return "bf16" if device.type == "cuda" else "fp32"
    return name


def _cpu_multiplies_bf16() -> bool:
    """Say whether this processor has instructions for bf16; without them it is slower than float32."""
    flags = (_PROC / "cpuinfo").read_text(encoding="utf-8", errors="replace").split()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def product_dtype(precision: str) -> torch.dtype:
    """Return the dtype of matrix products; TF32 is a way of multiplying float32."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def device_name(device: torch.device) -> str:
    """Return a device's name, for messages and result.json."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads"


def cores() -> int:
    """Return how many cores this process may use: by its affinity, and by the quota of its cgroups (containers)."""
    allowed = len(os.sched_getaffinity(0))
    return max(1, min([allowed, *(int(quota) for quota in _core_quotas(_PROC, _CGROUPS))]))


def _core_quotas(proc: Path, root: Path) -> Iterator[float]:
    """Yield how many cores' time each group that this process is in may take, where that is limited."""
    for version, group in _groups_of(proc, root, "cpu"):
        try:
            if version == 2:
                quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
            else:
                quota, period = (
                    (group / f"cpu.cfs_{name}_us").read_text(encoding="ascii").strip() for name in ("quota", "period")
                )
        except (OSError, ValueError):  # the group has no such limit, or is not to be seen from here
            continue
        if quota not in ("max", "-1"):
            yield int(quota) / int(period)


def _groups_of(proc: Path, root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Yield the folders of each group that this process is in, and of each that these are in: cgroups v1 and v2."""
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # a kernel without groups has no limits by them
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            version, mounts = 2, [root, root / "unified"]
        elif controller in controllers.split(","):
            version, mounts = 1, [root / name for name in dict.fromkeys([controllers, controller])]
        else:
            continue
        # In a container the path may be as it is outside, and its own group is then where groups are mounted.
        inner = Path(path.lstrip("/"))
        for mount in mounts:
            for part in dict.fromkeys([inner, *inner.parents]):
                yield version, mount / part


def free_memory(device: torch.device) -> int:
    """Return the bytes that can still be taken on a device: of a CPU, no more than limits allow (cgroups, ulimit)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = _kilobytes(_PROC / "meminfo").get("MemAvailable")
    if available is None:
        raise UserError("can't read the free memory of this machine from /proc/meminfo")
    return max(0, min([available, *_free_in_cgroups(_PROC, _CGROUPS), *_free_by_ulimit(_PROC)]))


def out_of_memory(error: BaseException) -> bool:
    """Say whether an error means that there was not enough memory, of a GPU or of the machine."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _kilobytes(path: Path) -> dict[str, int]:
    """Read a table of the kernel's, 'name: number kB', as bytes by name."""
    rows = (line.split() for line in path.read_text(encoding="ascii", errors="replace").splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3 and row[2] == "kB"}


def _free_by_ulimit(proc: Path) -> Iterator[int]:
    """Yield what the limits on this process leave of its address space, and of its data."""
    taken = _kilobytes(proc / "self" / "status")
    for kind, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            yield limit - taken[name]


def _free_in_cgroups(proc: Path, root: Path) -> Iterator[int]:
    """Yield what each group that this process is in, and each that these are in, may still take: cgroups v1 and v2."""
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }
    found = (_free_in_cgroup(group, *names[version]) for version, group in _groups_of(proc, root, "memory"))
    yield from (free for free in found if free is not None)


def _free_in_cgroup(group: Path, limit_name: str, usage_name: str, file_name: str) -> int | None:
    """Return what a group may still take; files that it read and nobody uses are given up for it, and count as free."""
    try:
        limit, usage = ((group / name).read_text(encoding="ascii").strip() for name in (limit_name, usage_name))
        rows = [line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines()]
    except OSError:  # the group has no such limit, or is not to be seen from here
        return None
    unused = next((int(row[1]) for row in rows if row[0] == file_name), 0)
    return None if limit == "max" else int(limit) - int(usage) + unused


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
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > cores():
        torch.set_num_threads(cores())
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 2**30)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
