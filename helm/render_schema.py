"""Generator of the settings in helm/tandem/values.schema.json: `render_schema.py [--check]`.

The settings of routers, workers, preprocessors, encode workers and planners come from the classes that read them. So
helm refuses a misspelt setting, before a pod fails to start. Generated are the schema's `definitions`, and which values
are required: a `null` removes a value, and only those that are empty by default may go. The rest of the file is written
by hand.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from cluster.config import Config
from encode_worker.config import EncoderConfig
from engine.config import WorkerConfig
from planner.runtime import PlannerConfig
from preprocessor.config import PreprocessorConfig
from router.config import RouterConfig
from router.models.config import FleetConfig, ModelEntry

CHART = Path(__file__).parent / "tandem"
PATH = CHART / "values.schema.json"
KEPT = (
    "type", "enum", "const", "pattern", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "items", "additionalProperties", "required",
)  # fmt: skip
"""Keywords of pydantic's schemas to keep; titles, defaults and formats are left out."""
BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
DECIMALS = {
    (None, None, None, None): r"[0-9]+\.[0-9]+",
    (0, None, None, None): r"[0-9]+\.[0-9]+",
    (None, 0, None, None): r"[0-9]*[1-9][0-9]*\.[0-9]+|0+\.[0-9]*[1-9][0-9]*",
    (0, None, 1, None): r"0\.[0-9]+|1\.0+",
    (0, None, 0.5, None): r"0\.([0-4][0-9]*|50*)",
    (None, 0, 1, None): r"0\.[0-9]*[1-9][0-9]*|1\.0+",
    (None, 0, None, 1): r"0\.[0-9]*[1-9][0-9]*",
    (0.001, None, 1000, None): r"0\.(00[1-9]|0[1-9]|[1-9])[0-9]*|[1-9][0-9]{0,2}\.[0-9]+|1000\.0+",
}
"""Decimal numbers within BOUNDS as a regular expression: helm's `--set x=0.5` gives a string, which a process reads."""


def main() -> None:
    schema = json.loads(PATH.read_text())
    schema["definitions"] = definitions()
    accept_decimals(schema)
    require(schema, yaml.safe_load((CHART / "values.yaml").read_text()))
    text = json.dumps(schema, indent=1) + "\n"
    if "--check" in sys.argv:
        if PATH.read_text() != text:
            sys.exit(f"{PATH} does not have the settings that there are: run helm/render_schema.py")
    else:
        PATH.write_text(text)


def definitions() -> dict[str, Any]:
    """Return definitions by name.

    A setting that a template sets has any type, so that the template can refuse it by name.
    """
    serving = of_settings(ModelEntry, set())
    for key in ("path", "name"):  # `source` and `name` beside it replace these
        del serving["properties"][key]
    serving.pop("required")
    fleet = of_settings(FleetConfig, set_by("fleet.yaml"))
    fleet.pop("required")  # by default the chart has no fleet
    return {
        "routerConfig": of_settings(RouterConfig, set_by("router.yaml")),
        "workerConfig": of_settings(WorkerConfig, set_by("workers.yaml")),
        "preprocessorConfig": of_settings(PreprocessorConfig, set_by("preprocessor.yaml")),
        "encoderConfig": of_settings(EncoderConfig, set_by("encoder.yaml")),
        "plannerConfig": of_settings(PlannerConfig, set_by("planner.yaml")),
        "serving": serving,
        "fleet": fleet,
    }


def accept_decimals(schema: Any) -> None:
    """Let every number also be a string that is one, within the same bounds."""
    if isinstance(schema, list):
        for each in schema:
            accept_decimals(each)
    elif isinstance(schema, dict):
        kinds = schema.get("type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if "number" in kinds and "string" not in kinds:
            schema["type"] = [*kinds, "string"]
            bounds = tuple(schema.get(bound) for bound in BOUNDS)
            schema["pattern"] = f"^({DECIMALS[bounds]})$"
        for each in schema.values():
            accept_decimals(each)


def require(schema: dict[str, Any], values: dict[str, Any]) -> None:
    """Require every value whose default is not empty."""
    schema["required"] = sorted(key for key, value in values.items() if value not in ("", [], {}))
    for key, value in values.items():
        inner = schema["properties"].get(key, {})
        if isinstance(value, dict) and "properties" in inner:
            require(inner, value)


def set_by(template: str) -> set[str]:
    """Return the settings that this template refuses to take."""
    (names,) = re.findall(r"range \$key := list ((?:\"\w+\" ?)+)\}\}", (CHART / "templates" / template).read_text())
    return set(re.findall(r"\w+", names))


def of_settings(settings: type[Config], set_by_chart: set[str]) -> dict[str, Any]:
    """Return the schema of an object with exactly these settings."""
    unknown = set_by_chart - set(settings.model_fields)
    assert not unknown, f"{settings.__name__} has no {unknown}"
    schema = settings.model_json_schema()
    validators = settings.__pydantic_decorators__.field_validators.values()
    read_otherwise = {field for each in validators if each.info.mode == "before" for field in each.info.fields}
    for key in set_by_chart | read_otherwise:
        schema["properties"][key] = {}
    schema["required"] = sorted(set(schema.get("required", [])) - set_by_chart)
    return simplified(schema, schema.get("$defs", {}))


def simplified(schema: dict[str, Any], named: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with its references replaced by their targets."""
    if "$ref" in schema:
        return simplified(named[schema["$ref"].rpartition("/")[2]], named)
    if "anyOf" in schema:
        first, *others = schema["anyOf"]
        if others != [{"type": "null"}]:
            return {"anyOf": [simplified(each, named) for each in schema["anyOf"]]}
        said = simplified(first, named)
        return {**said, "type": [said["type"], "null"]}
    said = {key: schema[key] for key in KEPT if schema.get(key) not in (None, [])}
    for key in ("items", "additionalProperties"):
        if isinstance(said.get(key), dict):
            said[key] = simplified(said[key], named)
    if "properties" in schema:
        said["properties"] = {name: simplified(each, named) for name, each in schema["properties"].items()}
    return said


if __name__ == "__main__":
    main()
