"""Owns operations that a GPU wants written its own way; the tests compare each with its plain twin in PyTorch.

| here | plain twin |
|---|---|
| `linear` | `F.linear` |
| `convolve`, `shift_and_add` | `F.conv2d` |
| `pad_same`, `max_pool_same` | a loop over windows, by TensorFlow's rule |
| `convolved_one_hot` | `F.conv2d` over one constant plane per class |
| `batch_norm` | `F.batch_norm` with batch statistics |
| `take_action` | `Tensor.gather` |
| `shifted_pixels`, `shifted_rows` | each the other's, and a loop over pixels |

Matrix products are taken in the dtype of their weight; what they return is float32 or wider.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from spr.ops import conv_cpu, linear_cpu

LEAST_SPAN = 1e-5  # by which a sample of latents is divided, if its values lie closer together


def at_least_fp32(x: Tensor) -> Tensor:
    """Return x in float32, or in its own dtype where that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def on_cpu(x: Tensor) -> bool:
    """Say whether operators for a CPU take such a tensor: one agent's, in float32, outside of the compiler."""
    if torch.compiler.is_compiling() or x.device.type != "cpu" or x.dtype != torch.float32:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x)


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return x unchanged, with its gradient multiplied by factor."""
    if factor == 1:
        return x
    return x * factor + x.detach() * (1 - factor)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias, written so that the gradient of the weight needs no transposing.

    Under vmap F.linear gives that gradient transposed, and laying it out again costs more than computing it.
    """
    if on_cpu(x) and x.dim() == weight.dim() == 2:
        return linear_cpu.linear(x, weight, bias)
    made = at_least_fp32((weight @ x.to(weight.dtype).mT).mT)
    return made if bias is None else made + bias


def convolve(x: Tensor, weight: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
    """Convolve [B, H, W, C] to [B, H', W', out], without a bias, the way the device does it best.

    A CPU has fast convolutions. Under vmap a fleet's convolutions become grouped ones, which are slow in cuDNN (H200,
    fleet of 10), so a GPU takes one matrix product instead.
    """
    assert x.dim() == weight.dim() == 4
    assert weight.shape[-1] % stride == 0, "a kernel must be a multiple of its stride"
    assert stride == 1 or padding == 0, "padding is for a stride of 1"
    if on_cpu(x):
        return conv_cpu.convolve(x, weight, None, stride, padding)
    if x.device.type == "cpu":
        return F.conv2d(x.permute(0, 3, 1, 2), weight, None, stride, padding).permute(0, 2, 3, 1)
    return shift_and_add(x, weight, stride, padding)


def shift_and_add(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """Convolve by one GEMM that computes every kernel tap at every pixel; partial results are shifted and summed.

    There is no im2col buffer, and no gradient needs atomic addition. For 3x3 kernels the nine partial outputs would
    dominate memory traffic, so columns are concatenated before the GEMM and only rows are summed after it. A stride is
    folded into the channels first (space to depth), so the kernel must be a multiple of the stride.
    """
    out, channels, kernel, _ = weight.shape
    batch, height, width, _ = x.shape
    taps, rows, columns = kernel // stride, height // stride, width // stride
    out_height, out_width = rows + 2 * padding - taps + 1, columns + 2 * padding - taps + 1
    blocks = x[:, : rows * stride, : columns * stride].reshape(batch, rows, stride, columns, stride, channels)
    kernels = weight.reshape(out, channels, taps, stride, taps, stride).permute(2, 4, 0, 1, 3, 5)
    if x.stride(3) == 1:  # channels last in memory: keep that order within a block
        blocks, kernels = blocks.permute(0, 1, 3, 2, 4, 5), kernels.permute(0, 1, 2, 4, 5, 3)
    else:
        blocks = blocks.permute(0, 1, 3, 5, 2, 4)
    blocks = F.pad(blocks.flatten(3), (0, 0, padding, padding)).to(weight.dtype)  # [B, rows, columns, channels]
    kernels = kernels.flatten(3)  # [taps down, taps right, out, channels]
    right = taps
    if taps > 2:
        blocks = torch.cat([blocks[:, :, j : j + out_width] for j in range(taps)], -1)
        kernels, right = kernels.permute(0, 2, 1, 3).flatten(2)[:, None], 1
    products = (blocks.flatten(0, 2) @ kernels.flatten(0, 2).T).view(batch, rows, -1, taps, right, out)
    partials = []
    for i in range(taps):
        # Rows of padding are not multiplied: a tap that falls on them adds zeros.
        above, below = max(padding - i, 0), max(i + out_height - padding - rows, 0)
        partial = products[:, max(i - padding, 0) : i - padding + out_height, :, i]
        partials += [
            F.pad(at_least_fp32(partial[:, :, j : j + out_width, j]), (0, 0, 0, 0, above, below)) for j in range(right)
        ]
    return sum(partials[1:], partials[0])


def same_padding(length: int, kernel: int, stride: int) -> tuple[int, int]:
    """Return how many pixels TensorFlow's SAME adds before and after a side, so that ceil(length / stride) come out.

    An odd one goes to the end, which the library's own padding, the same on both sides, can't do.
    """
    outputs = -(-length // stride)
    added = max((outputs - 1) * stride + kernel - length, 0)
    return added // 2, added - added // 2


def pad_same(x: Tensor, kernel: int, stride: int) -> Tensor:
    """Add zeros around [B, H, W, C], as much as TensorFlow's SAME would before a convolution."""
    down, right = (same_padding(side, kernel, stride) for side in x.shape[1:3])
    return F.pad(x, (0, 0, *right, *down))


def max_pool_same(x: Tensor) -> Tensor:
    """Take the maximum of 3x3 windows, 2 apart, with TensorFlow's SAME: half of [B, H, W, C] each way, rounded up.

    At an even size it pads one pixel at the end only, at an odd size one on both sides, and with -inf. The library does
    the former by windows that reach beyond the end, so nothing is copied.
    """
    assert x.dim() == 4
    before = [same_padding(side, 3, 2)[0] for side in x.shape[1:3]]
    return F.max_pool2d(x.permute(0, 3, 1, 2), 3, 2, before, ceil_mode=True).permute(0, 2, 3, 1)


def pooled_like(x: Tensor, channels: int, which: bool) -> tuple[Tensor, Tensor]:
    """Return places for what is so pooled of [S, N, H, W, C]; and for which of its window each is, if wanted."""
    agents, count, height, width, _ = x.shape
    shape = agents, count, -(-height // 2), -(-width // 2), channels
    return x.new_empty(shape), x.new_empty(shape if which else (agents, 0), dtype=torch.uint8)


def transition(
    z: Tensor,
    action_bias: Tensor,
    first: Tensor,
    bn_weight: Tensor,
    bn_bias: Tensor,
    second: Tensor,
    bias: Tensor,
    eps: float,
) -> Tensor:
    """Predict the next latents [B, H, W, C] from these and from what actions add to the first convolution."""
    x = F.relu(convolve(z, first, padding=1) + action_bias)
    x = batch_norm(x, bn_weight, bn_bias, eps)
    return renormalise(F.relu(convolve(x, second, padding=1) + bias))


def renormalise(x: Tensor) -> Tensor:
    """Scale each sample of [B, ...] to [0, 1] over all its values, in float32 or wider."""
    flat = at_least_fp32(x).flatten(1)
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    return ((flat - low) / (high - low).clamp(min=LEAST_SPAN)).view(x.shape)


def convolved_one_hot(weight: Tensor, index: Tensor, height: int, width: int) -> Tensor:
    """Convolve (3x3, padding 1) one constant plane per class, one-hot by index [B], without building the planes.

    weight [C, A, 3, 3] -> [B, H, W, C]. A plane of ones convolved is the sum of the kernel taps that fall inside, so
    one table [A, H * W * C] holds every answer. With real planes the GEMM would be C + A channels wide, which is rarely
    a multiple of what a GPU aligns to.
    """
    assert (weight.dim(), index.dim()) == (4, 1)
    channels, classes = weight.shape[:2]
    weight = at_least_fp32(weight)
    inside = F.unfold(weight.new_ones(1, 1, height, width), 3, padding=1)[0]  # [9, H * W], 0 where a tap is outside
    table = inside.T @ weight.permute(2, 3, 1, 0).reshape(9, -1)  # [H * W, A * C]
    table = table.view(-1, classes, channels).transpose(0, 1).flatten(1)  # [A, H * W * C]
    # Not F.one_hot: it reads the data on the host, which a CUDA graph can't capture.
    one_hot = (index[:, None] == torch.arange(classes, device=index.device)).to(table.dtype)
    return (one_hot @ table).view(-1, height, width, channels)


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalise [B, H, W, C] by batch statistics.

    The library's wants channels first, and the gradient of its variance sums x once more; this form needs two sums.
    What a difference of means loses in digits is far below eps.
    """
    assert (x.dim(), weight.dim(), bias.dim()) == (4, 1, 1)
    if on_cpu(x):
        return F.batch_norm(x.permute(0, 3, 1, 2), None, None, weight, bias, True, eps=eps).permute(0, 2, 3, 1)
    mean, square = x.mean((0, 1, 2)), x.square().mean((0, 1, 2))
    variance = (square - mean.square()).clamp(min=0)
    scale = weight * (variance + eps).rsqrt()
    return x * scale + (bias - mean * scale)


def take_action(outputs: Tensor, action: Tensor) -> Tensor:
    """Return the row [B, Z] of the given actions [B] from all actions' [B, A, Z]."""
    assert (outputs.dim(), action.dim()) == (3, 1)
    # Not by an index: its gradient would be added atomically, and a GPU's compiler has read a row from the wrong place.
    chosen = action[:, None] == torch.arange(outputs.shape[1], device=action.device)  # [B, A]
    return torch.where(chosen[..., None], outputs, 0).sum(1)


def shifted_pixels(
    frames: Tensor, frame: Tensor, shift: Tensor, corner: Tensor | None = None, margin: Tensor | None = None
) -> Tensor:
    """Stack planes [N, H, W], chosen by index [..., P], shifted by pixels [..., 2]; clamping replicates the edge.

    The edge is the frame's, or that of a crop with its corner at [..., 2] that is smaller by a margin [...]. A GPU
    computes the indices on the fly: one gather from the replay to the observation.
    """
    assert frames.dim() == 3
    assert frame.dim() == shift.dim()
    places = []
    for axis, length in enumerate(frames.shape[-2:]):
        place = arange32(length, frames.device) + shift[..., axis, None]  # [..., length]
        if corner is None or margin is None:
            places.append(place.clamp(0, length - 1))
        else:
            last = length - 1 - margin[..., None]
            places.append(torch.minimum(place.clamp(min=0), last) + corner[..., axis, None])
    rows, columns = places
    return frames[frame[..., None, None], rows[..., None, :, None], columns[..., None, None, :]]


def shifted_rows(frames: Tensor, frame: Tensor, shift: Tensor, largest_shift: int) -> Tensor:
    """Do the same by copying whole rows, which suits a CPU: on two cores 8 to 10 ms a batch, by pixels 29 to 30.

    Rows are copied from frames padded sideways by the largest shift, starting further left or right.
    """
    assert frames.dim() == 3
    assert frame.dim() == shift.dim()
    height, width = frames.shape[-2:]
    down, right = shift.unbind(-1)
    rows = (torch.arange(height, device=frames.device) + down[..., None]).clamp(0, height - 1)  # [..., H]
    row_of = frame[..., None] * height + rows[..., None, :]  # [..., P, H]
    flat = frames.reshape(-1, width)
    left, end = flat[:, :1].expand(-1, largest_shift), flat[:, -1:].expand(-1, largest_shift)
    wide = torch.cat([left, flat, end], 1)
    start = row_of * wide.shape[1] + (largest_shift + right[..., None, None])
    stacked = wide.view(-1).unfold(0, width, 1).index_select(0, start.reshape(-1))
    return stacked.view(*row_of.shape, width)


def arange32(end: int, device: torch.device) -> Tensor:
    """Return 0, 1, ... in 32 bits: a GPU computes an index from them for every pixel, and 64 bits cost more."""
    return torch.arange(end, device=device, dtype=torch.int32)
