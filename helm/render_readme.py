"""Generator of helm/tandem/README.md from comments of values.yaml and from models.md: `render_readme.py [--check]`."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent / "tandem"
HEAD = """# The chart `tandem`

Routers, prefill and decode workers of one or several models. [docs/kubernetes.md](../../docs/kubernetes.md) explains
how to deploy it; examples are in [helm/examples](../examples).

`values.schema.json` refuses an unknown key by its name, also within a `config`. A `null` may remove a value whose
default is empty; every other value is required. Numbers may be strings of decimals, which `--set x=0.5` makes. This
table is generated from the comments of `values.yaml`.

| value | default | what |
| --- | --- | --- |
"""


def main() -> None:
    text = HEAD + "".join(rows()) + "\n" + (CHART.parent / "models.md").read_text()
    path = CHART / "README.md"
    if "--check" in sys.argv:
        if not path.exists() or path.read_text() != text:
            sys.exit(f"{path} is not what values.yaml says: run helm/render_readme.py")
    else:
        path.write_text(text)


def rows() -> Iterator[str]:
    """Yield a row for each key with a comment `# -- ...` above it."""
    lines = (CHART / "values.yaml").read_text().splitlines()
    values = yaml.safe_load("\n".join(lines))
    path: list[tuple[int, str]] = []
    about: list[str] = []
    for line in lines:
        if said := re.match(r"\s*# (-- )?(.*)", line):
            about = [said[2]] if said[1] else [*about, said[2]] if about else []
            continue
        key = re.match(r"( *)([A-Za-z]+):", line)
        if key is None or line.lstrip().startswith("-"):
            about = []
            continue
        indent = len(key[1])
        path = [(depth, name) for depth, name in path if depth < indent] + [(indent, key[2])]
        if about:
            names = [name for _, name in path]
            yield f"| `{'.'.join(names)}` | `{json.dumps(_value(values, names))}` | {' '.join(about)} |\n"
        about = []


def _value(values: Any, names: list[str]) -> Any:
    for name in names:
        values = values[name]
    return values


if __name__ == "__main__":
    main()
