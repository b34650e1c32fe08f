"""What a GPU would be given, without a GPU: the PTX of every kernel for sm_90, and the whole update, traced.

`make snapshot` stores it in snapshots/gpu_path.json; test_snapshot.py compares. A process of its own,
since TRITON_INTERPRET, which tests/ops/test_kernels.py sets, must be off before Triton is imported.
"""

import hashlib
import json
import os
import re
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="triton-")

import torch
import triton
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from spr.agent.random_streams import RawNumbers, RngStreams
from spr.agent.replay import Replay
from spr.agent.schedules import new_scalars
from spr.config.presets import preset_config
from spr.ops import each_agent, functional, kernels, random_triton
from spr.ops.kernels import KERNELS
from spr.training.actor import Actor
from spr.training.learner import Learner

HOPPER = GPUTarget("cuda", 90, 32)
CASES = [(preset, agents) for preset in ("spr", "rainbow", "bbf") for agents in (1, 26)]
HERE = torch.device("cpu")  # this PyTorch has no other: where a device decides, `as_on_a_gpu` does instead


def graph(preset, agents):
    """Trace `Learner.update` of a fleet on fake tensors, by the operations that a GPU takes: one line a node."""
    torch.set_float32_matmul_precision("high")
    config = preset_config(preset)
    with FakeTensorMode(allow_non_fake_inputs=True):
        learner = Learner(config, 18, HERE, matmul_dtype=torch.bfloat16, fuse=lambda function, _: function)
        learner._fused = False  # of Adam: what a GPU does is for the compiler to fuse
        state, replay = learner.init(range(agents), [18] * agents), Replay(config, agents, HERE)
        rng, rates = RngStreams(config, 18, range(agents), HERE, [18] * agents), new_scalars(config, HERE)

        def update(normal, uniform):
            return learner.update(state, replay, rng, RawNumbers(normal, uniform), rates)

        traced = make_fx(update)(*rng.empty())
    lines = []
    for node in traced.graph.nodes:
        value = node.meta.get("val")
        shape = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
        lines.append(f"{node.name} = {node.op} {node.target} {node.args} {node.kwargs} {shape}")
    return lines


LAUNCHES = {}  # (kernel, arguments, options), in the order of the first launch


def note(self, *args, grid, warmup, **options):  # noqa: ARG001 - in place of JITFunction.run
    given = tuple(("tensor", x.dtype) if isinstance(x, torch.Tensor) else ("value", x) for x in args)
    LAUNCHES.setdefault((self, given, tuple(sorted(options.items()))))


def note_launches(preset, agents):
    """Run an update, an action and a step of an evaluation on fake tensors, as on a GPU, and note every launch."""
    config, here = preset_config(preset), HERE

    def drawn(normal, uniform):
        random_triton.random(torch.zeros(agents, 2, dtype=torch.int64), normal, uniform)
        return RawNumbers(torch.zeros(agents, normal), torch.zeros(agents, uniform))

    with FakeTensorMode(allow_non_fake_inputs=True):
        learner = Learner(config, 18, here, matmul_dtype=torch.bfloat16, fuse=lambda function, _: function)
        state, replay = learner.init(range(agents)), Replay(config, agents, here)
        rng = RngStreams(config, 18, range(agents), here)
        draws = rng.draws(drawn(*rng._sizes()))
        learner.gradients_and_priorities(state, replay, draws, new_scalars(config, here))
        act = drawn(rng._noise_size, 2 if rng._explores else 0)
        drawn(0, 1)  # random play
        for environments in (1, config.evaluation.episodes):
            noise = rng.head_noise(act.normal) if environments == 1 else ()
            Actor(config, 18, (agents, environments), here).greedy(state.acting, noise)


def as_on_a_gpu():
    """Have operations be those of a GPU, and those that the compiler is given."""
    torch.compiler.is_compiling = lambda: True
    functional.convolve = lambda x, weight, stride=1, padding=0: functional.shift_and_add(x, weight, stride, padding)
    each_agent.takes_turns = lambda _: False
    kernels.has_kernels = lambda x: x.dtype in (torch.uint8, torch.bfloat16, torch.float32)


def with_kernels():
    """Have kernels note that they were launched."""
    JITFunction.run = note
    for op, kernel in KERNELS.items():

        def fake(*args, kernel=kernel, announced=op._abstract_fn, **kwargs):
            kernel(*args)
            return announced(*args, **kwargs)

        op._abstract_fn = fake


class Aligned:
    """A tensor's address, as Triton's specialisation asks for it."""

    def __init__(self, dtype):
        self.dtype = dtype

    def data_ptr(self):
        return 0


def ptx(place):
    """Compile a launch as `JITFunction.run` would; without what names files and lines, which moving code changes."""
    kernel, given, options = list(LAUNCHES)[place]
    backend = make_backend(HOPPER)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    values = [Aligned(what) if kind == "tensor" else what for kind, what in given]
    options = dict(options) | {"debug": False, "instrumentation_mode": ""}
    bound, specialization, chosen = bind(*values, **options)
    chosen, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, chosen)
    made = compile(ASTSource(kernel, signature, constants, attributes), target=HOPPER, options=chosen.__dict__)
    text = made.asm["ptx"].split("\t.section\t.debug")[0]
    code = [line for line in text.splitlines() if not re.match(r"\s*(\.loc|\.file|//|\$L__tmp)", line)]
    code = [line.split(" // ")[0] for line in code]
    return kernel.fn.__name__, hashlib.sha256("\n".join(code).encode()).hexdigest(), made.metadata.shared


def graphs():
    """Each graph as its length, its checksum, and how often it has each operation."""
    found = {}
    for preset, agents in CASES:
        lines = graph(preset, agents)
        text = "\n".join(lines)
        if folder := os.environ.get("SPR_GRAPHS"):  # to look at what differs
            with open(f"{folder}/{preset}-{agents}.txt", "w") as file:
                file.write(text)
        operations = Counter(line.split(" (")[0].split(maxsplit=3)[3] for line in lines)
        checksum = hashlib.sha256(text.encode()).hexdigest()
        found[f"{preset}, {agents}"] = {"nodes": len(lines), "sha256": checksum, "operations": dict(operations)}
    return found


def all_ptx():
    """Every kernel that `CASES` launch: its name, shared memory and the checksum of its PTX."""
    with_kernels()
    for preset, agents in CASES:
        note_launches(preset, agents)
    with ProcessPoolExecutor(2, get_context("fork")) as pool:
        made = list(pool.map(ptx, range(len(LAUNCHES)), chunksize=4))
    return sorted({f"{name} {shared} {checksum}" for name, checksum, shared in made})


if __name__ == "__main__":
    torch.set_num_threads(1)
    as_on_a_gpu()
    about = {"torch": torch.__version__.split("+")[0], "triton": triton.__version__}
    json.dump({"versions": about, "graphs": graphs(), "kernels": all_ptx()}, sys.stdout, indent=1)
