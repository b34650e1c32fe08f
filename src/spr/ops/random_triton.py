"""Owns the kernel that draws random numbers for a whole fleet, written in Triton, for a GPU only.

What an agent draws follows from its seed and from how often it has drawn before. Shapes: S agents.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _random(state, normal, uniform, NORMAL: tl.constexpr, UNIFORM: tl.constexpr, BLOCK: tl.constexpr):
    """Philox 4x32-10 (Salmon et al. 2011): four words from a seed, a place, and how often was drawn before."""
    agent = tl.program_id(0).to(tl.int64)
    seed, turn = tl.load(state + 2 * agent), tl.load(state + 2 * agent + 1)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    none = place * 0
    low, high = none + (turn & 0xFFFFFFFF).to(tl.uint32), none + (turn >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(seed, place, low, high, none)
    normals: tl.constexpr = (NORMAL + 3) // 4
    uniforms: tl.constexpr = (UNIFORM + 3) // 4
    # Normal numbers come in pairs, by their distance from 0 and an angle (Box and Muller 1958).
    some = place < normals
    target = normal + agent * NORMAL + place
    for pair in tl.static_range(2):
        far, angle = a if pair == 0 else c, b if pair == 0 else d
        far = tl.sqrt(-2.0 * tl.log((far.to(tl.float32) + 1.0) * 2.0**-32))
        angle = angle.to(tl.float32) * (6.283185307179586 * 2.0**-32)
        one, two = 2 * pair * normals, (2 * pair + 1) * normals
        tl.store(target + one, far * tl.cos(angle), mask=some & (place + one < NORMAL))
        tl.store(target + two, far * tl.sin(angle), mask=some & (place + two < NORMAL))
    place -= normals
    some = (place >= 0) & (place < uniforms)
    target = uniform + agent * UNIFORM + place
    for i in tl.static_range(4):
        word = a if i == 0 else b if i == 1 else c if i == 2 else d
        value = (word >> 8).to(tl.float32) * 2.0**-24
        tl.store(target + i * uniforms, value, mask=some & (place + i * uniforms < UNIFORM))


def random(state: Tensor, normal: int, uniform: int) -> tuple[Tensor, Tensor]:
    """Draw numbers [S, ...] of each kind, and advance the streams [S, 2]: seeds, and how often was drawn."""
    agents = len(state)
    made = torch.empty(agents, normal, device=state.device), torch.empty(agents, uniform, device=state.device)
    places = triton.cdiv(normal, 4) + triton.cdiv(uniform, 4)
    if places:
        _random[agents, triton.cdiv(places, 256)](state, *made, NORMAL=normal, UNIFORM=uniform, BLOCK=256)
        state[:, 1] += 1
    return made
