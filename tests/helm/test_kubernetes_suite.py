"""The suite for real clusters, as far as it goes without one: its plan, its pods, its load and what it reads."""

import ast
import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import StartError
from engine.backends.sim.runner import weights_of
from engine.config import WorkerConfig
from engine.model.adapters import read_adapters
from engine.model.model_dir import ModelDir
from planner.runtime import PlannerConfig
from router.security.api_keys import entry_for, new_key
from support.certificates import Authority
from support.chart import (
    KUBERNETES,
    ROOT,
    check_budgets,
    check_rules,
    check_schema,
    config_of,
    needs_helm,
    pod_specs,
    render,
)
from support.chart_pods import TOKEN, LoopbackPods, all_ready, up
from support.kube_api import KubeApi
from support.kubernetes import cluster
from support.kubernetes.cluster import PodState, Site, address_in, result_in, schedulable
from support.kubernetes.load import Load, Result
from support.kubernetes.plan import (
    CHANGES,
    PLANNER_OFF,
    PLANNER_ON,
    ROUTER_METRIC,
    TRIALS,
    Trial,
    installed,
    merged,
    revised,
)
from support.kubernetes.settings import APP_VERSION, Settings
from support.processes import until
from support.scale_api import ScaleApi

pytestmark = needs_helm
LOAD = ROOT / "tests" / "support" / "kubernetes" / "load.py"
NETWORK = "127.0.2"
"""Addresses of this file's pods."""
ELSEWHERE = Settings(
    image_registry="registry.example.com/ai/",
    image_tag="1.2.3",
    router_image="r",
    worker_image="w",
    redis_image="x/redis:7",
)
KUBECTL = """#!/bin/sh
case "$*" in
  *"auth can-i"*) echo yes ;;
  *"get serviceaccounts"*) echo serviceaccount/default ;;
  *"get pods -o wide"*) echo the pods as they were ;;
  *"get events"*) echo the events as they were ;;
  *version*) echo '{"serverVersion": {"gitVersion": "v1.36.2"}}' ;;
esac
"""
by_name = pytest.mark.parametrize("trial", TRIALS.values(), ids=lambda trial: trial.name)


# ------------------------------------------------------------------------------------------------------ the plan


def test_each_test_has_a_trial_and_each_trial_a_test() -> None:
    tree = ast.parse((ROOT / "tests" / "kubernetes" / "test_cluster.py").read_text())
    tests = [
        node.name for node in tree.body if isinstance(node, ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]
    assert tests == [f"test_{name}" for name in TRIALS]


@pytest.mark.parametrize("planner", [PLANNER_ON, PLANNER_OFF])
def test_sizes_may_be_a_planners(planner: dict[str, Any]) -> None:
    check_budgets(render(merged(TRIALS["sizes"].values_with(Settings()), planner)))


@by_name
def test_what_a_trial_installs_is_valid(trial: Trial) -> None:
    manifests = installed(trial, ELSEWHERE)
    check_schema(manifests, KUBERNETES[-1])
    check_rules(manifests)
    check_budgets(manifests)
    for name, spec in pod_specs(manifests):
        assert not any("hostPath" in volume for volume in spec["volumes"]), "PodSecurity `restricted` would refuse it"
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            assert container["image"] in (
                "registry.example.com/ai/r:1.2.3",
                "registry.example.com/ai/w:1.2.3",
                "x/redis:7",
            )
            if container["name"] == "worker":
                WorkerConfig.parse(config_of(manifests, name, "worker"))
            elif container["name"] == "planner":
                PlannerConfig.parse(config_of(manifests, name, "planner")).check()


def test_each_revision_of_the_plan_differs_in_one_thing(tmp_path: Path) -> None:
    """A simulated worker reads all of it, as it would in a pod."""
    seen: dict[str, tuple[bytes, bytes, bytes, bytes]] = {}
    for changed in ("nothing", *CHANGES):
        source = revised(changed)["models"][0]["source"]["download"]
        folder = tmp_path / changed
        folder.mkdir()
        env = os.environ | {"MODEL_DIR": str(folder), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        subprocess.run(source["command"], check=True, env=env, timeout=120)
        model_dir = ModelDir.open(folder)
        (adapter,) = read_adapters({"legal": folder / "legal"})
        weights = (folder / "model.safetensors").read_bytes()
        seen[changed] = weights, model_dir.config_fingerprint(), weights_of(model_dir), adapter.fingerprint
    plain = seen.pop("nothing")
    differs = {changed: [a != b for a, b in zip(values, plain, strict=True)] for changed, values in seen.items()}
    assert differs == {
        "weights": [True, False, True, False],
        "config": [False, True, True, False],
        "tokenizer": [False, True, True, False],
        "adapter": [False, False, False, True],
    }


def test_the_plan_is_printed_without_a_cluster() -> None:
    env = {key: value for key, value in os.environ.items() if key != "KUBECONFIG"}
    env |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "TANDEM_NAMESPACE_PREFIX": "mine"}
    command = [sys.executable, "-m", "support.kubernetes.plan"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=env, cwd=ROOT)
    assert answer.returncode == 0, answer.stderr
    for name, trial in TRIALS.items():
        assert f"test_{name}: {trial.about}" in answer.stdout
        assert f"mine-{name}" in answer.stdout
    assert "demo-simulated-decode x 2" in answer.stdout
    assert "the right to patch nodes" in answer.stdout
    assert re.search(r"requests   \d\.\d\d cores", answer.stdout)


def test_every_test_is_skipped_by_name_without_a_cluster(tmp_path: Path) -> None:
    with KubeApi(tmp_path) as api:
        pass
    for config, reason in (("", "KUBECONFIG is unset"), (str(api.kubeconfig), "does not answer")):
        env = os.environ | {"KUBECONFIG": config, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "tests/kubernetes"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=env, cwd=ROOT)
        assert answer.returncode == 0, answer.stdout
        for name in TRIALS:
            assert re.search(rf"test_{name}: Skipped: .*{reason}", answer.stdout), answer.stdout


def test_a_trial_that_fails_tells_what_its_pods_and_events_were(tmp_path: Path) -> None:
    """Its fixture sees no exception. Here helm reaches no cluster, and a kubectl answers that knows none."""
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(KUBECTL)
    kubectl.chmod(0o755)
    env = os.environ | {"KUBECONFIG": str(tmp_path / "none"), "PYTHONPATH": str(ROOT)}
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "tests/kubernetes", "-k", "test_sim"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=env, cwd=ROOT)
    assert answer.returncode == 1, answer.stdout
    assert "the pods as they were" in answer.stdout
    assert "the events as they were" in answer.stdout


def test_a_cluster_that_answers_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if cluster.KUBECTL is None:
        pytest.skip("no kubectl")
    with KubeApi(tmp_path) as api:
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig))
        assert cluster.why_not() == ""


def test_settings_come_from_the_environment() -> None:
    environment = {"TANDEM_IMAGE_REGISTRY": "r/", "TANDEM_LOAD_S": "5", "TANDEM_STORAGE_CLASS": ""}
    settings = Settings.from_environment(environment)
    assert (settings.image_registry, settings.load_s, settings.storage_class) == ("r/", "5", "")
    assert settings.router_reference == f"r/tandem-router:{APP_VERSION}"
    secret = Settings.from_environment({"TANDEM_PULL_SECRET": "registries/mine"})
    assert secret.values()["image"]["pullSecrets"] == ["mine"]
    (_, pod) = Site(TRIALS["sim"], secret, []).pod("load", "", {})
    assert pod["spec"]["imagePullSecrets"] == [{"name": "mine"}]
    with pytest.raises(StartError, match="TANDEM_PULL_SECRET"):
        Settings.from_environment({"TANDEM_PULL_SECRET": "mine"})
    with pytest.raises(StartError, match="TANDEM_WAIT_S"):
        Settings.from_environment({"TANDEM_WAIT_S": "long"})
    assert f'appVersion: "{APP_VERSION}"' in (ROOT / "helm" / "tandem" / "Chart.yaml").read_text()


# ------------------------------------------------------------------------------------------------ pods and words


@pytest.mark.parametrize("version", KUBERNETES)
def test_the_suites_own_pods_are_valid_and_restricted(version: str) -> None:
    site = Site(TRIALS["sim"], ELSEWHERE, [])
    volumes = {
        "mounts": [{"name": "ca", "mountPath": "/etc/ca"}],
        "volumes": [{"name": "ca", "secret": {"secretName": "s"}}],
    }
    config, pod = site.pod("load", LOAD.read_text(), {"LOAD": "{}"}, **volumes)
    check_schema([config, pod], version)
    spec = pod["spec"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = spec["containers"]
    assert container["image"] == "registry.example.com/ai/r:1.2.3"
    assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
    assert not container["securityContext"]["allowPrivilegeEscalation"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    assert "app.kubernetes.io/instance" not in pod["metadata"]["labels"], "no policy takes it for a member"


def test_pods_are_read() -> None:
    pod: dict[str, Any] = {
        "metadata": {"name": "demo-router-0", "labels": {"app.kubernetes.io/component": "router"}},
        "spec": {"nodeName": "n"},
        "status": {"phase": "Running", "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]},
    }
    state = PodState.of(pod)
    assert (state.name, state.node, state.ip, state.component) == ("demo-router-0", "n", "10.0.0.1", "router")
    assert (state.ready, state.leaving) == (True, False)
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    pod["status"]["conditions"][0]["status"] = "False"
    assert (PodState.of(pod).ready, PodState.of(pod).leaving) == (False, True)
    waiting = PodState.of({"metadata": {"name": "a"}, "spec": {}, "status": {"phase": "Pending"}})
    assert (waiting.node, waiting.ip, waiting.ready, waiting.component) == ("", "", False, "")


def test_nodes_are_read() -> None:
    def node(name: str, ready: str = "True", **spec: Any) -> dict[str, Any]:
        return {
            "metadata": {"name": name},
            "spec": spec,
            "status": {"conditions": [{"type": "Ready", "status": ready}]},
        }

    control = {"taints": [{"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}]}
    nodes = [node("a"), node("b", **control), node("c", "Unknown"), node("d", unschedulable=True)]
    assert schedulable([*nodes, node("e", taints=[{"key": "k", "effect": "PreferNoSchedule"}])]) == ["a", "e"]


def test_what_kubectl_prints_is_read() -> None:
    assert address_in("Forwarding from 127.0.0.1:40123 -> 50051\n") == "127.0.0.1:40123"
    with pytest.raises(AssertionError, match="unable to"):
        address_in("error: unable to forward port")
    log = '{"event": "begun"}\nwords\n{"event": "ended", "finished": 3, "lost": 1, "errors": ["Unavailable: x"]}\n'
    assert result_in(log) == Result(finished=3, lost=1, errors=["Unavailable: x"])
    with pytest.raises(AssertionError, match="no result"):
        result_in('{"event": "begun"}\n')


# ------------------------------------------------------------------------------------------------------ the load


class Sent:
    """The load program as a process, as its pod runs it."""

    def __init__(self, folder: Path, load: Load) -> None:
        self._load = load
        self._program = shutil.copy(LOAD, folder / "program.py")  # a program's folder comes first on its import path
        self._env = os.environ | {"LOAD": json.dumps(load.__dict__), "PYTHONPATH": str(ROOT)}

    async def __aenter__(self) -> "Sent":
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, str(self._program), env=self._env, stdout=asyncio.subprocess.PIPE
        )
        first = await self.process.stdout.readline()
        assert json.loads(first) == {"event": "begun"}
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    async def result(self) -> Result:
        if not self._load.once:
            self.process.send_signal(signal.SIGTERM)
        log = (await self.process.stdout.read()).decode()
        assert await self.process.wait() == 0
        return result_in(log)


async def test_the_load_loses_no_stream_of_pods_that_stop_or_die(tmp_path: Path) -> None:
    node = LoopbackPods(installed(TRIALS["deletes"], Settings()), tmp_path, {}, network=NETWORK)
    async with up(node, {}):
        await all_ready(node)
        routers = ",".join(f"{pod.ip}:50051" for pod in node.pods_of("demo"))
        async with Sent(tmp_path, Load(routers, streams=4, tokens=200)) as sent:
            decode, prefill = node.pods_of("demo-simulated-decode"), node.pods_of("demo-simulated-prefill")
            decode[0].process.send_signal(signal.SIGTERM)
            await decode[0].process.wait()
            await node.start(decode[0])
            await all_ready(node)
            await node.kill(prefill[0])
            await node.kill(decode[1])
            await asyncio.sleep(1)
            result = await sent.result()
        assert result.finished > 4
        assert (result.lost, result.different) == (0, 0), result.errors
        assert result.compared > 0
        assert result.verified_blocks > 0
        load = Load(routers, streams=4, tokens=200)
        async with Sent(tmp_path, load) as sent:
            await node.kill(node.pods_of("demo")[0])
            await asyncio.sleep(1)
            result = await sent.result()
        assert (result.lost, result.different) == (0, 0), result.errors
        assert result.compared > 0
        metrics = await asyncio.to_thread(read, f"http://{node.pods_of('demo')[1].ip}:9400/metrics")
        assert f"\n{ROUTER_METRIC}{{" in metrics
        for pod in node.pods:
            await node.kill(pod)
        with pytest.raises(AssertionError):
            async with Sent(tmp_path, Load(routers, prompts=1)) as sent:
                assert (await sent.result()).lost == 0


async def test_the_planner_of_the_plan_grows_and_shrinks_the_pool(tmp_path: Path) -> None:
    decode = ("serving", "demo-simulated-decode")
    with ScaleApi(TOKEN, **{"demo-simulated-prefill": 1, decode[1]: 1}) as api:
        node = LoopbackPods(installed(TRIALS["planner"], Settings()), tmp_path, {}, api.url, NETWORK)
        async with up(node, {}):
            await all_ready(node)
            (router,) = node.pods_of("demo")

            async with Sent(tmp_path, Load(f"{router.ip}:50051", streams=24, tokens=30)) as sent:
                await until(lambda: api.replicas[decode] > 1, "the planner has grown the pool")
                result = await sent.result()
            assert (result.lost, result.different) == (0, 0), result.errors
            await until(lambda: api.replicas[decode] == 1, "the planner has shrunk the pool")


async def test_the_load_uses_certificates_and_keys(tmp_path: Path) -> None:
    members, public, key = Authority(tmp_path, "members"), Authority(tmp_path, "public"), new_key()
    secrets = {
        "tandem-member": files_of(members, "member", "tandem.internal"),
        "tandem-public": files_of(public, "door", f"{NETWORK}.3"),
        "tandem-keys": {"keys.yaml": entry_for(key, "test", "", [], None).encode()},
    }
    node = LoopbackPods(installed(TRIALS["tls"], Settings()), tmp_path, secrets, network=NETWORK)
    async with up(node, {}):
        await all_ready(node)
        (router,) = node.pods_of("demo")
        address, ca = f"{router.ip}:50051", str(public.path)
        async with Sent(tmp_path, Load(address, api_key=key, ca=ca, once=True)) as sent:
            result = await sent.result()
        assert (result.finished, result.lost) == (4, 0)
        for api_key, file, error in (("", ca, "Unauthenticated"), (key, "", "Unavailable")):
            async with Sent(tmp_path, Load(address, api_key=api_key, ca=file, once=True)) as sent:
                result = await sent.result()
            assert (result.finished, result.lost) == (0, 4)
            assert all(each.startswith(error) for each in result.errors), result.errors


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode()
        return text


def files_of(authority: Authority, name: str, host: str) -> dict[str, bytes]:
    issued = authority.issue(name, (host,))
    paths = {"tls.crt": issued.cert, "tls.key": issued.key, "ca.crt": authority.path}
    return {key: path.read_bytes() for key, path in paths.items()}
