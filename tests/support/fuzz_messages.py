"""Protobuf messages made by chance: valid on the wire, and mostly nonsense. The same generator gives the same."""

import math
from random import Random
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

MAX_DEPTH = 4
INTS = (
    0,
    1,
    -1,
    2,
    7,
    100,
    255,
    65_536,
    (1 << 31) - 1,
    -(1 << 31),
    (1 << 32) - 1,
    (1 << 63) - 1,
    -(1 << 63),
    (1 << 64) - 1,
)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e300, math.inf, -math.inf, math.nan)
TEXTS = (
    "",
    "auto",
    "simulated",
    "a",
    "\x00",
    "\n\r",
    "%s%n",
    "../../etc/passwd",
    "{}",
    '{"a": 1}',
    "[" * 50,
    "😀" * 9,
    "\u202e",
)
RANGES: dict[int, tuple[int, int]] = {
    **dict.fromkeys((FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_SINT32), (-(1 << 31), (1 << 31) - 1)),
    **dict.fromkeys((FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_FIXED32), (0, (1 << 32) - 1)),
    **dict.fromkeys((FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_SINT64), (-(1 << 63), (1 << 63) - 1)),
    **dict.fromkeys((FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_FIXED64), (0, (1 << 64) - 1)),
    FieldDescriptor.TYPE_ENUM: (-5, 12),
}


def fill(message: Message, chance: Random, share: float, depth: int = 0) -> None:
    """Set a field with probability `share`, whatever it was, and so on within it."""
    for field in message.DESCRIPTOR.fields:
        if chance.random() < share and not (depth >= MAX_DEPTH and field.message_type is not None):
            _set(message, field, chance, depth)


def mutated(raw: bytes, chance: Random) -> bytes:
    """The same with some bytes changed, left out, put in, or the end cut off."""
    content = bytearray(raw or b"\x00")
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(len(content)) if content else 0
        match chance.randrange(4):
            case 0 if content:
                content[at] = chance.randrange(256)
            case 1:
                del content[at : at + chance.randint(1, 8)]
            case 2:
                content[at:at] = chance.randbytes(chance.randint(1, 8))
            case _:
                del content[at:]
    return bytes(content)


def text(chance: Random) -> str:
    if chance.random() < 0.5:
        return chance.choice(TEXTS)
    length = 5000 if chance.random() < 0.02 else chance.randint(0, 40)
    return "".join(
        chr(chance.choice((chance.randrange(32, 127), chance.randrange(0x20, 0xD7FF)))) for _ in range(length)
    )


def _set(message: Message, field: Any, chance: Random, depth: int) -> None:
    message.ClearField(field.name)
    if _is_map(field.message_type):
        assert field.message_type is not None
        key, value = field.message_type.fields
        if value.message_type is None:
            getattr(message, field.name).update({_value(key, chance): _value(value, chance) for _ in range(3)})
    elif field.is_repeated:
        count = 300 if chance.random() < 0.01 else chance.randint(0, 3)
        for _ in range(count):
            if field.message_type is not None:
                fill(getattr(message, field.name).add(), chance, 0.5, depth + 1)
            else:
                getattr(message, field.name).append(_value(field, chance))
    elif field.message_type is not None:
        inner = getattr(message, field.name)
        inner.SetInParent()
        fill(inner, chance, 0.3, depth + 1)
    else:
        setattr(message, field.name, _value(field, chance))


def _value(field: Any, chance: Random) -> Any:
    match field.type:
        case FieldDescriptor.TYPE_DOUBLE:
            return chance.choice((*FLOATS, chance.uniform(-2, 3)))
        case FieldDescriptor.TYPE_FLOAT:
            return chance.choice((0.0, -1.0, 0.5, math.inf, math.nan))
        case FieldDescriptor.TYPE_BOOL:
            return chance.random() < 0.5
        case FieldDescriptor.TYPE_STRING:
            return text(chance)
        case FieldDescriptor.TYPE_BYTES:
            return chance.randbytes(chance.choice((0, 1, 4, 16, 64)))
    low, high = RANGES[field.type]
    return min(max(chance.choice((*INTS, chance.randint(0, 300))), low), high)


def _is_map(descriptor: Descriptor | None) -> bool:
    return descriptor is not None and descriptor.GetOptions().map_entry
