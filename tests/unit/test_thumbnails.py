"""Thumbnails of pictures: their bounds, where they are made and kept, and how the console shows them."""

import re
from base64 import b64decode
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from engine.backends.sim.media_processor import SimMediaProcessor
from engine.media import MAX_THUMBNAIL_BYTES, MAX_THUMBNAILS, MediaInput, MediaProcessor, Processed
from engine.model.model_dir import ModelDir
from preprocessor.child import answer
from preprocessor.children import read_answer
from preprocessor.frames import Frame, NoFrame
from protos import inference_pb2 as pb
from router.frontend.console.routes import HEADERS, PAGE
from router.models.media import ReadingContext, thumbnail_urls
from router.observability.explained import to_console
from router.observability.records import MOST_ENDED, MOST_WITH_THUMBNAILS, RequestRecord, RequestRecords
from support.sim_directories import write_sim_model

VOCAB = 400
IMAGE, AUDIO = VOCAB - 1, VOCAB - 2
PNG = b"\x89PNG\r\n\x1a\n"
HOSTILE = b"\"><script>alert('x')</script>\xff\0"


@pytest.fixture
def processor(tmp_path: Path) -> MediaProcessor:
    return SimMediaProcessor(ModelDir.open(write_sim_model(tmp_path / "m", VOCAB)))


def asked(num_pictures: int, thumbnails: bool) -> Frame:
    """A request for a child, with a sound before its pictures."""
    prompt = [AUDIO, *[IMAGE] * num_pictures]
    values = {"kinds": ["audio", *["image"] * num_pictures], "limits": [1000, 10.0], "thumbnails": thumbnails}
    files = [PNG + bytes(number) for number in range(num_pictures)]
    return Frame(values, [b"".join(token.to_bytes(4, "little") for token in prompt), b"OggS", *files])


@pytest.mark.parametrize("num_pictures", [1, MAX_THUMBNAILS, MAX_THUMBNAILS + 3])
def test_the_first_pictures_have_them(processor: MediaProcessor, num_pictures: int) -> None:
    done = read_answer(answer(processor, asked(num_pictures, True)))
    assert isinstance(done, Processed)
    assert len(done.items) == 1 + num_pictures
    made = list(done.thumbnails)
    assert len(made) == len(set(made)) == min(num_pictures, MAX_THUMBNAILS)
    for thumbnail in made:
        with Image.open(BytesIO(thumbnail)) as image:
            assert (image.format, image.size) == ("WEBP", (96, 96))
            assert len(image.getcolors() or ()) == 1


def test_none_is_made_unless_asked_for(processor: MediaProcessor) -> None:
    done = read_answer(answer(processor, asked(2, False)))
    assert isinstance(done, Processed)
    assert list(done.thumbnails) == []
    assert list(processor.process([IMAGE], [MediaInput("image", PNG)], 1000).thumbnails) == []
    assert not ReadingContext("r", "", 0.0).thumbnails


@pytest.mark.parametrize("thumbnails", [[bytes(MAX_THUMBNAIL_BYTES + 1)], [b"x"] * (MAX_THUMBNAILS + 1)])
def test_a_child_that_a_file_has_taken_over_sends_no_more(processor: MediaProcessor, thumbnails: list[bytes]) -> None:
    good = answer(processor, asked(1, False))
    with pytest.raises(NoFrame, match="thumbnails"):
        read_answer(Frame(good.values, [*good.parts, *thumbnails]))


def test_urls_are_bounded_and_plain() -> None:
    largest = bytes(MAX_THUMBNAIL_BYTES)
    urls = thumbnail_urls([HOSTILE, b"", largest, largest + b"0", *[b"x"] * 10])
    assert len(urls) == MAX_THUMBNAILS
    assert urls[1] == urls[3] == ""
    assert 8000 < len(urls[2]) <= 8192
    assert re.fullmatch(r"data:image/webp;base64,[A-Za-z0-9+/]+={0,2}", urls[0])
    assert b64decode(urls[0].partition(",")[2]) == HOSTILE


def test_the_last_requests_keep_them() -> None:
    records, finish = RequestRecords(), pb.Finish(receipt=pb.Receipt(model="m"))
    for number in range(MOST_ENDED + 11):
        thumbnails = (f"data:{number}",) if number < MOST_ENDED + 10 else ()
        records.ended(RequestRecord(f"r{number}", "", 0.0, finish=finish, thumbnails=thumbnails))
    told = [to_console(record) for record in records.since(0)]
    assert [each["number"] for each in told] == list(range(11, MOST_ENDED + 11))
    expected = [*([f"data:{number}"] for number in range(MOST_ENDED + 11 - MOST_WITH_THUMBNAILS, MOST_ENDED + 10)), []]
    assert [each["thumbnails"] for each in told[-MOST_WITH_THUMBNAILS:]] == expected
    assert not any(each["thumbnails"] for each in told[:-MOST_WITH_THUMBNAILS])
    assert records.since(MOST_ENDED + 10) == records.since(0)[-1:]


def test_the_console_shows_pictures_of_data_urls_only() -> None:
    rules = dict(rule.strip().split(" ", 1) for rule in HEADERS["content-security-policy"].split(";"))
    assert rules["img-src"] == "data:"
    assert rules["default-src"] == "'none'"
    page = PAGE.read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", page), "texts would not be escaped"
