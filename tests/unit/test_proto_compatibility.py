"""Messages of every released schema still parse, field for field; clients upgrade when they like."""

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from protos import inference_pb2

RELEASED = sorted((Path(__file__).parent.parent.parent / "protos" / "released").glob("*.binpb"))
NUMBERS = {
    FieldDescriptor.CPPTYPE_INT32: -7,
    FieldDescriptor.CPPTYPE_INT64: -(2**40),
    FieldDescriptor.CPPTYPE_UINT32: 7,
    FieldDescriptor.CPPTYPE_UINT64: 2**60,
    FieldDescriptor.CPPTYPE_DOUBLE: 0.25,
    FieldDescriptor.CPPTYPE_FLOAT: 0.5,
    FieldDescriptor.CPPTYPE_BOOL: True,
    FieldDescriptor.CPPTYPE_ENUM: 1,
}


def value_of(field: FieldDescriptor) -> Any:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return b"bytes" if field.type == FieldDescriptor.TYPE_BYTES else f"text of {field.name}"
    return NUMBERS[field.cpp_type]


def fill(message: Message) -> Message:
    """Every field set, in every message below."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            entry = field.message_type.fields_by_name
            getattr(message, field.name)[value_of(entry["key"])] = value_of(entry["value"])
        elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            child = getattr(message, field.name)
            fill(child.add() if field.is_repeated else child)
        elif field.is_repeated:
            getattr(message, field.name).extend([value_of(field), value_of(field)])
        else:
            setattr(message, field.name, value_of(field))
    return message


def messages_of(file: Path) -> list[type[Message]]:
    proto = descriptor_pb2.FileDescriptorProto.FromString(file.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(proto)
    found = pool.FindFileByName(proto.name)
    return [message_factory.GetMessageClass(found.message_types_by_name[m.name]) for m in proto.message_type]


@pytest.mark.parametrize("file", RELEASED, ids=lambda file: file.stem)
def test_released_messages_still_parse(file: Path) -> None:
    for released in messages_of(file):
        old = fill(released())
        now = getattr(inference_pb2, released.DESCRIPTOR.name).FromString(old.SerializeToString())
        before = json_format.MessageToDict(old, preserving_proto_field_name=True)
        after = json_format.MessageToDict(now, preserving_proto_field_name=True)
        assert after == before, f"{released.DESCRIPTOR.name} of {file.stem} is read differently now"


@pytest.mark.parametrize("file", RELEASED, ids=lambda file: file.stem)
def test_released_methods_are_still_there(file: Path) -> None:
    proto = descriptor_pb2.FileDescriptorProto.FromString(file.read_bytes())
    for service in proto.service:
        now = inference_pb2.DESCRIPTOR.services_by_name[service.name]
        for method in service.method:
            current = now.methods_by_name[method.name]
            assert (current.input_type.full_name, current.output_type.full_name) == (
                method.input_type.removeprefix("."),
                method.output_type.removeprefix("."),
            )
            assert current.server_streaming == method.server_streaming


def test_there_is_a_released_schema() -> None:
    assert RELEASED
