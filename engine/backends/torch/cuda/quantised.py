"""Linear layers with quantised weights on a GPU.

Triton's kernels multiply the integers and scales of `engine/backends/torch/quantised.py`; torch's multiply float8.

Triton is imported when the first layer is made, so a machine without Triton serves everything else.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.backends.torch.quantised import QuantisedLinear, float8_rows
from engine.errors import EngineStartError
from engine.model.quantization import Weights

BLOCKS = (128, 64, 32, 16)
"""Inputs that a kernel takes at once, all of one group. int4 needs at least 32, whose halves are multiplied."""
FLOAT8_MULTIPLE = 16
"""Multiple that torch's float8 product requires of inputs and outputs."""
FLOAT8_CAPABILITY = (8, 9)
"""Smallest compute capability (Ada) that multiplies float8, and for which Triton converts it."""


def gpu_linear(layer: nn.Linear, kind: Weights, device: torch.device) -> nn.Module:
    """Quantise the layer on the device; a layer that cannot have weights of this kind stays as it is."""
    if kind == "fp8":
        return Float8Linear.of(layer, device) if _fits_float8(layer) else layer
    return WeightOnlyLinear.of(QuantisedLinear.of(layer, kind, device))


def of_checkpoint(layer: QuantisedLinear, float8_inputs: bool) -> nn.Module:
    """Wrap a layer that was saved quantised, on the device of its values.

    `float8_inputs`: activations may become float8.
    """
    if float8_inputs and _fits_float8(layer):
        return Float8Linear(layer.values, layer.scales, layer.bias, layer.dtype)
    return WeightOnlyLinear.of(layer)


def _fits_float8(layer: nn.Linear | QuantisedLinear) -> bool:
    return layer.in_features % FLOAT8_MULTIPLE == 0 and layer.out_features % FLOAT8_MULTIPLE == 0


def check_gpu(kind: Weights, device: torch.device) -> None:
    """Check that the device can compute with such weights.

    Raises EngineStartError.
    """
    load_kernels()
    if kind != "fp8":
        return
    if (capability := torch.cuda.get_device_capability(device)) < FLOAT8_CAPABILITY:
        needed = "a GPU of compute capability 8.9 (Ada, Hopper) or more"
        raise EngineStartError("weights", f"fp8 needs {needed}, this GPU has {capability[0]}.{capability[1]}: use int8")
    try:
        Float8Linear.of(nn.Linear(32, 32, bias=False), device)(torch.ones(3, 32, dtype=torch.bfloat16, device=device))
    except RuntimeError as error:  # some of torch's kernels exist for some GPUs only
        raise EngineStartError("weights", f"torch does not multiply float8 on this GPU: {error}") from error


def load_kernels() -> Any:
    """Import the module of kernels.

    Raises EngineStartError.
    """
    try:
        from engine.backends.torch.cuda import linear_kernels
    except ImportError as error:
        raise EngineStartError("weights", f"quantised weights on a GPU need Triton: {error}") from error
    return linear_kernels


class WeightOnlyLinear(nn.Module):
    """Weight-only quantised layer, [..., in_features] to [..., out_features] in the input's dtype.

    It computes the same as QuantisedLinear, with sums in another order.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None

    def __init__(
        self,
        values: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        order: Tensor | None,
        bias: Tensor | None,
        bits: int,
        block: int,
        dtype: torch.dtype,
    ) -> None:
        """Take `values`, `scales`, `zeros`, `bits` and `block` as the kernel does (`linear_kernels.py`)."""
        super().__init__()
        self.out_features = values.shape[1] if bits == 4 else values.shape[0]
        self.in_features = values.shape[0] * block if bits == 4 else values.shape[1]
        self.bits, self.block, self.dtype = bits, block, dtype
        self.bias = bias
        for name, buffer in (("values", values), ("scales", scales), ("zeros", zeros), ("order", order)):
            self.register_buffer(name, buffer, persistent=False)
        self._multiply: Callable[..., Tensor] = load_kernels().quantised_linear

    @classmethod
    def of(cls, layer: QuantisedLinear) -> "WeightOnlyLinear":
        """Convert a layer on the device of its values.

        Raises EngineStartError for a group size that no kernel takes.
        """
        scales, zeros = layer.scales, layer.zeros
        bits, block = layer.bits, BLOCKS[0]
        if layer.grouped:
            block = next((block for block in BLOCKS if layer.group % block == 0), 0)
            if block == 0:
                raise EngineStartError("model", f"groups of {layer.group} inputs are not a multiple of {BLOCKS[-1]}")
            bits = 8 if block < 32 else bits
            scales, zeros = scales.t().contiguous(), None if zeros is None else zeros.t().contiguous()
        else:
            bits = 8
        values = pack_int4(layer.values, block) if bits == 4 else layer.values.contiguous()
        return cls(values, scales, zeros, layer.order, layer.bias, bits, block, layer.dtype)

    @classmethod
    def joined(cls, layers: Sequence["WeightOnlyLinear"]) -> "WeightOnlyLinear":
        """Join layers that agree into one with all outputs."""
        first, zeros = layers[0], None
        if any(each.zeros is not None for each in layers):
            zeros = torch.cat([_zeros_of(each) for each in layers], -1)
        values = torch.cat([each.values for each in layers], 1 if first.bits == 4 else 0)
        scales = torch.cat([each.scales for each in layers], -1)
        return cls(values, scales, zeros, first.order, _biases(layers), first.bits, first.block, first.dtype)

    def agrees_with(self, others: Sequence["WeightOnlyLinear"]) -> bool:
        """Return whether the layers have the same inputs, in the same order, and one kind."""
        return all(
            (self.bits, self.block, self.scales.dtype, self.scales.shape[:-1], self.bias is None)
            == (other.bits, other.block, other.scales.dtype, other.scales.shape[:-1], other.bias is None)
            and (self.order is None) == (other.order is None)
            and (self.order is None or other.order is None or torch.equal(self.order, other.order))
            for other in others
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.order is not None:
            x = x.index_select(-1, self.order)
        return self._multiply(
            x, self.values, self.scales, self.zeros, self.bias, self.bits, self.block, self.out_features
        )


class Float8Linear(nn.Module):
    """Float8 layer, [..., in_features] to [..., out_features].

    Weights are float8_e4m3fn with a scale for each output; activations become float8 with a scale for each row. The
    product is rounded to bfloat16, then to the input's dtype.
    """

    values: Tensor
    scales: Tensor

    def __init__(self, values: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        """Take float8_e4m3fn `values` [out_features, in_features] and float32 `scales` [out_features]."""
        super().__init__()
        self.out_features, self.in_features = values.shape
        self.dtype, self.bias = dtype, bias
        self.register_buffer("values", values, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self._rows_to_float8: Callable[[Tensor], tuple[Tensor, Tensor]] = load_kernels().rows_to_float8

    @classmethod
    def of(cls, layer: nn.Linear, device: torch.device) -> "Float8Linear":
        bias = None if layer.bias is None else layer.bias.data.to(device)
        return cls(*float8_rows(layer.weight.data.to(device)), bias, layer.weight.dtype)

    @classmethod
    def joined(cls, layers: Sequence["Float8Linear"]) -> "Float8Linear":
        """Join the layers into one with all outputs."""
        # As bytes: not every version of torch concatenates float8.
        values = torch.cat([each.values.view(torch.uint8) for each in layers]).view(torch.float8_e4m3fn)
        return cls(values, torch.cat([each.scales for each in layers]), _biases(layers), layers[0].dtype)

    def forward(self, x: Tensor) -> Tensor:
        rows, scales = self._rows_to_float8(x.reshape(-1, self.in_features))
        out: Tensor = torch._scaled_mm(
            rows, self.values.t(), scale_a=scales[:, None], scale_b=self.scales[None], out_dtype=torch.bfloat16
        )
        out = out.to(x.dtype).view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


def pack_int4(values: Tensor, block: int) -> Tensor:
    """Pack int8 [n, k], from -8 to 7, into uint8 [k / block, n, block / 2].

    A byte holds the elements i (low) and i + block / 2 of a block, each plus 8. So a tile's rows of a block are
    contiguous.
    """
    n, k = values.shape
    halves = (values + 8).view(torch.uint8).view(n, k // block, 2, block // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).transpose(0, 1).contiguous()


def _biases(layers: Sequence[WeightOnlyLinear] | Sequence[Float8Linear]) -> Tensor | None:
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return torch.cat(biases) if biases else None


def _zeros_of(layer: WeightOnlyLinear) -> Tensor:
    return torch.zeros_like(layer.scales, dtype=torch.int8) if layer.zeros is None else layer.zeros
