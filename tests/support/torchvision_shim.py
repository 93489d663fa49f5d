"""torchvision and torchaudio for vLLM's environment on a CPU: wheels for another torch, of which the Python code fits.

vLLM's processors of pictures import torchvision, and those of sounds change sample rates with torchaudio. `make vllm`
unpacks both wheels in a folder of its own, and writes `python-media`, the interpreter that has them. Operators of
torchvision are declared and not there, and no processor of pictures calls one. torchaudio looks for none.
"""

import fcntl
import os
import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path

VERSIONS = {"torchvision": "0.28.0", "torchaudio": "2.11.0"}
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
# This environment's interpreter with torchvision and torchaudio, for `vllm_python` of models that read media, on a CPU.
venv=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$venv/torchvision${PYTHONPATH:+:$PYTHONPATH}"
exec "$venv/bin/python" "$@"
"""


def install() -> None:
    """Unpack the wheels and write the interpreter, unless they are there, or not needed."""
    if ON_GPU:
        return
    with (VENV / "torchvision.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes may want it at once
        for name, version in VERSIONS.items():
            if not (FOLDER / f"{name}-{version}.dist-info").exists():
                _unpack(name, version)
        if not MEDIA_PYTHON.exists() or MEDIA_PYTHON.read_text() != SCRIPT:
            written = MEDIA_PYTHON.with_name(f"{MEDIA_PYTHON.name}.new")
            written.write_text(SCRIPT)
            written.chmod(0o755)
            written.rename(MEDIA_PYTHON)


def _unpack(name: str, version: str) -> None:
    for old in FOLDER.glob(f"{name}*"):
        shutil.rmtree(old)
    with tempfile.TemporaryDirectory(dir=VENV) as folder:
        command = [str(VENV / "bin" / "python"), "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", folder, f"{name}=={version}"]
        subprocess.run(command, check=True)
        unpacked = Path(folder) / "unpacked"
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            wheel.extractall(unpacked)
        if name == "torchvision":
            first = unpacked / name / "__init__.py"
            first.write_text(DECLARED + first.read_text())
        else:
            shutil.rmtree(unpacked / name / "lib")
        FOLDER.mkdir(exist_ok=True)
        for entry in sorted(
            unpacked.iterdir(), key=lambda entry: entry.suffix == ".dist-info"
        ):  # which tells that all is there
            entry.rename(FOLDER / entry.name)


if __name__ == "__main__":
    install()
