"""Generator of the Python code of every .proto beside it, and of the reference of the public API.

With --check, it fails when the checked-in code differs.
"""

import difflib
import os
import sys
import tempfile
from pathlib import Path

import reference
from grpc_tools import protoc  # type: ignore[import-untyped]

SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")
MANUAL = Path("docs", "grpc.md")


def generate(root: Path, out: Path) -> None:
    """Run protoc from `root`, so that the generated modules import each other as `protos.<name>_pb2`."""
    sources = sorted(str(path.relative_to(root)) for path in (root / "protos").glob("*.proto"))
    include = Path(protoc.__file__).parent / "_proto"
    arguments = [
        "protoc",
        f"-I{root}",
        f"-I{include}",
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_out={out}",
        f"--mypy_grpc_out=only_async:{out}",
        *sources,
    ]
    if protoc.main(arguments) != 0:
        sys.exit("protoc failed")
    with tempfile.TemporaryDirectory() as scratch:
        found = Path(scratch, "descriptors")
        wanted = [f"-I{root}", "--include_source_info", f"--descriptor_set_out={found}", "protos/inference.proto"]
        if protoc.main(["protoc", *wanted]) != 0:
            sys.exit("protoc failed")
        (out / MANUAL).parent.mkdir(exist_ok=True)
        (out / MANUAL).write_text(reference.render(found))


def check(root: Path) -> list[str]:
    """Return the unified diffs between the checked-in generated code and protoc's present output."""
    diffs: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        generate(root, Path(scratch))
        fresh = Path(scratch)
        names = {
            path.relative_to(of) for of in (fresh, root) for s in SUFFIXES for path in (of / "protos").glob(f"*{s}")
        }
        for name in sorted(names | {MANUAL}):
            old, new = root / name, fresh / name
            before = old.read_text().splitlines() if old.exists() else []
            after = new.read_text().splitlines() if new.exists() else []
            diffs += difflib.unified_diff(before, after, f"checked in: {name}", f"generated: {name}", lineterm="")
    return diffs


def main() -> None:
    # protoc finds its mypy plugin by PATH; the right one is installed beside this interpreter.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    root = Path(sys.argv[-1]).resolve()
    if "--check" not in sys.argv:
        generate(root, root)
    elif diffs := check(root):
        print("\n".join(diffs))
        sys.exit("what is generated from protos/ is stale; run `make protos`")


if __name__ == "__main__":
    main()
