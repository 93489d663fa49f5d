"""Facts about a Hugging Face model directory that do not need the loaded model, nor torch."""

import json
import os
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from engine.errors import ModelRefused
from engine.model.hub import CONFIG_FILES, model_name
from kvtransfer.native.compiler import cache_folder

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Options taken from generation_config.json, the same as vLLM's."""
ROUTER_FILES = (*CONFIG_FILES.patterns, "1_Pooling/config.json")
"""Patterns of the files that a router reads of a model, below its directory."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class ModelDir:
    """A directory with a decoder-only model."""

    path: Path
    config: dict[str, Any]
    sampling_defaults: dict[str, float] = field(default_factory=dict)
    """Sampling options that generation_config.json recommends, by their names there."""

    @classmethod
    def open(cls, path: Path) -> "ModelDir":
        """Open a directory.

        Raises ModelRefused when it is no model directory.
        """
        if not path.is_dir():
            raise ModelRefused(f"no directory {str(path)!r}")
        if not (path / "config.json").exists():
            raise ModelRefused(f"{path} has no config.json")
        model_dir = cls(path, {})
        recommended = model_dir.read_json("generation_config.json")
        defaults = {name: recommended[name] for name in SAMPLING if type(recommended.get(name)) in (int, float)}
        return replace(model_dir, config=model_dir.read_json("config.json"), sampling_defaults=defaults)

    @property
    def name(self) -> str:
        """Name for clients: the directory's name, or that of the repository it was fetched from."""
        return model_name(self.path)

    @property
    def vocab_size(self) -> int:
        if not isinstance(size := self._text_config.get("vocab_size"), int):
            raise ModelRefused("config.json does not say how large its vocabulary is")
        return size

    @property
    def max_context_tokens(self) -> int:
        """Largest context in tokens, with YaRN's extension where configured."""
        for key in ("max_position_embeddings", "n_positions", "max_seq_len"):
            if key in self._text_config:
                return max(int(self._text_config[key]), self._stretched())
        raise ModelRefused("config.json does not say how long its context is")

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a text: those of generation_config.json, else of config.json, and the tokenizer's.

        Fine-tunes for chats often change only the tokenizer's end token.
        """
        eos_ids = self._tokenizer_eos()
        for source in (self.read_json("generation_config.json"), self.config, self._text_config):
            ids = source.get("eos_token_id")
            if isinstance(ids, int | list):
                eos_ids |= set(ids) if isinstance(ids, list) else {ids}
                break
        return frozenset(each for each in eos_ids if type(each) is int and 0 <= each < self.vocab_size)

    @property
    def hidden_size(self) -> int:
        """Length of a hidden state."""
        if not isinstance(size := self._text_config.get("hidden_size"), int):
            raise ModelRefused("config.json does not give the size of the hidden states")
        return size

    @property
    def labels(self) -> list[str]:
        """Names of a classifier's labels, by their numbers; transformers' default is two."""
        if self._text_config.get("method") == "from_2_way_softmax":  # vLLM's score of two tokens of a generating model
            return ["LABEL_0"]
        named = self.config.get("id2label") or {}
        count = self.config.get("num_labels") or len(named) or 2
        return [str(named.get(str(number), f"LABEL_{number}")) for number in range(count)]

    @property
    def separates_pairs(self) -> bool:
        """Whether the tokenizer reads the two texts of a pair as such; else they are one text, as vLLM has it."""
        config = self._text_config
        default = config.get("use_sep_token", config.get("method") is None)
        return bool(config.get("use_pad_token", default))

    @property
    def ties_embeddings(self) -> bool:
        """Whether the output layer has the weights of the input layer.

        Without a word in config.json transformers' own defaults differ by architecture, and most tie.
        """
        configs = (self.config, self._text_config)
        return bool(next((each["tie_word_embeddings"] for each in configs if "tie_word_embeddings" in each), True))

    @property
    def attends_both_ways(self) -> bool:
        """Whether tokens attend to later ones, by any of the names that configs have for it."""
        configs = (self.config, self._text_config)
        return any(each.get("is_causal") is False or each.get("use_bidirectional_attention") for each in configs)

    @property
    def has_tokenizer(self) -> bool:
        return any((self.path / name).exists() for name in TOKENIZER_FILES[:3])

    def read_json(self, name: str) -> dict[str, Any]:
        """Return a JSON object from a file of the directory; empty without the file.

        Raises ModelRefused.
        """
        try:
            values = json.loads((self.path / name).read_text())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise ModelRefused(f"{self.path / name} is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise ModelRefused(f"{self.path / name} is not a JSON object")
        return values

    def config_fingerprint(self) -> bytes:
        """Fingerprint of config and tokenizer, on which router and workers must agree.

        16 bytes.
        """
        digest = blake2b(digest_size=16)
        for name in ("config.json", *TOKENIZER_FILES):
            file = self.path / name
            digest.update(name.encode() + b"\0" + (file.read_bytes() if file.exists() else b"absent"))
        return digest.digest()

    def revision(self, weights: bytes) -> bytes:
        """Fingerprint of the model that clients know: weights with this fingerprint, config and tokenizer.

        16 bytes.
        """
        return blake2b(weights + self.config_fingerprint(), digest_size=16).digest()

    def files_for_routers(self) -> list[Path]:
        """Return the files that a router reads, in the order of their names: config, tokenizer, chat template."""
        found = {file for pattern in ROUTER_FILES for file in self.path.glob(pattern)}
        return sorted(file for file in found if file.is_file() and not file.name.endswith(".index.json"))

    def weights_fingerprint(self) -> bytes:
        """Fingerprint of the config and every byte of the weights.

        32 bytes.

        The result is cached beside the weights, since hashing takes seconds per gigabyte.
        """
        files = self.weight_files()
        if (remembered := self.remembered_fingerprint()) is not None:
            return remembered
        memory, fingerprint = self._fingerprint_file(files), self._hash_weights(files)
        memory.parent.mkdir(parents=True, exist_ok=True)
        scratch = memory.with_suffix(f".{os.getpid()}")
        scratch.write_bytes(fingerprint)
        scratch.replace(memory)
        return fingerprint

    def remembered_fingerprint(self) -> bytes | None:
        """Fingerprint of the weights where it is known without reading them, otherwise None."""
        memory = self._fingerprint_file(self.weight_files())
        return remembered if memory.exists() and len(remembered := memory.read_bytes()) == 32 else None

    def weight_files(self) -> list[Path]:
        """Return the files of the weights, in the order of their names.

        Raises ModelRefused where there is none.
        """
        if not (files := sorted(self.path.glob("*.safetensors"))):
            raise ModelRefused(f"{self.path} holds no .safetensors file")
        return files

    def begin_weights_digest(self) -> blake2b:
        """Return the weights' digest before the first file: of each follow its name and its bytes."""
        return blake2b((self.path / "config.json").read_bytes(), digest_size=32)

    def _fingerprint_file(self, files: list[Path]) -> Path:
        """Return the file of this machine's cache that holds the fingerprint of these files, as they are now."""
        stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        identity = f"{self.path.resolve()}{stats}".encode() + self.config_fingerprint()
        return cache_folder("weights") / blake2b(identity, digest_size=16).hexdigest()

    def _hash_weights(self, files: list[Path]) -> bytes:
        digest = self.begin_weights_digest()
        for file in files:
            digest.update(file.name.encode())
            with file.open("rb") as stream:
                while chunk := stream.read(8 << 20):
                    digest.update(chunk)
        return digest.digest()

    @property
    def _text_config(self) -> dict[str, Any]:
        """Config of the text model, within that of a vision model."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config

    def _stretched(self) -> int:
        """Context length by YaRN, or 0 without it."""
        rope = self._text_config.get("rope_scaling") or self._text_config.get("rope_parameters")
        if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) != "yarn":
            return 0
        original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
        return int(original * factor) if isinstance(original, int) and isinstance(factor, int | float) else 0

    def _tokenizer_eos(self) -> set[int]:
        settings = self.read_json("tokenizer_config.json")
        eos = settings.get("eos_token")
        text = eos.get("content") if isinstance(eos, dict) else eos
        if not isinstance(text, str):
            return set()
        added = self.read_json("tokenizer.json").get("added_tokens")
        known = [(token.get("id"), token) for token in added] if isinstance(added, list) else []
        known += [(int(token_id), token) for token_id, token in settings.get("added_tokens_decoder", {}).items()]
        return {token_id for token_id, token in known if token.get("content") == text}
