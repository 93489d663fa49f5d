"""Weights that arrive from a pool, over the transport within one process: what is in order, and what is refused."""

import json
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save

from engine.backends.torch.arriving import arriving_tensors
from engine.model.model_dir import ModelDir
from engine.weights.fetch import WeightsFetch, WeightsLost
from engine.weights.mapped_files import MappedFiles
from engine.weights.offer import ALIGNMENT, WeightFile, WeightsOffer, layout_of, may_replace
from engine.weights.page_cache import in_page_cache
from kvtransfer.local import LocalNetwork, LocalTransport
from kvtransfer.transport import Pool

SAVED = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(5, dtype=torch.bfloat16)}


def fetch_of(*files: tuple[str, bytes], fingerprint: bytes | None = None) -> WeightsFetch:
    """Files of these contents, offered by a pool that has them."""
    offsets, total = layout_of([len(content) for _, content in files])
    memory, digest = np.zeros(total, np.uint8), blake2b(digest_size=32)
    for (name, content), offset in zip(files, offsets, strict=True):
        memory[offset : offset + len(content)] = np.frombuffer(content, np.uint8)
        digest.update(name.encode() + content)
    network = LocalNetwork()
    endpoint = LocalTransport(network, "lender").register(Pool(memory.reshape(1, -1)))
    told = tuple(WeightFile(name, len(content), "") for name, content in files)
    offer = WeightsOffer("lender", told, fingerprint or digest.digest(), endpoint)
    return WeightsFetch(offer, blake2b(digest_size=32), lambda: LocalTransport(network, "borrower"), 5.0)


def model_dir(tmp_path: Path, **where: str) -> ModelDir:
    (tmp_path / "config.json").write_text("{}")
    if where:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return ModelDir.open(tmp_path)


def test_tensors_are_those_that_were_saved(tmp_path: Path) -> None:
    fetch = fetch_of(("model.safetensors", save(SAVED)))
    tensors = arriving_tensors(model_dir(tmp_path), fetch)
    assert {name: (each.dtype, tuple(each.shape)) for name, each in tensors.items()} == {
        "a": (torch.float32, (2, 3)),
        "b": (torch.bfloat16, (5,)),
    }
    assert all(torch.equal(tensors[name][...], tensor) for name, tensor in SAVED.items())
    assert fetch.confirm() == fetch.offer.fingerprint


def test_of_several_files_the_index_says_which_has_a_tensor(tmp_path: Path) -> None:
    """A copy of the same weights in another form may lie beside them."""
    first, other = save({"a": SAVED["a"], "b": torch.zeros(5)}), save({"b": SAVED["b"]})
    fetch = fetch_of(("first.safetensors", first), ("other.safetensors", other))
    tensors = arriving_tensors(model_dir(tmp_path, a="first.safetensors", b="other.safetensors"), fetch)
    assert all(torch.equal(tensors[name][...], tensor) for name, tensor in SAVED.items())


def test_files_that_no_index_knows_are_not_guessed_at(tmp_path: Path) -> None:
    fetch = fetch_of(("first.safetensors", save(SAVED)))
    with pytest.raises(WeightsLost, match=r"contain neither model\.safetensors"):
        arriving_tensors(model_dir(tmp_path), fetch)


def test_other_bytes_than_offered_are_not_confirmed() -> None:
    fetch = fetch_of(("model.safetensors", save(SAVED)), fingerprint=bytes(32))
    with pytest.raises(WeightsLost, match="another fingerprint"):
        fetch.confirm()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ((1 << 40).to_bytes(8, "little") + b"{}", "a header of 1099511627776 bytes"),
        ((4).to_bytes(8, "little") + b"nono", "not one of safetensors"),
        ((2).to_bytes(8, "little") + b"[]", "not one of safetensors"),
    ],
)
def test_a_header_that_is_none(tmp_path: Path, content: bytes, reason: str) -> None:
    with pytest.raises(WeightsLost, match=reason):
        arriving_tensors(model_dir(tmp_path), fetch_of(("model.safetensors", content)))


@pytest.mark.parametrize(
    "changed",
    [{"data_offsets": [0, 1 << 20]}, {"data_offsets": [0, 20]}, {"dtype": "F99"}, {"shape": [2, 4]}, {"shape": None}],
)
def test_a_tensor_that_cannot_be_where_its_header_says(tmp_path: Path, changed: dict[str, object]) -> None:
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | changed
    header = json.dumps({"a": entry}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(24)
    with pytest.raises(WeightsLost, match="not one of safetensors"):
        arriving_tensors(model_dir(tmp_path), fetch_of(("model.safetensors", content)))


def test_a_lender_that_is_gone() -> None:
    offer = WeightsOffer("lender", (WeightFile("model.safetensors", 10, ""),), bytes(32), b"tandem-local:nobody")
    fetch = WeightsFetch(offer, blake2b(digest_size=32), lambda: LocalTransport(LocalNetwork(), "borrower"), 5.0)
    with pytest.raises(WeightsLost, match="no pool is registered at"):
        fetch.wait_for(1)


def test_files_are_mapped_one_after_the_other(tmp_path: Path) -> None:
    contents = {"a": bytes(range(256)) * 300, "b": b"b" * ALIGNMENT, "c": b"c"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    memory = MappedFiles([tmp_path / name for name in contents]).pool.memory.reshape(-1)
    offsets, total = layout_of([len(content) for content in contents.values()])
    assert len(memory) == total == 4 * ALIGNMENT
    for offset, content in zip(offsets, contents.values(), strict=True):
        assert memory[offset : offset + len(content)].tobytes() == content
    assert memory[offsets[-1] + 1 :].max() == 0


def test_nothing_to_map(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(OSError, match="the weight files are empty"):
        MappedFiles([tmp_path / "empty"])


def test_a_file_that_was_just_written_is_in_the_page_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    assert in_page_cache([tmp_path / "file"])


OWN = (WeightFile("a", 10, "changed 1"), WeightFile("b", 20, "changed 2"))


@pytest.mark.parametrize(
    ("offered", "known", "trusted", "taken"),
    [
        (OWN, None, False, True),
        (OWN, b"the same", False, True),
        (OWN, b"another", False, False),
        (OWN, b"another", True, False),
        ((OWN[0], WeightFile("b", 20, "changed 3")), None, False, False),
        ((OWN[0], WeightFile("b", 20, "changed 3")), None, True, True),
        ((OWN[0], WeightFile("b", 20, "changed 3")), b"the same", False, True),
        ((OWN[0], WeightFile("b", 21, "changed 2")), b"the same", True, False),
        ((OWN[0], WeightFile("c", 20, "changed 2")), None, True, False),
        (OWN[:1], None, True, False),
    ],
)
def test_whose_weights_stand_for_ones_own(
    offered: tuple[WeightFile, ...], known: bytes | None, trusted: bool, taken: bool
) -> None:
    offer = WeightsOffer("lender", offered, b"the same", b"")
    assert may_replace(offer, OWN, known, trusted) is taken


def test_a_file_of_the_hubs_cache_is_known_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "5891b5b522d5").write_bytes(b"x")
    (tmp_path / "model.safetensors").symlink_to("blobs/5891b5b522d5")
    assert WeightFile.of(tmp_path / "model.safetensors") == WeightFile("model.safetensors", 1, "5891b5b522d5")
