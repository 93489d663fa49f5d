"""Linear layers whose weights are quantised at load; their `forward` is the reference for the kernels.

Weight-only and symmetric. int8: row i of the matrix is `values[i] * scales[i]`, the scale the row's largest magnitude
over 127. int4: each GROUP of a row has a scale, and its element of the largest magnitude is the lowest value, -8. So
every value is exact in bfloat16, and the only rounding is that of the weight to its nearest multiple.
"""

import logging

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from engine.errors import EngineStartError
from engine.torch.memory import forget_file_pages
from engine.variant import Weights

log = logging.getLogger(__name__)

LARGEST = 127
LOWEST_INT4, HIGHEST_INT4 = -8, 7
GROUP = 32
"""Inputs that share a scale of int4 weights; the kernels have the same number."""
ROWS_AT_ONCE = 4096
"""Of a matrix that is quantised or multiplied: what it takes in float32 is as large as these."""
MIN_SHARE = 0.5
"""Of a model's weights, without its embeddings, that must be in linear layers: else little would be gained by it."""


class QuantisedLinear(nn.Module):
    """[..., in_features] to [..., out_features], computed in float32 and rounded to the input's dtype."""

    values: Tensor
    """int8 [out_features, in_features], from -127 to 127, or from -8 to 7, two of which the kernels pack in a byte."""
    scales: Tensor
    """float32 [out_features], or bfloat16 [out_features, in_features / GROUP]."""

    def __init__(self, values: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = values.shape
        self.dtype = dtype
        """Of the layer that this was, and so of what it is given."""
        self.bias = bias
        self.register_buffer("values", values, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    @classmethod
    def of(cls, layer: nn.Linear, kind: Weights = "int8") -> "QuantisedLinear":
        """int4 only where the inputs can be divided into groups."""
        grouped = kind == "int4" and layer.in_features % GROUP == 0
        values, scales = (quantise_groups if grouped else quantise)(layer.weight.data)
        bias = None if layer.bias is None else layer.bias.data.clone()
        return cls(values, scales, bias, layer.weight.dtype)

    @property
    def grouped(self) -> bool:
        """int4."""
        return self.scales.dim() == 2

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        parts = [
            linear(wide, self._rows(slice(first, first + ROWS_AT_ONCE)))
            for first in range(0, self.out_features, ROWS_AT_ONCE)
        ]
        out = torch.cat(parts, -1)
        out = out if self.grouped else out * self.scales
        return (out if self.bias is None else out + self.bias.float()).to(x.dtype)

    def _rows(self, rows: slice) -> Tensor:
        """float32 [rows, in_features], of int8 without the scale."""
        values = self.values[rows].float()
        if not self.grouped:
            return values
        return (values.view(len(values), -1, GROUP) * self.scales[rows].float()[..., None]).flatten(-2)


def quantise(weights: Tensor) -> tuple[Tensor, Tensor]:
    """[n, k] of any float dtype to values int8 [n, k] and scales float32 [n]."""
    values, scales = torch.empty(weights.shape, dtype=torch.int8), torch.empty(weights.shape[0])
    for first in range(0, len(weights), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        wide = weights[rows].float()
        scale = wide.abs().amax(-1) / LARGEST
        scales[rows] = scale = torch.where(scale > 0, scale, 1.0)
        values[rows] = (wide / scale[:, None]).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)
    return values, scales


def quantise_groups(weights: Tensor) -> tuple[Tensor, Tensor]:
    """[n, k] of any float dtype to values int8 [n, k] and scales bfloat16 [n, k / GROUP]."""
    n, k = weights.shape
    values, scales = torch.empty(n, k, dtype=torch.int8), torch.empty(n, k // GROUP, dtype=torch.bfloat16)
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
    """Replace the linear layers of a model on the CPU, one after the other, so that both kinds of weights are never
    there at once. Embeddings stay, also one that shared its matrix with the output layer. Where others get int4, the
    output layer gets int8: it says what comes next with no layer after it to mend an error. Raises EngineStartError."""
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
    grouped = 0
    for parent, name, layer in layers:
        made = QuantisedLinear.of(layer, "int8" if layer is output else kind)
        setattr(parent, name, made)
        grouped += made.grouped
        if layer.weight is not embedding.weight:
            forget_file_pages(layer.weight.data)
    log.info("%d linear layers have int8 weights, %d have int4 weights", len(layers) - grouped, grouped)


def _refuse_little_gain(model: nn.Module, kind: Weights, layers: list[nn.Linear]) -> None:
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    total = sum(weight.numel() for weight in model.parameters() if id(weight) not in embeddings)
    gained = sum(layer.weight.numel() for layer in layers if id(layer.weight) not in embeddings)
    if gained < MIN_SHARE * total:
        share = f"{100 * gained / total:.0f} % of this model's weights"
        raise EngineStartError("weights", f"{kind} is of linear layers, which hold only {share}")
