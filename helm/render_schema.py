"""Generator of the settings in helm/tandem/values.schema.json: `render_schema.py [--check]`.

The settings of routers, workers and planners come from the classes that read them. So helm refuses a misspelt setting,
before a pod fails to start. Only the schema's `definitions` are generated; the rest of the file is written by hand.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from cluster.config import Config
from engine.config import WorkerConfig
from planner.runtime import PlannerConfig
from router.config import RouterConfig
from router.models.config import ModelEntry

CHART = Path(__file__).parent / "tandem"
PATH = CHART / "values.schema.json"
KEPT = (
    "type", "enum", "const", "pattern", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "items", "additionalProperties", "required",
)  # fmt: skip
"""Keywords of pydantic's schemas to keep; titles, defaults and formats are left out."""


def main() -> None:
    schema = json.loads(PATH.read_text())
    schema["definitions"] = definitions()
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
    return {
        "routerConfig": of_settings(RouterConfig, set_by("router.yaml")),
        "workerConfig": of_settings(WorkerConfig, set_by("workers.yaml")),
        "plannerConfig": of_settings(PlannerConfig, set_by("planner.yaml")),
        "serving": serving,
    }


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
