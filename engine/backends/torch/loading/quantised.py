"""Linear layers with quantised weights; their `forward` is the reference for the kernels.

Weights quantised at load are weight-only and symmetric. int8: row i of the matrix is `values[i] * scales[i]`, the scale
the row's largest magnitude over 127. int4: each GROUP of a row has a scale, and its element of the largest magnitude
gets the lowest value, -8. So every value is exact in bfloat16, and the only rounding is that of the weight to its
nearest multiple. Weights saved quantised (`packed.py`) may have groups of other sizes, zero points, and inputs in
another order.
"""

import logging
from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from engine.backends.torch.memory import forget_file_pages
from engine.errors import EngineStartError
from engine.model.quantization import Weights

log = logging.getLogger(__name__)

LARGEST = 127
LOWEST_INT4, HIGHEST_INT4 = -8, 7
GROUP = 32
"""Inputs that share a scale of int4 weights; the kernels have the same number."""
ROWS_AT_ONCE = 4096
"""Rows quantised or multiplied at a time, to limit the float32 memory."""
MIN_SHARE = 0.5
"""Share of a model's weights, without embeddings, that must be in linear layers for quantisation to pay."""


class QuantisedLinear(nn.Module):
    """Linear layer, [..., in_features] to [..., out_features], computed in float32 and rounded to the input's dtype."""

    values: Tensor
    """Quantised weights [out_features, in_features].

    int8 from -127 to 127; int8 from -8 to 7, which the kernels pack two to a byte; or float8_e4m3fn as saved."""
    scales: Tensor
    """Scales: float32 [out_features], or floating-point [out_features, groups].

    Groups quantised here are of GROUP inputs, with bfloat16 scales."""
    zeros: Tensor | None
    """Zero points, int8 [out_features, groups], subtracted from each group's values; None: no subtraction."""
    order: Tensor | None
    """Input of each column, int64 [in_features]; None: columns are in the inputs' order."""

    def __init__(
        self,
        values: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        bits: int = 8,
        zeros: Tensor | None = None,
        order: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = values.shape
        self.dtype = dtype
        """Dtype of the original layer, and so of the inputs."""
        self.bits = bits
        self.bias = bias
        for name, buffer in (("values", values), ("scales", scales), ("zeros", zeros), ("order", order)):
            self.register_buffer(name, buffer, persistent=False)

    @classmethod
    def of(cls, layer: nn.Linear, kind: Weights = "int8") -> "QuantisedLinear":
        """Quantise a layer, int4 only where the inputs divide into groups."""
        grouped = kind == "int4" and layer.in_features % GROUP == 0
        values, scales = (quantise_groups if grouped else quantise)(layer.weight.data)
        bias = None if layer.bias is None else layer.bias.data.clone()
        return cls(values, scales, bias, layer.weight.dtype, bits=4 if grouped else 8)

    @property
    def grouped(self) -> bool:
        """Whether each group of inputs has its own scale."""
        return self.scales.dim() == 2

    @property
    def group(self) -> int:
        """Number of inputs that share a scale."""
        return self.in_features // self.scales.shape[1] if self.grouped else self.in_features

    @property
    def made_here(self) -> bool:
        """Whether `quantise` or `quantise_groups` made the weights.

        The CPU kernels know only these formats.
        """
        if self.zeros is not None or self.order is not None or self.values.dtype is not torch.int8:
            return False
        return not self.grouped or (self.bits, self.group, self.scales.dtype) == (4, GROUP, torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide if self.order is None else wide[..., self.order]
        parts = [
            linear(wide, self._rows(slice(first, first + ROWS_AT_ONCE)))
            for first in range(0, self.out_features, ROWS_AT_ONCE)
        ]
        out = torch.cat(parts, -1)
        out = out if self.grouped else out * self.scales
        return (out if self.bias is None else out + self.bias.float()).to(x.dtype)

    def dequantised(self) -> nn.Linear:
        """Return a plain layer with the weights rounded to the layer's dtype."""
        layer = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        weight = torch.empty(self.out_features, self.in_features, dtype=self.dtype)
        for first in range(0, self.out_features, ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            wide = self._rows(rows) if self.grouped else self._rows(rows) * self.scales[rows, None]
            if self.order is None:
                weight[rows] = wide.to(self.dtype)
            else:
                weight[rows, self.order] = wide.to(self.dtype)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.bias = None if self.bias is None else nn.Parameter(self.bias, requires_grad=False)  # type: ignore[assignment]
        return layer

    def _rows(self, rows: slice) -> Tensor:
        """Return rows of the weights, float32 [rows, in_features], without a scale that belongs to a whole row."""
        values = self.values[rows].float()
        if not self.grouped:
            return values
        groups = values.view(len(values), -1, self.group)
        if self.zeros is not None:
            groups = groups - self.zeros[rows].float()[..., None]
        return (groups * self.scales[rows].float()[..., None]).flatten(-2)


def quantise(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise [n, k] of any float dtype to int8 values [n, k] and float32 scales [n]."""
    values = torch.empty(weights.shape, dtype=torch.int8)
    scales = torch.empty(weights.shape[0])
    for first in range(0, len(weights), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        wide = weights[rows].float()
        scale = wide.abs().amax(-1) / LARGEST
        scales[rows] = scale = torch.where(scale > 0, scale, 1.0)
        values[rows] = (wide / scale[:, None]).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)
    return values, scales


def quantise_groups(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise [n, k] of any float dtype to int8 values [n, k] and bfloat16 scales [n, k / GROUP]."""
    n, k = weights.shape
    values = torch.empty(n, k, dtype=torch.int8)
    scales = torch.empty(n, k // GROUP, dtype=torch.bfloat16)
    for first in range(0, n, ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        groups = weights[rows].float().reshape(-1, k // GROUP, GROUP)
        extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0]
        scale = (extreme / LOWEST_INT4).bfloat16()
        scales[rows] = scale = torch.where(scale == 0, 1.0, scale)
        nearest = (groups / scale.float()[..., None]).round_().clamp_(LOWEST_INT4, HIGHEST_INT4)
        values[rows] = nearest.flatten(-2).to(torch.int8)
    return values, scales


@torch.inference_mode()
def quantise_linears(model: nn.Module, kind: Weights) -> None:
    """Replace the linear layers of a model on the CPU, one after the other, by quantised ones.

    One at a time, so that both copies of the weights never exist at once. Embeddings stay, also an embedding that
    shared its matrix with the output layer. Where other layers get int4, the output layer gets int8: no later
    layer could mend its error. Raises EngineStartError.
    """
    if kind == "auto":
        return
    layers = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and type(child.weight) is nn.Parameter
    ]
    _refuse_little_gain(model, kind, [layer for *_, layer in layers])
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    kinds = Counter[str]()
    for parent, name, layer in layers:
        own_kind: Weights = "int8" if layer is output else kind
        setattr(parent, name, QuantisedLinear.of(layer, own_kind))
        kinds[own_kind] += 1
        if layer.weight is not embedding.weight:
            forget_file_pages(layer.weight.data)
    log.info("linear layers: %s", ", ".join(f"{count} {kind}" for kind, count in kinds.items()))


def _refuse_little_gain(model: nn.Module, kind: Weights, layers: list[nn.Linear]) -> None:
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    total = sum(weight.numel() for weight in model.parameters() if id(weight) not in embeddings)
    gained = sum(layer.weight.numel() for layer in layers if id(layer.weight) not in embeddings)
    if gained < MIN_SHARE * total:
        share = f"{100 * gained / total:.0f} % of this model's weights"
        raise EngineStartError("weights", f"{kind} quantises linear layers, which hold only {share}")
