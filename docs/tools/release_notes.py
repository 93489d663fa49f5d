"""Print what a release adds for clients and operators, from what was frozen at the last one.

`python docs/tools/release_notes.py` compares the public API (`protos/released`) and the values of the chart
(`helm/released`) with the present ones, and prints Markdown for CHANGELOG.md: new, changed and removed names.
"""

import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from google.protobuf import descriptor_pb2

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))


def api_names(file: descriptor_pb2.FileDescriptorProto) -> dict[str, str]:
    """Return the names of an API (messages' fields, values of enums, calls), each with its type."""
    names: dict[str, str] = {}
    for message in file.message_type:
        for field in message.field:
            kind = field.type_name.rpartition(".")[2] or descriptor_pb2.FieldDescriptorProto.Type.Name(field.type)
            names[f"{message.name}.{field.name}"] = f"{kind.removeprefix('TYPE_').lower()} = {field.number}"
    for enum in file.enum_type:
        names |= {f"{enum.name}.{value.name}": str(value.number) for value in enum.value}
    for service in file.service:
        names |= {f"{service.name}.{method.name}": "call" for method in service.method}
    return names


def value_names(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted names of a chart's values, each with its default."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from value_names(value, f"{name}.")
        else:
            yield name, yaml.safe_dump(value, default_flow_style=True).splitlines()[0]


def compared(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return Markdown lines of what was added, changed and removed."""
    lines = [f"- added `{name}`: {now[name]}" for name in now if name not in before]
    lines += [
        f"- changed `{name}`: {before[name]} became {now[name]}"
        for name in now
        if before.get(name, now[name]) != now[name]
    ]
    return lines + [f"- removed `{name}`" for name in before if name not in now]


def released_api() -> dict[str, str]:
    *_, last = sorted((ROOT / "protos" / "released").glob("*.binpb"))
    return api_names(descriptor_pb2.FileDescriptorProto.FromString(last.read_bytes()))


def released_values() -> dict[str, str]:
    *_, last = sorted((ROOT / "helm" / "released").glob("*.tgz"))
    with tarfile.open(last) as chart:
        values = chart.extractfile("tandem/values.yaml")
        assert values is not None
        return dict(value_names(yaml.safe_load(values)))


def notes() -> str:
    """Return the notes."""
    from protos import inference_pb2

    file = descriptor_pb2.FileDescriptorProto()
    inference_pb2.DESCRIPTOR.CopyToProto(file)
    values = dict(value_names(yaml.safe_load((ROOT / "helm" / "tandem" / "values.yaml").read_text())))
    api, chart = compared(released_api(), api_names(file)), compared(released_values(), values)
    return "\n".join(
        ["### gRPC API", "", *(api or ["no change"]), "", "### Chart values", "", *(chart or ["no change"])]
    )


if __name__ == "__main__":
    print(notes())
