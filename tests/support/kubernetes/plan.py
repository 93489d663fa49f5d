"""Plan of the suite: each trial, what it installs and what it needs.

`make test-kubernetes PLAN=1` prints it; no cluster is asked.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from support.chart import ROOT, cpu_of, render
from support.kubernetes.settings import Settings

RELEASE = "demo"
SMALL: dict[str, Any] = {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}}
"""Resources of a pod that simulates, so that small clusters hold a trial."""
SIMULATED: dict[str, Any] = {
    "name": "simulated",
    "source": {"configMap": {"config": {"vocab_size": 1000, "max_position_embeddings": 32768}}},
    "prefill": {"replicas": 2, "minAvailable": 1, "config": {"engine": "sim", "sim_step_ms": 2}},
    "decode": {"replicas": 2, "minAvailable": 1, "config": {"engine": "sim", "sim_step_ms": 10}},
}
PAIRS: dict[str, Any] = {
    "models": [SIMULATED],
    "router": {"replicas": 2, "minAvailable": 1, "resources": SMALL},
    "worker": {"resources": SMALL},
}
"""Two routers, two prefill and two decode workers: one of each may go."""
PLANNER_OFF: dict[str, Any] = {
    "planner": {"enabled": False, "config": {"prefill": {"min_workers": 2}, "decode": {"min_workers": 2}}}
}
PLANNER_ON: dict[str, Any] = {"planner": PLANNER_OFF["planner"] | {"enabled": True}}
"""A planner that keeps as many workers as the budgets of PAIRS need."""
PLANNED: dict[str, Any] = {
    "models": [
        SIMULATED
        | {
            "prefill": {"replicas": 1, "config": {"engine": "sim", "sim_step_ms": 2, "sim_block_kib": 8}},
            "decode": {
                "replicas": 1,
                "config": {"engine": "sim", "sim_step_ms": 40, "sim_block_kib": 8, "kv_memory_mib": 1},
            },
        }
    ],
    "router": {"resources": SMALL},
    "worker": {"resources": SMALL},
    "planner": {
        "enabled": True,
        "config": {
            "start_s": 10,
            "itl_s": 0.12,
            "step_s": 0.04,
            "down_after_s": 10,
            "prefill": {"max_workers": 1},
            "decode": {"max_workers": 4},
        },
    },
}
"""A decode worker has room for eight streams: 24 streams need more than one. Blocks of both roles are equally large."""


WRITES = """
import json, os, pathlib
from tokenizers import Tokenizer, models
changed = os.environ["CHANGED"]
config = {"model_type": "llama", "vocab_size": 1000, "max_position_embeddings": 32768}
vocabulary = {"x": 0, changed if changed == "tokenizer" else "y": 1}
files = {
    "config.json": json.dumps(config | ({"rope_theta": 5} if changed == "config" else {})),
    "tokenizer.json": Tokenizer(models.WordLevel(vocabulary, "x")).to_str(),
    "model.safetensors": "w" * (20 if changed == "weights" else 10),
    "legal/adapter_config.json": json.dumps({"peft_type": "LORA", "r": 4}),
    "legal/adapter_model.safetensors": "a" * (20 if changed == "adapter" else 10),
}
for name, content in files.items():
    path = pathlib.Path(os.environ["MODEL_DIR"], name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
"""
"""Program, without single quotes, that writes a simulated model and an adapter; CHANGED names what differs."""
CHANGES = ("weights", "config", "tokenizer", "adapter")


def revised(changed: str) -> dict[str, Any]:
    """Return the values of a model `simulated`, and of an adapter `legal`, in which one thing differs from others."""
    command = ["sh", "-c", f"CHANGED={changed} exec python -c '{WRITES}'"]
    adapters = {"adapters": {"legal": "/models/simulated/legal"}}
    pools = {role: SIMULATED[role] | {"config": SIMULATED[role]["config"] | adapters} for role in ("prefill", "decode")}
    source = {"source": {"download": {"image": "", "command": command, "size": "64Mi"}}}
    return PAIRS | {"models": [SIMULATED | source | pools]}


def merged(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Merge two sets of values as helm does: mappings key by key, all else replaced."""
    result = dict(values)
    for key, value in more.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


EMPTIED: dict[str, Any] = merged(
    PLANNED, {"planner": {"config": {role: {"min_workers": 0, "max_workers": 1} for role in ("prefill", "decode")}}}
)
"""A planner that takes every worker away while nobody asks."""
ROUTER_METRIC = "tandem_num_requests_running"
NAMESPACE = "rights to make and delete namespaces"


@dataclass(frozen=True)
class Trial:
    """One test of the suite."""

    name: str
    about: str
    example: str
    """Values file of helm/examples that the release takes."""
    values: dict[str, Any] = field(default_factory=dict)
    """Further values."""
    needs: tuple[str, ...] = ()
    """What the cluster must have, besides images and room for the pods."""

    def values_with(self, settings: Settings) -> dict[str, Any]:
        """Return all values of the release: the example's, the trial's and the settings'."""
        values: dict[str, Any] = yaml.safe_load((ROOT / self.path).read_text())
        for more in (self.values, settings.values()):
            values = merged(values, more)
        for model in values["models"]:
            if (download := model["source"].get("download")) is not None:
                download["image"] = settings.router_reference
        return values

    @property
    def path(self) -> str:
        """Path of the example in the repository."""
        return f"helm/examples/{self.example}.yaml"


TRIALS = {
    trial.name: trial
    for trial in (
        Trial("sim", "helm test, streams through the Service, metrics and probes", "sim"),
        Trial("storyteller", "a real model on CPUs: equal greedy text, KV verified", "laptop-restricted"),
        Trial("deletes", "pods deleted, and workers deleted by force, under load: no stream is lost", "sim", PAIRS),
        Trial("upgrade", "an upgrade and a rollback that replace every pod, under load", "sim", PAIRS),
        Trial("sizes", "sizes over kubectl scale, upgrades, a planner on and off", "sim", PAIRS),
        Trial("planner", "the planner's own rights: a pool grows with load and shrinks after it", "sim", PLANNED),
        Trial("emptied", "a planner that emptied its pools is turned off: they start again", "sim", EMPTIED),
        Trial("killed", "a router killed under load: its streams go on at the other one", "sim", PAIRS),
        Trial(
            "revisions",
            "other weights, config, tokenizer and adapter under one name, one upgrade each, under load",
            "sim",
            revised("nothing"),
        ),
        Trial(
            "drain",
            "pods evicted one after the other, and a node drained, under PodDisruptionBudgets and load",
            "sim",
            PAIRS,
            ("to drain a node: two schedulable nodes, and the right to patch nodes",),
        ),
        Trial(
            "redis",
            "two routers that workers find through Redis, which goes and comes back under load",
            "sim",
            PAIRS | {"redis": {"enabled": True}},
            ("Redis' image (TANDEM_REDIS_IMAGE)",),
        ),
        Trial("tls", "TLS between members and for clients, API keys, helm test with both", "tls"),
        Trial(
            "policies",
            "strangers reach routers' public ports and nothing else",
            "sim",
            {"router": {"resources": SMALL}, "worker": {"resources": SMALL}},
            ("a network that enforces NetworkPolicies: a probe finds out",),
        ),
        Trial(
            "volume",
            "the fit check names a missing claim; then a model on a volume",
            "laptop-restricted",
            {
                "models": [
                    {
                        "name": "storyteller",
                        "source": {"pvc": {"claimName": "models", "path": "storyteller"}},
                        "prefill": {"replicas": 1},
                        "decode": {"replicas": 1},
                    }
                ],
                "fitCheck": {"enabled": True},
            },
            ("a StorageClass (TANDEM_STORAGE_CLASS)", "one node for all pods, or a class with ReadOnlyMany"),
        ),
    )
}


def installed(trial: Trial, settings: Settings) -> list[dict[str, Any]]:
    """Return the manifests that a trial installs, hooks among them, as helm renders them without a cluster."""
    return render(trial.values_with(settings), release=RELEASE)


def lines(settings: Settings) -> Iterator[str]:
    """Yield the plan as text."""
    images = ", ".join(f"{key} {value}" for key, value in settings.values()["image"].items() if value)
    yield f"Images: {images}. Load: {settings.load_s} s around each fault."
    for trial in TRIALS.values():
        manifests = installed(trial, settings)
        kinds = Counter(manifest["kind"] for manifest in manifests)
        sizes = {
            manifest["metadata"]["name"]: manifest["spec"]["replicas"]
            for manifest in manifests
            if manifest["kind"] in ("Deployment", "StatefulSet")
        }
        yield ""
        yield f"test_{trial.name}: {trial.about}"
        yield f"  namespace  {settings.namespace_prefix}-{trial.name}, PodSecurity restricted"
        changed = f", with other {', '.join(sorted(trial.values))}" if trial.values else ""
        yield f"  installs   helm install {RELEASE} helm/tandem -f {trial.path}{changed}"
        yield f"             {', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))}"
        yield f"  pods       {', '.join(f'{name} x {size}' for name, size in sizes.items())}; and one that sends load"
        yield f"  requests   {sum(map(cpu_of, manifests)) / 1000:.2f} cores"
        yield f"  needs      {'; '.join((NAMESPACE, *trial.needs))}"


if __name__ == "__main__":
    print("\n".join(lines(Settings.from_environment())))
