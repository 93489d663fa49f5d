"""torchvision for vLLM's environment on a CPU, whose wheel is built for another torch: only its Python code is used.

vLLM's processors of pictures import torchvision. `make vllm` unpacks the wheel here, in a folder of its own; the
interpreters in `vllm_media/` have it. Its operators are declared and not there, and no processor of pictures calls one.
"""

import fcntl
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION = "0.28.0"
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".bench" / "torchvision"
PYTHON = Path(__file__).parent / "vllm_media" / "python"
"""Interpreter of `.venv-vllm` with torchvision."""
V2 = PYTHON.with_name("python_v2")
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


def install() -> None:
    """Unpack the wheel, unless it is there."""
    FOLDER.parent.mkdir(exist_ok=True)
    with (FOLDER.parent / "torchvision.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes may want it at once
        if (FOLDER / VERSION).exists():
            return
        shutil.rmtree(FOLDER, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=FOLDER.parent) as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
            subprocess.run([*command, "--dest", folder, f"torchvision=={VERSION}"], check=True)
            unpacked = Path(folder) / "unpacked"
            with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
                wheel.extractall(unpacked)
            first = unpacked / "torchvision" / "__init__.py"
            first.write_text(DECLARED + first.read_text())
            (unpacked / VERSION).touch()
            unpacked.rename(FOLDER)


if __name__ == "__main__":
    install()
