"""How to install parts of Tandem that an environment lacks."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from cluster.errors import StartError

EXTRAS: dict[str, tuple[str, ...]] = {
    "client": ("grpc", "grpc_health", "grpc_reflection", "grpc_status", "typer", "rich"),
    "router": (
        *("tokenizers", "transformers", "huggingface_hub", "jinja2", "llguidance", "redis", "uvloop"),
        *("fastapi", "starlette", "uvicorn", "httptools", "python_multipart", "prometheus_client"),
        *("aiohttp", "msgspec", "zmq"),
    ),
    "gateway": ("envoy",),
    "worker": ("torch", "safetensors", "nixl", "nixl_cu12"),
    "cuda": ("pynvml",),
    "ray": ("ray",),
    "ucxx": ("ucxx",),
    "sizing": ("matplotlib",),
    "otel": ("opentelemetry",),
    "bench": ("aiohttp",),
    "preprocessor": ("aiohttp",),
    "vllm": ("vllm",),
}
"""Names under which each extra's packages are imported."""


def how_to_install(extra: str) -> str:
    """Return the commands that install an extra, for a message."""
    return f"`pip install '.[{extra}]'` in a checkout of Tandem, or `pip install 'WHEEL[{extra}]'`"


def check_installed(module: str, purpose: str) -> None:
    """Check that a module of an extra is installed.

    Raises StartError naming `purpose`.
    """
    if find_spec(module) is None:
        raise StartError(purpose, f"needs {module}: {how_to_install(_extra_with(module) or module)}")


def extra_of(error: ModuleNotFoundError) -> str | None:
    """Return the extra that has the module which is missing; None where none has it."""
    return _extra_with((error.name or "").partition(".")[0])


def _extra_with(module: str) -> str | None:
    return next((extra for extra, modules in EXTRAS.items() if module in modules), None)


@contextmanager
def needing(field: str, kind: type[StartError] = StartError) -> Iterator[None]:
    """Import packages of an extra.

    Raises `kind`, naming the setting that needs them and the command that installs them.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        extra = extra_of(error)
        if extra is None:
            raise
        raise kind(field, f"{error}: {how_to_install(extra)}") from None
