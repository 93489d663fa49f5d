"""Whether a model directory holds an embedding model, and how its embeddings are made.

An embedding model has the files of Sentence Transformers: `modules.json` lists the transformer, a pooling layer with a
config.json of its own, and perhaps a layer that scales to length 1.
"""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from engine.core_types import Pooler, Pooling
from engine.errors import ModelRefused
from engine.model.model_dir import ModelDir

MODES: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
"""Pooling modes that are served, by their names in the pooling layer's config.json."""
OUTPUT_WEIGHTS = "lm_head.weight"
CLASSIFIER = "ForSequenceClassification"
"""End of the architecture of a model whose output is a score of each label."""


def read_embedding(model_dir: ModelDir) -> Pooler:
    """Read how a model's embeddings, or the probabilities of its labels, are made.

    Raises ModelRefused, with the reason, for a model that is neither kind of model, or one that is not served.
    """
    if any(str(name).endswith(CLASSIFIER) for name in model_dir.config.get("architectures") or ()):
        return Pooler("last", normalize=False, dimensions=len(model_dir.labels), classifies=True)
    path = model_dir.path / "modules.json"
    if not path.exists():
        raise ModelRefused("the model is not an embedding model: its folder has no modules.json")
    pooling: Pooling | None = None
    normalize = False
    for module in _read_modules(path):
        kind = str(module.get("type")).rsplit(".", 1)[-1]
        if kind == "Pooling":
            pooling = _pooling_of(model_dir, str(module.get("path")))
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise ModelRefused(f"its modules.json has a {kind} layer, and only Pooling and Normalize are served")
    if pooling is None:
        raise ModelRefused("its modules.json has no Pooling layer")
    if model_dir.attends_both_ways:
        raise ModelRefused("its tokens attend to later ones, so no KV of a prefix can be reused")
    return Pooler(pooling, normalize, model_dir.hidden_size)


def is_embedding_model(model_dir: ModelDir) -> bool:
    """Return whether embeddings of the model are served."""
    try:
        return not read_embedding(model_dir).classifies
    except ModelRefused:
        return False


def has_output_layer(model_dir: ModelDir) -> bool:
    """Return whether the model can generate: it shares its output layer with its input, or has weights for it.

    Models that were saved for embeddings only may have none. Raises ModelRefused for weights that cannot be read.
    """
    if model_dir.ties_embeddings:
        return True
    index = model_dir.read_json("model.safetensors.index.json").get("weight_map")
    if isinstance(index, dict):  # all that a router has of a repository's weights
        return any(name.endswith(OUTPUT_WEIGHTS) for name in index)
    for file in model_dir.path.glob("*.safetensors"):
        try:
            with safe_open(file, "np") as weights:
                if any(name.endswith(OUTPUT_WEIGHTS) for name in weights.keys()):  # noqa: SIM118 - it is no dict
                    return True
        except (SafetensorError, OSError) as error:
            raise ModelRefused(f"{file} cannot be read: {error}") from error
    return False


def _read_modules(path: Path) -> list[dict[str, Any]]:
    try:
        modules = json.loads(path.read_text())
    except ValueError as error:
        raise ModelRefused(f"{path} is not JSON: {error}") from None
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelRefused(f"{path} is not a list of JSON objects")
    return modules


def _pooling_of(model_dir: ModelDir, folder: str) -> Pooling:
    """Read the pooling layer's config.json, in its older form with a flag for each mode or the newer with names."""
    config = model_dir.read_json(f"{folder}/config.json")
    prefix = "pooling_mode_"
    modes = {name.removeprefix(prefix) for name, is_on in config.items() if name.startswith(prefix) and is_on is True}
    named = config.get("pooling_mode", [])
    modes |= {named} if isinstance(named, str) else set(named)
    if len(modes) != 1 or (mode := next(iter(modes))) not in MODES:
        raise ModelRefused(
            f"its pooling is {' and '.join(sorted(modes)) or 'not named'}: lasttoken and mean are served"
        )
    return MODES[mode]
