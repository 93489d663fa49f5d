"""The model that reads pictures: its router makes the prompts that it was trained on, and it stays small."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from cluster.errors import InvalidRequest
from engine.model.model_dir import ModelDir
from protos import inference_pb2 as pb
from router.models.prompts.prompts import PromptEncoder

MODEL = Path(__file__).parents[2] / "examples" / "shapes" / "model"
PLACEHOLDERS = {"image": "<image>"}
PICTURE = pb.ContentPart(media=pb.Media(kind="image", data=b"a picture"))
QUESTION = pb.ContentPart(text="What is in the picture?")


def chat(*parts: pb.ContentPart) -> pb.GenerateRequest:
    turns = [pb.ChatMessage(role="user", parts=parts), pb.ChatMessage(role="assistant", content="A red circle.")]
    return pb.GenerateRequest(messages=[*turns, pb.ChatMessage(role="user", content="How many shapes are there?")])


@pytest.mark.parametrize("first", [PICTURE, QUESTION])
async def test_prompts_are_those_of_its_training(first: pb.ContentPart) -> None:
    parts = [PICTURE, QUESTION] if first is PICTURE else [QUESTION, PICTURE]
    encoder = PromptEncoder(ModelDir.open(MODEL))
    asked = "<image>What is in the picture?" if first is PICTURE else "What is in the picture?<image>"
    trained = (
        f"<|begin|><|user|>{asked}<|end|><|assistant|>A red circle.<|end|>"
        "<|user|>How many shapes are there?<|end|><|assistant|>"
    )
    expected = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(trained).ids
    assert await encoder.encode(chat(*parts), placeholders=PLACEHOLDERS) == expected
    special = (0, 1, 3, 4, 5)
    assert [token for token in expected if token in special] == [0, 4, 3, 1, 5, 1, 4, 1, 5]


async def test_a_system_message_is_refused() -> None:
    system = pb.ChatMessage(role="system", content="Be brief.")
    request = pb.GenerateRequest(messages=[system, *chat(QUESTION).messages])
    with pytest.raises(InvalidRequest, match="roles are user and assistant"):
        await PromptEncoder(ModelDir.open(MODEL)).encode(request)


def test_it_stays_small() -> None:
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 4_000_000
