"""Generator of docs/settings.md from the configuration classes: `settings_reference.py [--check]`.

With --check, it fails when the page differs from the classes.
"""

import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

sys.path.insert(0, str(Path(__file__).parents[2]))

from cluster.settings import (
    DiscoverySettings,
    DrainSettings,
    HealthSettings,
    HostSettings,
    LogSettings,
    MetricsSettings,
    ReachedSettings,
    TlsSettings,
)
from encode_worker.config import EncoderConfig
from engine.config import WorkerConfig
from engine.engine_kind import BUILT_IN, kind_of
from engine.settings import CommonSettings, VllmFlags
from planner.config import PoolConfig
from planner.executors import KubernetesConfig
from planner.runtime import PlannerConfig
from preprocessor.config import MediaSettings, PreprocessorConfig
from router.admission.config import TenantPolicy
from router.config import RouterConfig
from router.models.config import FleetConfig, ModelEntry, ModelRule, ServerEntry
from router.security.config import ApiKey
from tandem.ray.settings import RaySettings, RoleResources

PAGE = Path(__file__).parents[1] / "settings.md"
HEAD = """# Settings

```
python -m router --config router.yaml --set max_queued=1000
```

A role reads a YAML file (`--config`) and overrides (`--set key=value`). `tandem up` takes the same keys as `--router
key=value` and `--worker key=value`, and in a cluster file below `router`, `worker`, `preprocessor` and `encoder`; the
Helm chart has them below `router.config`, `worker.config`, `planner.config` and so on. An unknown key or a value out of
range stops the start with an error that names the key.

*Basic* settings are those that most clusters change. *Advanced* settings have defaults that fit nearly always.
"""
TABLE = "| key | default | meaning |\n| --- | --- | --- |\n"
BASIC: dict[type[BaseModel], tuple[str, ...]] = {
    RouterConfig: (
        *("model", "models", "port", "http_port", "tenants", "default_tenant", "api_keys_file"),
        "default_deadline_s",
    ),
    WorkerConfig: (*("model", "routers", "kv_memory_mib", "kv_host_memory_mib", "kv_disk_dir", "tensor_parallel"),),
    PlannerConfig: (
        *("routers", "model", "prefill", "decode", "max_total", "ttft_s", "itl_s", "goal", "start_s"),
        "switch",
    ),
    PreprocessorConfig: (*("model", "models", "port", "processes", "allowed_hosts", "blob_memory_mib"),),
    EncoderConfig: ("model", "port", "embeddings_memory_mib"),
}
"""Basic settings, at most 12 for each role."""
SHARED: dict[str, tuple[type[BaseModel], ...]] = {
    "Every role": (HostSettings, LogSettings, TlsSettings, MetricsSettings, HealthSettings),
    "Router, worker and preprocessor": (ReachedSettings,),
    "Every role but the planner": (DrainSettings,),
    "Worker with the vllm engine, preprocessor and encode worker": (VllmFlags,),
    "Router, worker and planner": (DiscoverySettings,),
    "Preprocessor and encode worker": (MediaSettings,),
}
"""Classes with settings of several roles."""
OF_ENGINES = {
    engine: set(kind_of(engine).settings.model_fields) - set(CommonSettings.model_fields) for engine in BUILT_IN
}
"""Settings that one engine reads."""
PARTS: dict[type[BaseModel], str] = {
    ModelEntry: "An entry of the router's `models`",
    ModelRule: "An entry of the router's `model_rules`",
    FleetConfig: "The router's `fleet`",
    ServerEntry: "An entry of `servers` of a fleet",
    TenantPolicy: "A tenant: the router's `tenants.NAME` and `default_tenant`",
    ApiKey: "An API key: an entry of the `api_keys_file`",
    PoolConfig: "A pool of the planner: `prefill` and `decode`",
    KubernetesConfig: "The planner's `kubernetes`",
    RaySettings: "The key `ray` of a cluster file",
    RoleResources: "A role's resources: `ray.prefill`, `ray.decode` and `ray.encoder`",
}


def main() -> None:
    text = "".join(page())
    if "--check" not in sys.argv:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        sys.exit(f"{PAGE} does not match the configuration classes: run docs/tools/settings_reference.py")


def page() -> Iterator[str]:
    """Yield the parts of the page."""
    yield HEAD
    roles = ("Router", RouterConfig), ("Worker", WorkerConfig), ("Planner", PlannerConfig)
    media = ("Preprocessor", PreprocessorConfig), ("Encode worker", EncoderConfig)
    for title, settings in (*roles, *media):
        basic = BASIC[settings]
        assert len(basic) <= 12, title
        of_engines = OF_ENGINES if settings is WorkerConfig else {}
        shared = {
            name for classes in SHARED.values() for each in classes if issubclass(settings, each) for name in own(each)
        }
        of_any_engine = {name for names in of_engines.values() for name in names}
        rest = set(settings.model_fields) - {*basic, *of_any_engine, *shared}
        yield f"\n## {title}: basic\n\n{TABLE}" + rows(settings, basic)
        if rest:
            yield f"\n## {title}: advanced\n\n{TABLE}" + rows(settings, in_order(settings, rest))
        for engine, names in of_engines.items():
            if own_names := set(names) - {*basic, *shared}:
                yield f"\n## {title}: {engine} engine\n\n{TABLE}" + rows(settings, in_order(settings, own_names))
    for title, classes in SHARED.items():
        yield f"\n## {title}\n\n{TABLE}" + "".join(rows(each, own(each)) for each in classes)
    for settings, title in PARTS.items():
        yield f"\n## {title}\n\n{TABLE}" + rows(settings, list(settings.model_fields))


def in_order(settings: type[BaseModel], names: set[str]) -> list[str]:
    return [name for name in settings.model_fields if name in names]


def own(settings: type[BaseModel]) -> list[str]:
    """Return the settings that a class declares itself."""
    return [name for name in settings.__annotations__ if name in settings.model_fields]


def rows(settings: type[BaseModel], names: Sequence[str]) -> str:
    """Return rows of a table of the named settings."""
    described = descriptions(settings)
    return "".join(f"| `{name}` | {default_of(settings.model_fields[name])} | {described[name]} |\n" for name in names)


def descriptions(settings: type[BaseModel]) -> dict[str, str]:
    """Return the text below each field, of the class and its bases.

    Fails for a field without a text.
    """
    found: dict[str, str] = {}
    for base in reversed(settings.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(tree, ast.ClassDef)
            for field, below in zip(tree.body, tree.body[1:], strict=False):
                match field, below:
                    case (
                        ast.AnnAssign(target=ast.Name(id=name)),
                        ast.Expr(value=ast.Constant(value=str() as text)),
                    ):
                        found[name] = re.sub(r"\s+", " ", text).strip().replace("|", "\\|")
    missing = [name for name in settings.model_fields if name not in found]
    assert not missing, f"{settings.__name__}: no text below {', '.join(missing)}"
    return found


def default_of(field: FieldInfo) -> str:
    """Return the default for display; a dash for none."""
    default: Any = field.get_default(call_default_factory=True)  # type: ignore[call-arg]
    if field.is_required():
        return "required"
    if default is None or default in ("", (), {}):
        return "-"
    if isinstance(default, BaseModel):
        return "see below"
    return f"`{json.dumps(default, default=str)}`"


if __name__ == "__main__":
    main()
