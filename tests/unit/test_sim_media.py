"""Media processor of the sim engine: what becomes of a prompt, with and without a tokenizer."""

from hashlib import sha256
from pathlib import Path

import pytest

from engine.backends.sim.media_processor import SimMediaProcessor
from engine.media import MediaInput, MediaKind, MediaLimits, MediaRefused
from engine.model.detokenizer import load_tokenizer
from engine.model.model_dir import ModelDir
from support.sim_directories import write_sim_model, write_tokenizer

VOCAB = 400
IMAGE, AUDIO, VIDEO = VOCAB - 1, VOCAB - 2, VOCAB - 3
LIMITS = MediaLimits(1000, 1)
PNG = b"\x89PNG\r\n\x1a\n"
FILES: dict[MediaKind, bytes] = {"image": PNG, "audio": b"OggS", "video": b"\x1aE\xdf\xa3"}


@pytest.fixture
def model(tmp_path: Path) -> ModelDir:
    return ModelDir.open(write_sim_model(tmp_path / "m", VOCAB))


def files(*kinds: MediaKind) -> list[MediaInput]:
    return [MediaInput(kind, FILES[kind] + bytes(place)) for place, kind in enumerate(kinds)]


def test_each_kind_has_its_places_in_order(model: ModelDir) -> None:
    processor = SimMediaProcessor(model)
    media = files("image", "video", "image", "audio")
    done = processor.process([5, VIDEO, IMAGE, AUDIO, IMAGE, 6], media, LIMITS)
    ordered = [media[1], media[0], media[3], media[2]]
    assert [item.blob for item in done.items] == [each.data for each in ordered]
    assert [item.identifier for item in done.items] == [sha256(each.data).hexdigest() for each in ordered]
    assert [item.length for item in done.items] == [20 + len(each.data) % 13 for each in ordered]
    at = 1
    for item, token in zip(done.items, (VIDEO, IMAGE, AUDIO, IMAGE), strict=True):
        assert item.offset == at
        assert done.token_ids[at : at + item.length] == [token] * item.length
        at += item.length
    assert [done.token_ids[0], *done.token_ids[at:]] == [5, 6]


def test_a_placeholder_is_what_the_tokenizer_makes_of_its_text(tmp_path: Path) -> None:
    path = write_sim_model(tmp_path / "m", VOCAB)
    write_tokenizer(path, VOCAB)
    model = ModelDir.open(path)
    tokenizer = load_tokenizer(model)
    prompt = tokenizer.encode("a<image>b").ids
    (item,) = (done := SimMediaProcessor(model).process(prompt, files("image"), LIMITS)).items
    assert len(done.token_ids) == 2 + item.length
    assert tokenizer.decode([done.token_ids[0], done.token_ids[-1]]) == "ab"


@pytest.mark.parametrize(
    ("prompt", "media", "place"),
    [
        ([IMAGE], [MediaInput("image", b"<svg/>")], 0),
        ([IMAGE, IMAGE], [MediaInput("image", PNG), MediaInput("image", b"OggS")], 1),
        ([IMAGE, IMAGE], files("image"), None),
        ([IMAGE], files("image", "image"), None),
        ([AUDIO], files("image"), None),
        ([], files("image"), None),
    ],
)
def test_refusals(model: ModelDir, prompt: list[int], media: list[MediaInput], place: int | None) -> None:
    with pytest.raises(MediaRefused) as refusal:
        SimMediaProcessor(model).process(prompt, media, LIMITS)
    assert refusal.value.place == place
