"""Embedding models: the files of Sentence Transformers beside a model, and what transformers makes of a prompt."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

KINDS = "sentence_transformers.models."


def make_embedder(path: Path, pooling: str = "lasttoken", normalize: bool = True, layers: Sequence[str] = ()) -> Path:
    """Add the files to the directory; `layers` are further kinds of layers."""
    pools = path / "1_Pooling"
    pools.mkdir(exist_ok=True)
    flags = {f"pooling_mode_{mode}": mode == pooling for mode in ("cls_token", "mean_tokens", "lasttoken")}
    (pools / "config.json").write_text(json.dumps({"word_embedding_dimension": 64} | flags))
    kinds = ["Transformer", "Pooling", *layers, *(["Normalize"] if normalize else [])]
    folders = {"Transformer": "", "Pooling": "1_Pooling"}
    modules = [
        {"idx": number, "name": str(number), "path": folders.get(kind, str(number)), "type": KINDS + kind}
        for number, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    return path


def write_classifier(folder: Path, model: Path, *labels: str) -> Path:
    """Write a random classifier with the configuration and the tokenizer of a model, which has its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    names = dict(enumerate(labels))
    config = AutoConfig.from_pretrained(model, id2label=names, label2id={name: at for at, name in names.items()})
    config.pad_token_id = 0
    torch.manual_seed(5)
    classifier = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # so that labels differ
        classifier.score.weight.normal_(0.0, 0.5)
    classifier.save_pretrained(folder)
    for file in model.glob("tokenizer*"):
        shutil.copy(file, folder / file.name)
    return folder


def reference(path: Path, prompt: Sequence[int], pooling: str, normalize: bool = True) -> list[float]:
    """Return the embedding by transformers alone, in float32."""
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
    with torch.inference_mode():
        hidden = model(input_ids=torch.tensor([prompt])).last_hidden_state[0]
    vector = hidden[-1] if pooling == "lasttoken" else hidden.mean(0)
    if normalize:
        vector = vector / vector.norm()
    return [float(value) for value in vector]
