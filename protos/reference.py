"""Generator of docs/grpc.md, the reference of the public API, from the comments of inference.proto."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from google.protobuf import descriptor_pb2 as pb

Comments = dict[tuple[int, ...], str]
HEAD = """# The gRPC API

Made by `make protos` from the comments of [protos/inference.proto](../protos/inference.proto), which is all that a
client in another language needs: generate stubs from it, or ask the server, which answers reflection and health checks.
The same through OpenAI's HTTP API is in [openai.md](openai.md); keys and certificates in [security.md](security.md).

```
grpcurl -plaintext -d '{"text": "Once upon a time", "sampling": {"max_tokens": 8}}' \\
  localhost:50051 tandem.v1.Inference/Generate
```

"""
FILE_SYNTAX, MESSAGE, ENUM, SERVICE = (12,), 4, 5, 6
"""Field numbers of FileDescriptorProto, which make up the paths of comments."""
FIELD, NESTED, METHOD, VALUE = 2, 3, 2, 2
SCALARS = {
    getattr(pb.FieldDescriptorProto, name): name.removeprefix("TYPE_").lower()
    for name in pb.FieldDescriptorProto.Type.keys()  # noqa: SIM118 (an enum is no dictionary)
}


def render(descriptors: Path) -> str:
    """Render a descriptor set with source info that holds one file."""
    (file,) = pb.FileDescriptorSet.FromString(descriptors.read_bytes()).file
    comments = {tuple(each.path): each.leading_comments for each in file.source_code_info.location}
    parts = [HEAD, prose(comments.get(FILE_SYNTAX, ""))]
    for number, service in enumerate(file.service):
        parts.append(f"## Service `{file.package}.{service.name}`\n\n")
        parts.append("| call | takes | gives | what |\n| --- | --- | --- | --- |\n")
        for place, method in enumerate(service.method):
            gives = ("stream of " if method.server_streaming else "") + _link(method.output_type)
            what = line(comments.get((SERVICE, number, METHOD, place), ""))
            parts.append(f"| `{method.name}` | {_link(method.input_type)} | {gives} | {what} |\n")
        parts.append("\n")
    parts.append("## Messages\n\n")
    for number, message in enumerate(file.message_type):
        parts.extend(_message(message, (MESSAGE, number), comments))
    for number, enum in enumerate(file.enum_type):
        parts.extend(_enum(enum, (ENUM, number), comments))
    return "".join(parts).rstrip("\n") + "\n"


def prose(comment: str) -> str:
    """Return a comment as paragraphs; indented lines stay as they are."""
    lines = [each.removeprefix(" ") for each in comment.rstrip("\n").splitlines()]
    parts = []
    for indented, group in groupby(lines, lambda each: each.startswith("  ")):
        text = "\n".join(group)
        parts.append(f"```\n{text}\n```" if indented else text)
    return "\n".join(parts) + "\n\n" if any(lines) else ""


def line(comment: str) -> str:
    """Return a comment as the cell of a table."""
    return " ".join(comment.split()).replace("|", "\\|")


def _message(message: pb.DescriptorProto, path: tuple[int, ...], comments: Comments) -> Iterator[str]:
    yield f"### {message.name}\n\n{prose(comments.get(path, ''))}"
    maps = {each.name: each for each in message.nested_type if each.options.map_entry}
    if message.field:
        yield "| field | type | number | what |\n| --- | --- | --- | --- |\n"
    for place, field in enumerate(message.field):
        what = line(comments.get((*path, FIELD, place), ""))
        yield f"| `{field.name}` | {_type_of(field, maps)} | {field.number} | {what} |\n"
    yield "\n"
    for place, nested in enumerate(message.nested_type):
        if nested.name not in maps:
            yield from _message(nested, (*path, NESTED, place), comments)


def _enum(enum: pb.EnumDescriptorProto, path: tuple[int, ...], comments: Comments) -> Iterator[str]:
    yield f"### {enum.name}\n\n{prose(comments.get(path, ''))}| value | number | what |\n| --- | --- | --- |\n"
    for place, value in enumerate(enum.value):
        yield f"| `{value.name}` | {value.number} | {line(comments.get((*path, VALUE, place), ''))} |\n"
    yield "\n"


def _type_of(field: pb.FieldDescriptorProto, maps: dict[str, pb.DescriptorProto]) -> str:
    if (entry := maps.get(field.type_name.rsplit(".", 1)[-1])) is not None:
        key, value = (_plain(each) for each in entry.field)
        return f"map from {key} to {value}"
    if field.label == pb.FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {_plain(field)}"
    return f"optional {_plain(field)}" if field.proto3_optional else _plain(field)


def _plain(field: pb.FieldDescriptorProto) -> str:
    return _link(field.type_name) if field.type_name else SCALARS[field.type]


def _link(type_name: str) -> str:
    name = type_name.rsplit(".", 1)[-1]
    return f"[{name}](#{name.lower()})"
