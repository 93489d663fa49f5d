"""Checkpoints of GPTQ, AWQ and float8, served on CPUs in the model's dtype, with no other package.

A weight of GPTQ or AWQ is (q - zero) * scale, q and zero of 4 or 8 bits, with a zero point and a scale for each group
of inputs. Each int32 holds 32 / bits of them, the first in the lowest bits:

    GPTQ  qweight [k / per, n]       inputs i * per .. of an output     qzeros [groups, n / per]   outputs
          g_idx [k]                  the group of each input: act-order has them out of order
    AWQ   qweight [k, n / per]       outputs                            qzeros [groups, n / per]   outputs
          its outputs lie in the order 0, 2, 4, 6, 1, 3, 5, 7

`scales` [groups, n] are of float16 or bfloat16. GPTQ's first format keeps zero points less one.

Of float8 `weight` [n, k] is e4m3 itself, times `weight_scale_inv` [n / 128, k / 128], one for each block (DeepSeek,
Qwen), or `weight_scale` [n, 1], one for each output (compressed-tensors).
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from engine.backends.torch.loading.quantised import QuantisedLinear
from engine.errors import ModelRefused

log = logging.getLogger(__name__)

WORD_BITS = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output held by each place of an AWQ word, from the lowest bits on."""
PARTS = ("qweight", "qzeros", "scales", "g_idx", "bias", "weight", "weight_scale_inv", "weight_scale")
"""Tensors that a file may have for one layer."""
MARKS = {"gptq": "qweight", "awq": "qweight", "fp8": "weight_scale_inv", "compressed-tensors": "weight_scale"}
"""Tensor that only packed layers have, by method."""
_FLOAT8 = {"num_bits": 8, "type": "float"}
_SAVED_BY = "tandem-packed"
"""Quantisation method reported to transformers, so that it leaves packed layers to this module."""
_IDLE: dict[str, tuple[Any, ...]] = {
    "dynamic": (None, {}),
    "rotation": (None, ""),
    "adapter": (None, {}),
    "is_marlin_format": (None, False),
    "pack_dtype": (None, "int32", "torch.int32"),
    "quant_type": (None, ""),
}
"""Settings which, at other values, mean mixed kinds of layers or another encoding of the files."""


@dataclass(frozen=True, slots=True)
class PackedScheme:
    """Packing of a checkpoint's layers, read from its config."""

    method: Literal["gptq", "awq", "fp8", "compressed-tensors"]
    bits: Literal[4, 8]
    group_size: int
    """Inputs that share a scale; -1: all inputs of a layer."""
    zeros_less_one: bool = False
    """Whether zero points are stored less one, as in GPTQ's first format."""
    block_rows: int = 1
    """Outputs that share an fp8 scale."""


def packed_scheme(settings: Mapping[str, Any]) -> PackedScheme | None:
    """Read the packing from config.json's quantization_config; None for a method that transformers handles.

    Raises ModelRefused for settings of GPTQ and AWQ that are not supported.
    """
    method = settings.get("quant_method")
    if method == "fp8":
        return _blocks_scheme(settings)
    if method == "compressed-tensors":
        return _rows_scheme(settings)
    if method not in ("gptq", "awq"):
        return None
    bits, group = settings.get("bits", settings.get("w_bit")), settings.get("group_size", settings.get("q_group_size"))
    if bits not in ((4, 8) if method == "gptq" else (4,)):
        known = "4 and 8" if method == "gptq" else "4"
        raise ModelRefused(f"the model was quantised by {method} with bits {bits!r}; only {known} are supported")
    if type(group) is not int or (group < 1 and group != -1):
        raise ModelRefused(
            f"the model was quantised by {method} with group_size {group!r}, which is not a number of inputs"
        )
    for name, idle in _IDLE.items():
        if settings.get(name) not in idle:
            raise ModelRefused(
                f"the model was quantised by {method} with {name} {settings[name]!r}, which is not supported"
            )
    if method == "awq":
        form = _text(settings, "version", "format", "checkpoint_format") or "gemm"
        if form != "gemm":
            raise ModelRefused(f"the model was quantised by awq in the format {form}; only gemm is supported")
        return PackedScheme("awq", bits, group)
    form = _text(settings, "checkpoint_format", "format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise ModelRefused(f"the model was quantised by gptq in the format {form}; only gptq and gptq_v2 are supported")
    return PackedScheme("gptq", bits, group, zeros_less_one=form == "gptq")


def _blocks_scheme(settings: Mapping[str, Any]) -> PackedScheme | None:
    block = settings.get("weight_block_size")
    plain = settings.get("activation_scheme", "dynamic") == "dynamic" and settings.get("fmt", "e4m3") == "e4m3"
    if not plain or settings.get("expert_dtype", "fp8") != "fp8" or not isinstance(block, list | tuple):
        return None
    if len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        return None
    return PackedScheme("fp8", 8, group_size=block[1], block_rows=block[0])


def _rows_scheme(settings: Mapping[str, Any]) -> PackedScheme | None:
    groups = settings.get("config_groups")
    if settings.get("format") != "float-quantized" or not isinstance(groups, dict) or len(groups) != 1:
        return None
    if settings.get("kv_cache_scheme") or settings.get("sparsity_config") or settings.get("transform_config"):
        return None
    (group,) = groups.values()
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    if not weights.items() >= (_FLOAT8 | {"strategy": "channel", "symmetric": True}).items():
        return None
    if inputs is not None and not inputs.items() >= (_FLOAT8 | {"strategy": "token", "dynamic": True}).items():
        return None
    return PackedScheme("compressed-tensors", 8, group_size=-1)


def _text(settings: Mapping[str, Any], *names: str) -> str:
    """Return the first of the settings that is set.

    Raises ModelRefused where two of them differ.
    """
    values = {str(settings[name]).lower() for name in names if settings.get(name) is not None}
    if len(values) > 1:
        raise ModelRefused(f"its quantization settings {' and '.join(names)} differ: {', '.join(sorted(values))}")
    return values.pop() if values else ""


# ------------------------------------------------------------------------------------------------------- unpacking


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 [a, b] to uint8 [a, b, 32 / bits], the lowest bits first."""
    places = [(words >> shift & (1 << bits) - 1).to(torch.uint8) for shift in range(0, WORD_BITS, bits)]
    return torch.stack(places, -1)


def layer_of(parts: Mapping[str, Tensor], scheme: PackedScheme, dtype: torch.dtype) -> QuantisedLinear:
    """Make a layer from its tensors, named as in `PARTS`.

    Raises ValueError for tensors whose shapes do not match.
    """
    if scheme.method in ("fp8", "compressed-tensors"):
        return _float8_layer(parts, scheme, dtype)
    return _integer_layer(parts, scheme, dtype)


def _float8_layer(parts: Mapping[str, Tensor], scheme: PackedScheme, dtype: torch.dtype) -> QuantisedLinear:
    mark = MARKS[scheme.method]
    values, scales = (_matrix(parts, name) for name in ("weight", mark))
    if values.dtype != torch.float8_e4m3fn or not scales.is_floating_point():
        raise ValueError(f"dtypes are {values.dtype}, {scales.dtype}")
    n, k = values.shape
    group = k if scheme.group_size == -1 else scheme.group_size
    if k % group or tuple(scales.shape) != (-(-n // scheme.block_rows), k // group):
        shapes = f"weight {list(values.shape)}, {mark} {list(scales.shape)}"
        raise ValueError(f"{shapes} do not match blocks of {scheme.block_rows} outputs and {group} inputs")
    scales = scales.float().repeat_interleave(scheme.block_rows, 0)[:n]
    by_row = scheme.group_size == -1
    return QuantisedLinear(values, scales[:, 0] if by_row else scales, _bias(parts.get("bias"), n, dtype), dtype)


def _integer_layer(parts: Mapping[str, Tensor], scheme: PackedScheme, dtype: torch.dtype) -> QuantisedLinear:
    qweight, qzeros, scales = (_matrix(parts, name) for name in ("qweight", "qzeros", "scales"))
    if not scales.is_floating_point() or qweight.dtype != torch.int32 or qzeros.dtype != torch.int32:
        raise ValueError(f"dtypes are {qweight.dtype}, {qzeros.dtype}, {scales.dtype}")
    if scheme.zeros_less_one:
        # The writers subtract one from the whole word, so a place below zero borrows from the next. Adding the word
        # undoes it.
        ones = sum(1 << shift for shift in range(0, WORD_BITS, scheme.bits))
        qzeros = qzeros + ones  # wraps around
    values, zeros = unpack(qweight, scheme.bits), unpack(qzeros, scheme.bits)
    if scheme.method == "awq":
        places = torch.tensor(AWQ_ORDER, device=values.device).argsort()
        values, zeros = values[..., places].flatten(1).t(), zeros[..., places]
    else:
        values = values.permute(1, 0, 2).flatten(1)
    zeros = zeros.flatten(1).t()
    n, k = values.shape
    group = k if scheme.group_size == -1 else scheme.group_size
    groups = scales.shape[0]
    if k != group * groups or tuple(scales.shape) != (groups, n) or tuple(zeros.shape) != (n, groups):
        shapes = ", ".join(f"{name} {list(parts[name].shape)}" for name in ("qweight", "qzeros", "scales"))
        raise ValueError(f"{shapes} do not match groups of {group} of {k} inputs, and {n} outputs")
    order = _order(parts.get("g_idx"), k, groups)
    if order is not None:
        values = values[:, order]
    middle = 1 << scheme.bits - 1
    signed_zeros = _signed(zeros, middle)
    return QuantisedLinear(
        _signed(values, middle),
        scales.t().contiguous(),
        _bias(parts.get("bias"), n, dtype),
        dtype,
        bits=scheme.bits,
        zeros=signed_zeros if signed_zeros.any() else None,
        order=order,
    )


def _signed(values: Tensor, middle: int) -> Tensor:
    """Convert uint8 to int8 with `middle` at 0, which changes no difference."""
    return (values - middle).contiguous().view(torch.int8)  # wraps around


def _matrix(parts: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in parts:
        raise ValueError(f"{name} is missing")
    if parts[name].dim() != 2:
        raise ValueError(f"{name} has the shape {list(parts[name].shape)}, not that of a matrix")
    return parts[name]


def _bias(bias: Tensor | None, n: int, dtype: torch.dtype) -> Tensor | None:
    if bias is not None and tuple(bias.shape) != (n,):
        raise ValueError(f"bias has the shape {list(bias.shape)}, not {[n]}")
    return None if bias is None else bias.to(dtype)


def _order(group_of: Tensor | None, k: int, groups: int) -> Tensor | None:
    """Return the inputs ordered by group, int64 [k]; None where they are already in order."""
    if group_of is None:
        return None
    group_of = group_of.long()
    if tuple(group_of.shape) != (k,) or not torch.equal(
        group_of.sort().values, torch.arange(groups, device=group_of.device).repeat_interleave(k // groups)
    ):
        raise ValueError(f"g_idx does not put {k} inputs into {groups} groups of one size")
    order = group_of.argsort(stable=True)
    return None if torch.equal(order, torch.arange(k, device=order.device)) else order


# --------------------------------------------------------------------------------------------------------- loading


class PackedFiles:
    """Packed layers of a model directory, read one by one."""

    def __init__(self, path: Path, scheme: PackedScheme) -> None:
        """Open the directory's files.

        Raises ModelRefused.
        """
        mark = f".{MARKS[scheme.method]}"
        self._stack = ExitStack()
        self._where: dict[str, Any] = {}
        try:
            for file in sorted(path.glob("*.safetensors")):
                opened = self._stack.enter_context(safe_open(file, framework="pt"))
                self._where.update(dict.fromkeys(opened.keys(), opened))
        except (OSError, SafetensorError) as error:
            raise ModelRefused(f"{path}: {error}") from error
        self.layers = sorted(name.removesuffix(mark) for name in self._where if name.endswith(mark))

    def read(self, layer: str) -> dict[str, Tensor]:
        names = {part: f"{layer}.{part}" for part in PARTS}
        return {part: self._where[name].get_tensor(name) for part, name in names.items() if name in self._where}

    def close(self) -> None:
        self._stack.close()


class PackedPlaceholder(nn.Module):
    """Placeholder of a packed layer until the rest of the model is loaded."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features


@register_quantization_config(_SAVED_BY)
class _PackedConfig(QuantizationConfigMixin):  # type: ignore[misc]
    def __init__(self, layers: list[str] | None = None, **_: object) -> None:
        self.quant_method = _SAVED_BY
        self.layers = layers or []


@register_quantizer(_SAVED_BY)
class _PackedQuantizer(HfQuantizer):  # type: ignore[misc]
    """Hook of transformers' loader that takes the packed layers out of a model before the other layers are loaded."""

    def _process_model_before_weight_loading(self, model: Any, **_: object) -> None:
        for name in self.quantization_config.layers:
            parent, _dot, child = name.rpartition(".")
            try:
                module = model.get_submodule(name)
            except AttributeError:
                raise ModelRefused(
                    f"the files have packed weights of {name}, which is not a module of the model"
                ) from None
            if type(module) is not nn.Linear:
                raise ModelRefused(
                    f"the files have packed weights of {name}, a {type(module).__name__}, not a linear layer"
                )
            setattr(model.get_submodule(parent), child, PackedPlaceholder(module))

    def _process_model_after_weight_loading(self, model: Any, **_: object) -> None:
        self.remove_quantization_config(model)

    @property
    def is_trainable(self) -> bool:
        return False

    def is_serializable(self) -> bool:
        return False


@torch.no_grad()
def load_packed(path: Path, config: Any, dtype: Any, scheme: PackedScheme) -> tuple[nn.Module, dict[str, Any]]:
    """Load a model and unpack its packed layers one after the other, rounded to the model's dtype.

    Also returns transformers' loading report. Raises ModelRefused, and the errors of `from_pretrained`.
    """
    files = PackedFiles(path, scheme)
    try:
        if not files.layers:
            raise ModelRefused(
                f"config.json says the model was quantised by {scheme.method}, but the files have no packed weights"
            )
        _leave_to_us(config, files.layers)
        model, loading_info = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            quantization_config=_PackedConfig(files.layers),
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        for name, layer in _read_layers(files, scheme, model):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, layer)
    finally:
        files.close()
    log.warning(
        "%d layers have weights quantised by %s, %d bits, for which there is no kernel: they are served as %s, at its"
        " memory and speed",
        len(files.layers),
        scheme.method,
        scheme.bits,
        model.dtype,
    )
    return model, loading_info


def _leave_to_us(config: Any, layers: list[str]) -> None:
    for part in {id(each): each for each in (config, config.get_text_config())}.values():
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
        if "lm_head" in layers:
            part.tie_word_embeddings = False


def _read_layers(files: PackedFiles, scheme: PackedScheme, model: Any) -> Iterator[tuple[str, nn.Module]]:
    for name in files.layers:
        absent = model.get_submodule(name)
        try:
            layer = layer_of(files.read(name), scheme, model.dtype)
        except ValueError as error:
            raise ModelRefused(f"the packed weights of {name} cannot be read: {error}") from error
        if (layer.in_features, layer.out_features) != (absent.in_features, absent.out_features):
            shape, wanted = (f"{each.out_features} x {each.in_features}" for each in (layer, absent))
            raise ModelRefused(f"the packed weights of {name} are {shape}, not {wanted}")
        yield name, layer.dequantised()
