"""Packing of linear layers: which layers the kernels can multiply, and their weights in the kernels' order."""

from typing import TypeGuard

import torch
from torch import nn

from engine.backends.torch.loading.quantised import QuantisedLinear
from engine.backends.torch.native.kernels import Kernels, PackedMatrix


def is_packable(module: object) -> TypeGuard[nn.Linear | QuantisedLinear]:
    """Return whether the module is exactly a linear layer, of any dtype: subclasses may compute something else."""
    return type(module) in (nn.Linear, QuantisedLinear)


def can_pack(module: object) -> bool:
    """Return whether the module is a linear layer of bfloat16, saved so or quantised here.

    A layer whose weight is a tensor of another class (torchao's, say) only looks like one.
    """
    if not is_packable(module) or module.in_features % 2:
        return False
    if isinstance(module, QuantisedLinear):
        return module.made_here and module.dtype is torch.bfloat16
    return type(module.weight) is nn.Parameter and module.weight.dtype is torch.bfloat16


def pack(kernels: Kernels, linear: nn.Linear | QuantisedLinear) -> PackedMatrix:
    """Pack the weights of a layer that `can_pack`.

    The layer must not be used after this.
    """
    if isinstance(linear, QuantisedLinear):
        return (kernels.pack_int4 if linear.grouped else kernels.pack_int8)(linear.values, linear.scales)
    return kernels.pack(linear.weight.data)


def pack_gated(kernels: Kernels, gate: nn.Linear | QuantisedLinear, up: nn.Linear | QuantisedLinear) -> PackedMatrix:
    """Pack two layers of one type and size whose products are taken together; outputs must be a multiple of 32."""
    if isinstance(gate, QuantisedLinear):
        assert isinstance(up, QuantisedLinear)
        pack_both = kernels.pack_gated_int4 if gate.grouped else kernels.pack_gated_int8
        return pack_both((gate.values, gate.scales), (up.values, up.scales))
    assert isinstance(up, nn.Linear)
    return kernels.pack_gated(gate.weight.data, up.weight.data)
