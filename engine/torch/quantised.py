"""Linear layers whose weights are quantised at load; their `forward` is the reference for the kernels.

Weight-only and symmetric: row i of the matrix is `values[i] * scales[i]`, the scale the row's largest magnitude over
127. So every value is exact in bfloat16, and the only rounding is that of the weight to its nearest multiple.
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
ROWS_AT_ONCE = 4096
"""Of a matrix that is quantised or multiplied: what it takes in float32 is as large as these."""
MIN_SHARE = 0.5
"""Of a model's weights, without its embeddings, that must be in linear layers: else little would be gained by it."""


class QuantisedLinear(nn.Module):
    """[..., in_features] to [..., out_features], computed in float32 and rounded to the input's dtype."""

    values: Tensor
    """int8 [out_features, in_features], from -127 to 127."""
    scales: Tensor
    """float32 [out_features]"""

    def __init__(self, values: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = values.shape
        self.dtype = dtype
        """Of the layer that this was, and so of what it is given."""
        self.bias = bias
        self.register_buffer("values", values, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    @classmethod
    def of(cls, layer: nn.Linear) -> "QuantisedLinear":
        values, scales = quantise(layer.weight.data)
        bias = None if layer.bias is None else layer.bias.data.clone()
        return cls(values, scales, bias, layer.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        parts = [
            linear(wide, self.values[first : first + ROWS_AT_ONCE].float())
            for first in range(0, self.out_features, ROWS_AT_ONCE)
        ]
        out = torch.cat(parts, -1) * self.scales
        return (out if self.bias is None else out + self.bias.float()).to(x.dtype)


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


@torch.inference_mode()
def quantise_linears(model: nn.Module, kind: Weights) -> None:
    """Replace the linear layers of a model on the CPU, one after the other, so that both kinds of weights are never
    there at once. Embeddings stay, also one that shared its matrix with the output layer. Raises EngineStartError."""
    if kind == "auto":
        return
    layers = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and type(child.weight) is nn.Parameter
    ]
    _refuse_little_gain(model, kind, [layer for *_, layer in layers])
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    for parent, name, layer in layers:
        setattr(parent, name, QuantisedLinear.of(layer))
        if layer.weight is not embedding.weight:
            forget_file_pages(layer.weight.data)
    log.info("%d linear layers have %s weights", len(layers), kind)


def _refuse_little_gain(model: nn.Module, kind: Weights, layers: list[nn.Linear]) -> None:
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    total = sum(weight.numel() for weight in model.parameters() if id(weight) not in embeddings)
    gained = sum(layer.weight.numel() for layer in layers if id(layer.weight) not in embeddings)
    if gained < MIN_SHARE * total:
        share = f"{100 * gained / total:.0f} % of this model's weights"
        raise EngineStartError("weights", f"{kind} is of linear layers, which hold only {share}")
