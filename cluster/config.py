"""Configuration of a process: a frozen pydantic model, read from a YAML file and `key=value` overrides.

Each default is written once, in the model. An unknown key, a wrong type or a value out of range raises a StartError
that names the key.
"""

import argparse
import inspect
import json
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from cluster.errors import StartError


class Config(BaseModel):
    """Base class of every configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        """Validate `values`.

        Raises StartError naming the first invalid field.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            first, *others = error.errors()
            place, reason = first["loc"], first["msg"].removeprefix("Value error, ")
            kinds = [other for other in others if other["loc"][:-1] == place[:-1] and not _is_key(other["loc"][-1])]
            if kinds and not _is_key(place[-1]):  # one value that is of none of several kinds
                place, reason = place[:-1], "; or: ".join([reason, *(other["msg"] for other in kinds)])
            field = ".".join(map(str, place)) or "config"
            if first["type"] == "extra_forbidden":
                reason = unknown_key(str(first["loc"][-1]), sorted(_model_at(cls, first["loc"][:-1]).model_fields))
            raise StartError(field, reason) from None

    @classmethod
    def from_command_line(cls, prog: str, arguments: Sequence[str] | None = None) -> Self:
        """Read the configuration of `python -m ROLE --config FILE --set key=value ...`."""
        parser = argparse.ArgumentParser(prog=prog, description=cls.__doc__)
        parser.add_argument("--config", type=Path, help="YAML file with the keys below; - reads standard input")
        parser.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="setting that overrides the file; may be repeated",
        )
        parser.epilog = "keys: " + ", ".join(cls.model_fields)
        options = parser.parse_args(arguments)
        return cls.parse(read_file(options.config) | parse_overrides(options.set))


def unknown_key(key: str, known: Sequence[str]) -> str:
    """Return what an error says of a key that is not among the `known` ones."""
    near = get_close_matches(key, known, n=1, cutoff=0.75)
    meant = f" did you mean {near[0]}?" if near else ""
    return f"unknown key;{meant} known are {', '.join(known)}"


def _is_key(part: int | str) -> bool:
    """Return whether a part of a location is a key or an index, and not pydantic's name of a kind of value."""
    return isinstance(part, int) or part.isidentifier()


def _model_at(model: type[BaseModel], place: Sequence[int | str]) -> type[BaseModel]:
    """Return the model class at `place`, a location as pydantic names it."""
    for part in place:
        if part in model.model_fields:
            kinds: list[Any] = [model.model_fields[str(part)].annotation]
            while kinds and not (inspect.isclass(kinds[0]) and issubclass(kinds[0], BaseModel)):
                kinds = [*kinds[1:], *get_args(kinds[0])]
            model = kinds[0] if kinds else model
    return model


def read_file(path: Path | None) -> dict[str, Any]:
    """Return the mapping in a YAML file, or an empty one without a file."""
    if path is None:
        return {}
    try:
        values = yaml.safe_load(sys.stdin.read() if str(path) == "-" else path.read_text())
    except OSError as error:
        raise StartError("config", f"cannot read {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise StartError("config", f"{path} is not YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise StartError("config", f"{path} must hold a mapping of keys")
    return values


def parse_overrides(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse `key=value` pairs.

    Values are YAML, so numbers and lists need no quoting. A value that begins with a flag is a text as it stands,
    although YAML might read a mapping or a comment in it.
    """
    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise StartError("set", f"expected KEY=VALUE, got {pair!r}")
        values[key] = value if re.match("--?[A-Za-z]", value) else yaml.safe_load(value)
    return values


def to_overrides(config: Config) -> list[str]:
    """Return command-line arguments from which `from_command_line` builds an equal `config`.

    Secrets are left out, because any user of the machine can read a command line; pass `secrets_of(config)` as standard
    input.
    """
    arguments = ["--config", "-"] if secrets_of(config) else []
    for key, value in config.model_dump(mode="json", exclude_unset=True, exclude=_secret(config)).items():
        arguments += ["--set", f"{key}={json.dumps(value)}"]
    return arguments


def secrets_of(config: Config) -> str:
    """Return YAML with the secret settings, or an empty string when none is set."""
    secrets = config.model_dump(mode="json", exclude_unset=True, include=_secret(config))
    return json.dumps(secrets) if secrets else ""


def _secret(config: Config) -> set[str]:
    return {name for name, field in type(config).model_fields.items() if not field.repr}
