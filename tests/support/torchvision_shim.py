"""torchvision for vLLM's environment on a CPU, whose wheel is built for another torch: only its Python code is used.

vLLM's processors of pictures import torchvision. `make vllm` unpacks the wheel in a folder of its own, and writes
`python-media`, the interpreter that has it. Its operators are declared and not there, and no processor of pictures
calls one.
"""

import fcntl
import os
import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path

VERSION = "0.28.0"
ROOT = Path(__file__).parents[2]
VENV = ROOT / os.environ.get("TANDEM_VLLM_VENV", ".venv-vllm")
FOLDER = VENV / "torchvision"
ON_GPU = "TANDEM_VLLM_ON_GPU" in os.environ
"""Whether vLLM's environment is for a GPU: its own torchvision fits then."""
MEDIA_PYTHON = VENV / "bin" / "python-media"
PYTHON = VENV / "bin" / "python" if ON_GPU else MEDIA_PYTHON
"""Interpreter of the environment with torchvision."""
V2 = PYTHON if ON_GPU else Path(__file__).parent / "vllm_media" / "python_v2"
"""The same with Model Runner V2, as `vllm_engines.V2`."""
DECLARED = """import torch as _torch

_operators = _torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _operators.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_operators.define(
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor"
)
"""
"""Operators that torchvision registers implementations for when it is imported."""
SCRIPT = """#!/bin/sh
# This environment's interpreter with torchvision, for `vllm_python` of models that read pictures, on a CPU.
venv=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$venv/torchvision${PYTHONPATH:+:$PYTHONPATH}"
exec "$venv/bin/python" "$@"
"""


def install() -> None:
    """Unpack the wheel and write the interpreter, unless they are there, or not needed."""
    if ON_GPU:
        return
    with (VENV / "torchvision.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes may want it at once
        if not (FOLDER / VERSION).exists():
            _unpack()
        if not MEDIA_PYTHON.exists() or MEDIA_PYTHON.read_text() != SCRIPT:
            written = MEDIA_PYTHON.with_name(f"{MEDIA_PYTHON.name}.new")
            written.write_text(SCRIPT)
            written.chmod(0o755)
            written.rename(MEDIA_PYTHON)


def _unpack() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=VENV) as folder:
        command = [str(VENV / "bin" / "python"), "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", folder, f"torchvision=={VERSION}"]
        subprocess.run(command, check=True)
        unpacked = Path(folder) / "unpacked"
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            wheel.extractall(unpacked)
        first = unpacked / "torchvision" / "__init__.py"
        first.write_text(DECLARED + first.read_text())
        (unpacked / VERSION).touch()
        unpacked.rename(FOLDER)


if __name__ == "__main__":
    install()
