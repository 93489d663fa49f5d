"""One rank's shard of a model, cut by the model's own tensor-parallel plan (`tp_plan` of transformers).

transformers cuts the weights while it reads them, so that no rank holds more than its own. Its work at each forward
(DTensors and hooks around modules) is replaced by plain modules around plain layers: a sum over the ranks, or a gather
on rank 0. So a kernel that serves a whole layer, on a CPU or fused, also serves a shard.

    colwise                 rows of the weights: each rank has a part of the outputs
    rowwise                 columns: each rank has a term of every output          SummedOutput
    colwise_gather_output   rows, of the output layer only: rank 0 has all         GatheredLinear
    embedding_rowwise       a run of the vocabulary                                ShardedEmbedding
    packed_colwise          as colwise, with gate and up in one matrix
    moe_tp_experts          a slice of every expert                                summed after
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

from engine.backends.torch.ranks import RankGroup
from engine.errors import ModelRefused

WHOLE = frozenset({"replicate", "replicated_with_grad_allreduce"})
"""Styles of weights that every rank holds whole. The second differs in training only."""
WITHIN = frozenset({"colwise", "packed_colwise"}) | WHOLE
"""Styles after which no sum or gather follows."""
KNOWN = WITHIN | {"rowwise", "colwise_gather_output", "embedding_rowwise", "moe_tp_experts"}
VOCABULARY = frozenset({"embedding_rowwise", "colwise_gather_output"})
"""Styles whose parts may differ in size: the last ranks may have less."""


class SummedOutput(nn.Module):
    """Module of which each rank computes one term of the sum."""

    def __init__(self, local: nn.Module, group: RankGroup) -> None:
        super().__init__()
        self.local = local
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        return self._group.sum(self.local(x))


class GatheredLinear(nn.Module):
    """Linear layer of which each rank computes some outputs.

    Rank 0 returns [..., width]. The other ranks return their part, which is not read.
    """

    def __init__(self, local: nn.Linear, width: int, group: RankGroup) -> None:
        super().__init__()
        self.local = local
        self._width = width
        self._longest = -(-width // group.size)
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        part: Tensor = self.local(x)
        if not part.numel():
            return part.new_empty(*part.shape[:-1], self._width)
        if (missing := self._longest - part.shape[-1]) > 0:
            part = nn.functional.pad(part, (0, missing))
        parts = self._group.gather(part)
        return torch.cat(parts, dim=-1)[..., : self._width] if parts else part


class ShardedEmbedding(nn.Module):
    """Embedding of which each rank holds a run of the vocabulary: int64 [...] to [..., hidden]."""

    def __init__(self, local: nn.Embedding, first: int, group: RankGroup) -> None:
        """Wrap the rank's rows; `first` is the token of the first row."""
        super().__init__()
        self.local = local
        self._first = first
        self._rows = local.weight.shape[0]
        self._group = group
        local.num_embeddings, local.padding_idx = self._rows, None

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = token_ids - self._first
        here = (rows >= 0) & (rows < self._rows)
        embedded: Tensor = self.local(rows.clamp(0, max(0, self._rows - 1)))
        return self._group.sum(torch.where(here[..., None], embedded, 0))


def load_shard(path: Any, config: Any, dtype: Any, group: RankGroup) -> nn.Module:
    """Load this rank's part of the model in a directory, in evaluation mode.

    Raises ModelRefused for a model that cannot be cut for so many ranks.
    """
    refuse_by_plan(config, group.size)
    os.environ["LOCAL_RANK"] = str(group.rank)  # transformers chooses a GPU by it
    with _in_main_memory():
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            distributed_config=DistributedConfig(tp_size=group.size),
        )
    with torch.inference_mode():
        _make_local(model, group)
    return model.eval()


@contextmanager
def _in_main_memory() -> Iterator[None]:
    """Make transformers read shards into main memory within the block; they move to the device as any model does.

    To place shards itself, transformers needs the `accelerate` package.
    """
    prepare = PreTrainedModel.prepare_distribute_model.__func__

    def stay(cls: Any, distributed_config: Any, device_map: Any = None) -> Any:
        distributed_config, _, mesh = prepare(cls, distributed_config, device_map)
        return distributed_config, None, mesh

    PreTrainedModel.prepare_distribute_model = classmethod(stay)
    try:
        yield
    finally:
        del PreTrainedModel.prepare_distribute_model  # the inherited method is in effect again


def refuse_by_plan(config: Any, size: int) -> None:
    """Refuse a model by its plan alone, before gigabytes are loaded.

    Raises ModelRefused.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise ModelRefused("its weights are quantised and cannot be split: tensor_parallel must be 1")
    text = config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    for name, count in (("attention heads", heads), ("KV heads", kv_heads)):
        if count % size:
            raise ModelRefused(f"tensor_parallel {size} does not divide its {count} {name}")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    if not model.tp_plan:
        raise ModelRefused(
            f"transformers has no tensor-parallel plan for {config.model_type}: tensor_parallel must be 1"
        )
    if strange := {style for _, style in _planned(model)} - KNOWN:
        raise ModelRefused(f"its tensor-parallel plan uses {', '.join(sorted(strange))}, which Tandem does not support")
    output = model.get_output_embeddings()
    for name, style in _planned(model):
        _refuse_cut(model, name, style, output, size)


def _refuse_cut(model: Any, name: str, style: str, output: nn.Module, size: int) -> None:
    """Refuse a cut of one module or parameter of the plan that cannot be made.

    Raises ModelRefused.
    """
    target = model.get_submodule(name) if name in dict(model.named_modules()) else model.get_parameter(name)
    if style in WHOLE or style == "moe_tp_experts":
        return
    if isinstance(target, nn.Module):
        if not isinstance(target, nn.Embedding if style == "embedding_rowwise" else nn.Linear):
            kind = type(target).__name__
            raise ModelRefused(f"its tensor-parallel plan splits {name}, a {kind}: tensor_parallel must be 1")
        if style == "colwise_gather_output" and target is not output:
            raise ModelRefused(f"its tensor-parallel plan gathers {name} on every rank: tensor_parallel must be 1")
        target = target.weight
    columns = style == "rowwise"
    cut = target.shape[-1 if columns else -2] // (2 if style == "packed_colwise" else 1)
    if style not in VOCABULARY and cut % size:
        raise ModelRefused(f"tensor_parallel {size} does not divide the {cut} features of {name}")


def _planned(model: Any) -> list[tuple[str, str]]:
    """Return (name, style) of every module, and of every bare parameter, that the plan names."""
    plan: dict[str, str] = model.tp_plan
    named = [name for name, _ in [*model.named_modules(), *model.named_parameters()]]
    styles = ((name, plan.get(replace_layer_number_by_wildcard(name))) for name in named)
    return [(name, style) for name, style in styles if style is not None]


def _make_local(model: nn.Module, group: RankGroup) -> None:
    """Replace DTensors and hooks by plain tensors and plain modules."""
    modules = dict(model.named_modules())
    planned = [(name, modules[name], style) for name, style in _planned(model) if name in modules]
    whole = {name: _rows(module) for name, module, _ in planned}
    local: dict[int, nn.Parameter] = {}
    for module in model.modules():
        module.__dict__.pop("forward", None)  # removes the hook and leaves the class's own method
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = local.setdefault(id(parameter), _local(parameter))
    for name, module, style in planned:
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        if style == "moe_tp_experts":
            module.register_forward_hook(lambda _, __, terms: group.sum(terms))
        elif (joined := _joined(module, style, whole[name], group)) is not None:
            _put(model, name, joined)
    _sum_after_mlps(model, group)


def _joined(module: nn.Module, style: str, rows: int, group: RankGroup) -> nn.Module | None:
    """Return the replacement of a module whose whole weights have `rows` rows; None where none is needed."""
    if style == "embedding_rowwise":
        assert isinstance(module, nn.Embedding)
        return ShardedEmbedding(module, min(rows, group.rank * -(-rows // group.size)), group)
    if style == "rowwise":
        assert isinstance(module, nn.Linear)
        if group.rank and module.bias is not None:
            module.register_parameter("bias", None)  # the bias counts once in the sum
        return SummedOutput(module, group)
    if style == "colwise_gather_output":
        assert isinstance(module, nn.Linear)
        return GatheredLinear(module, rows, group)
    return None


def _rows(module: nn.Module) -> int:
    """Return the number of rows of the module's weights on all ranks together."""
    weight = getattr(module, "weight", None)
    return weight.shape[0] if isinstance(weight, Tensor) else 0


def _local(parameter: nn.Parameter) -> nn.Parameter:
    tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return nn.Parameter(tensor.detach(), requires_grad=False)


def _sum_after_mlps(model: nn.Module, group: RankGroup) -> None:
    """Move the sum of each gated MLP from its rowwise layer to the end of the MLP.

    The MLP then looks like any other to a fused kernel. Only where a check shows that the result is equal.
    """
    agrees: dict[type[nn.Module], bool] = {}
    for name, mlp in list(model.named_modules()):
        gate, down = getattr(mlp, "gate_proj", None), getattr(mlp, "down_proj", None)
        if not isinstance(down, SummedOutput) or not isinstance(gate, nn.Linear):
            continue
        summed = SummedOutput(mlp, group)
        if type(mlp) not in agrees:
            x = torch.randn(1, 3, gate.in_features, generator=torch.Generator().manual_seed(0))
            x = x.to(gate.weight.dtype).to(gate.weight.device)
            wanted = mlp(x)
            mlp.down_proj = down.local
            agrees[type(mlp)] = torch.equal(wanted, summed(x))
        mlp.down_proj = down.local if agrees[type(mlp)] else down
        if agrees[type(mlp)]:
            _put(model, name, summed)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the module of that name."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
