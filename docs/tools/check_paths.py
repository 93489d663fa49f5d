"""Check that paths in backticks exist, in documents and in the code's docstrings and comments.

A path is a name with a slash, or an ending of the repository's files: `router/placement/fleet/index.py`, `arrivals.py`.
A bare file name must be that of some file. `python docs/tools/check_paths.py` exits with 1 where any is missing.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
QUOTED = re.compile(r"`([A-Za-z_.][\w./-]*(?:\{[\w,/-]+\}[\w./-]*)?)`")
ALTERNATIVES = re.compile(r"\{([\w,/-]+)\}")
ENDINGS = (".py", ".md", ".proto", ".toml", ".yaml", ".h", ".cpp", ".cu", ".Dockerfile", ".tpl")
LOGS = ("docs/log.md", "CHANGELOG.md")
"""Documents about the past, which name files that are gone."""
ELSEWHERE = {
    ".proto",
    "keys.yaml",
    "api-keys.yaml",
    "cluster.yaml",
    "router.yaml",
    "worker.yaml",
    "values.yaml",
    "models.yaml",
    "setup.py",
}
"""Files of users, and names that stand for any file."""


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def expanded(path: str) -> list[str]:
    """Return the paths that a path with `{a,b}` stands for."""
    if (found := ALTERNATIVES.search(path)) is None:
        return [path]
    return [path[: found.start()] + each + path[found.end() :] for each in found[1].split(",")]


def missing(files: list[str]) -> list[str]:
    """Return a line for each path in backticks that no tracked file or folder has."""
    known = set(files) | {str(parent) for file in files for parent in Path(file).parents}
    tops = {path.partition("/")[0] for path in files}
    names = {Path(file).name for file in files}
    wrong: list[str] = []
    for file in files:
        if not file.endswith((".md", ".py")) or file in LOGS or "_pb2" in file:
            continue
        folder = Path(file).parent
        for number, line in enumerate((ROOT / file).read_text().splitlines(), 1):
            for path in (each for quoted in QUOTED.findall(line) for each in expanded(quoted)):
                clean = path.rstrip("/")
                if clean in ELSEWHERE or (not path.endswith(ENDINGS) and clean.partition("/")[0] not in tops):
                    continue
                if "/" not in path and not path.endswith(ENDINGS):
                    continue
                tried = {clean, str(folder / clean)} | {str(parent / clean) for parent in folder.parents}
                found = tried & known or ("/" not in clean and clean in names)
                found = found or ("/" in clean and any(each.endswith("/" + clean) for each in known))
                if not found:
                    wrong.append(f"{file}:{number}: no file `{path}`")
    return wrong


if __name__ == "__main__":
    lines = missing(tracked())
    print("\n".join(lines) or "every path in backticks exists")
    sys.exit(bool(lines))
