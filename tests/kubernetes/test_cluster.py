"""Trials on the cluster that KUBECONFIG names, each in a namespace of its own: `make test-kubernetes`.

docs/kubernetes.md, "Try a cluster", tells how to run them. `support.kubernetes.plan` has what each installs and needs.
"""

import base64
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import ServiceError
from protos import inference_pb2 as pb
from router.security.api_keys import entry_for, new_key
from support.certificates import Authority
from support.kubernetes.cluster import Site, kubectl, may, schedulable_nodes
from support.kubernetes.load import Load, Result
from support.kubernetes.plan import CHANGES, PLANNER_OFF, PLANNER_ON, RELEASE, ROUTER_METRIC, merged, revised
from tandem.client import Client

pytestmark = pytest.mark.timeout(3600)
DECODE, PREFILL = "deployment/demo-simulated-decode", "deployment/demo-simulated-prefill"
SERVICE = f"{RELEASE}:50051"
PROMPT = "Once upon a time, there was a fox. " * 8
LISTENS = "import http.server as s; s.test(s.SimpleHTTPRequestHandler, port=8080)"
CALLS = """
import json, os, socket

def is_open(target):
    host, port = target.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
    except OSError:
        return False
    return True

print(json.dumps({target: is_open(target) for target in json.loads(os.environ["TARGETS"])}))
"""
FILLS = """
import shutil
from tandem.storyteller import STORYTELLER
shutil.copytree(STORYTELLER, "/data/storyteller")
"""


async def test_sim(site: Site) -> None:
    await site.install()
    await site.helm("test", RELEASE)
    async with site.forwarded(f"service/{RELEASE}", 50051) as address, Client(address) as client:
        finish = await finish_of(client, token_ids=list(range(300)))
        assert finish.receipt.kv.verified_blocks > 0
        print("transport:", finish.receipt.kv.transport)
    async with site.forwarded(f"service/{RELEASE}", 8000) as address:
        assert json.loads(get(f"http://{address}/v1/models"))["data"][0]["id"] == "simulated"
    (router,) = await site.pods("router")
    async with site.forwarded(f"pod/{router.name}", 9400) as address:
        assert ROUTER_METRIC in get(f"http://{address}/metrics")
    async with site.load(Load(SERVICE)) as end:
        check(await end())


async def test_storyteller(site: Site) -> None:
    await site.install()
    await site.helm("test", RELEASE)
    texts = []
    async with site.forwarded(f"service/{RELEASE}", 50051) as address, Client(address) as client:
        for salt in ("a", "b"):
            sampling = pb.Sampling(max_tokens=40, temperature=0, ignore_eos=True)
            text = ""
            async with client.stream(PROMPT, sampling=sampling, cache_salt=salt) as pieces:
                async for piece in pieces:
                    text += piece.text
            assert piece.finish.receipt.kv.verified_blocks > 0
            texts.append(text)
    assert texts[0]
    assert texts[0] == texts[1]


async def test_deletes(site: Site) -> None:
    await site.install()
    async with site.load(Load(SERVICE)) as end:
        for component in ("decode", "prefill", "router"):
            await site.pause()
            await site.kubectl("delete", "pod", (await site.pods(component))[0].name)
            await site.settled()
        for component in ("decode", "prefill"):
            await site.pause()
            pod = (await site.pods(component))[0].name
            await site.kubectl("delete", "pod", pod, "--force", "--grace-period=0")
            await site.settled()
        check(await end())


async def test_upgrade(site: Site) -> None:
    await site.install()
    first = await uids_of(site)
    async with site.load(Load(SERVICE)) as end:
        await site.pause()
        note = {"annotations": {"tandem-test/round": "2"}}
        await site.install(merged(site.values, {"router": note, "worker": note}))
        second = await uids_of(site)
        assert not first & second, "every pod was replaced"
        await site.pause()
        await site.helm("rollback", RELEASE, "1")
        await site.settled()
        assert not second & await uids_of(site)
        assert len(await uids_of(site)) == len(first)
        check(await end())


async def test_sizes(site: Site) -> None:
    await site.install()
    await site.kubectl("scale", DECODE, "--replicas=3")
    await site.settled()
    await site.install()
    assert await site.size_of(DECODE) == 3
    if await may("create", "roles", site.namespace):
        for planner in (PLANNER_ON, PLANNER_OFF):
            await site.install(merged(site.values, planner))
            assert await site.size_of(DECODE) == 3
    else:
        site.could_not_try("a planner on and off", "this account may not create roles")
    model = site.values["models"][0]
    changed = merged(site.values, {"models": [model | {"decode": model["decode"] | {"replicas": 4}}]})
    said = await site.install(changed, check=False)
    assert "conflict" in said or await site.size_of(DECODE) == 4


async def test_planner(site: Site) -> None:
    if not await may("create", "roles", site.namespace):
        pytest.skip("this account may not create roles")
    await site.install()
    assert await site.size_of(DECODE) == 1

    async def grown() -> bool:
        return await site.size_of(DECODE) > 1

    async def shrunk() -> bool:
        return await site.size_of(DECODE) == 1

    async with site.load(Load(SERVICE, streams=24, tokens=30)) as end:
        await site.until(grown, "the planner has grown the pool")
        check(await end())
    await site.until(shrunk, "the planner has shrunk the pool")


async def test_emptied(site: Site) -> None:
    if not await may("create", "roles", site.namespace):
        pytest.skip("this account may not create roles")
    await site.install()

    async def emptied() -> bool:
        return [await site.size_of(pool) for pool in (PREFILL, DECODE)] == [0, 0]

    await site.until(emptied, "the planner has emptied the pools")
    off = merged(site.values, {"planner": {"enabled": False}})
    said = await site.install(off, check=False)
    if "conflict" in said:  # helm 4 wants to be told that the planner's size goes
        said = await site.install(off, "--force-conflicts")
    assert "it had 0, and no planner starts it any more" in said
    await site.settled()
    assert not await emptied()
    async with site.load(Load(SERVICE, once=True)) as end:
        check(await end(), compares=False)


async def test_killed(site: Site) -> None:
    await site.install()
    async with site.load(Load(SERVICE)) as end:
        await site.pause()
        await site.kubectl("delete", "pod", (await site.pods("router"))[0].name, "--force", "--grace-period=0")
        await site.settled()
        check(await end())


async def test_revisions(site: Site) -> None:
    await site.install()
    for changed in CHANGES:
        async with site.load(Load(SERVICE, model="legal" if changed == "adapter" else "simulated")) as end:
            await site.pause()
            (model,) = revised(changed)["models"]
            model["source"]["download"]["image"] = site.values["models"][0]["source"]["download"]["image"]
            await site.install(merged(site.values, {"models": [model]}))
            result = await end()
        check(result)
        assert len(result.revisions) == 2, f"{changed}: {result.revisions}"


async def test_drain(site: Site) -> None:
    await site.install()
    async with site.load(Load(SERVICE)) as end:
        for component in ("decode", "prefill", "router"):
            for pod in await site.pods(component):
                await site.pause()
                await site.evict(pod.name)
                await site.settled()
        nodes = await schedulable_nodes()
        if len(nodes) < 2:
            site.could_not_try("a node drained", f"{len(nodes)} schedulable nodes that this account may list")
        elif not await may("patch", "nodes"):
            site.could_not_try("a node drained", "this account may not patch nodes")
        else:
            await drained(site, (await site.pods("decode"))[0].node)
        check(await end())


async def test_redis(site: Site) -> None:
    await site.install()
    async with site.load(Load(SERVICE)) as end:
        await site.pause()
        for component in ("redis", "router"):
            await site.kubectl("delete", "pod", (await site.pods(component))[0].name)
            await site.settled()
            await site.pause()
        for router in await site.pods("router"):
            async with site.forwarded(f"pod/{router.name}", 50051) as address, Client(address) as client:
                await client.wait_for_workers(2, 2, timeout_s=60)
        check(await end())


async def test_tls(site: Site, tmp_path: Path) -> None:
    members, public, key = Authority(tmp_path, "members"), Authority(tmp_path, "public"), new_key()
    await site.apply(
        secret("tandem-member", files_of(members, "member", "tandem.internal")),
        secret("tandem-public", files_of(public, "door", RELEASE, f"{RELEASE}.{site.namespace}")),
        secret("tandem-keys", {"keys.yaml": entry_for(key, "test", "", [], None).encode()}),
        secret("tandem-test-key", {"key": key.encode()}),
    )
    await site.install()
    await site.helm("test", RELEASE)
    ca = {
        "mounts": [{"name": "ca", "mountPath": "/etc/ca", "readOnly": True}],
        "volumes": [
            {"name": "ca", "secret": {"secretName": "tandem-public", "items": [{"key": "ca.crt", "path": "ca.crt"}]}}
        ],
    }
    authority = "/etc/ca/ca.crt"
    async with site.load(Load(SERVICE, api_key=key, ca=authority, once=True), **ca) as end:
        result = await end()
        check(result, compares=False)
        assert result.verified_blocks > 0
    for api_key, file, error in (("", authority, "Unauthenticated"), (key, "", "Unavailable")):
        async with site.load(Load(SERVICE, api_key=api_key, ca=file, once=True), **ca) as end:
            result = await end()
        assert result.finished == 0
        assert all(each.startswith(error) for each in result.errors)


async def test_policies(site: Site) -> None:
    await site.apply(*site.pod("listener", LISTENS, {}))
    await site.kubectl("wait", "--for=condition=Ready", "pod/listener", f"--timeout={site.settings.wait_s}s")
    listener = (await site.kubectl("get", "pod", "listener", "-o", "jsonpath={.status.podIP}")).strip() + ":8080"

    async def listening() -> bool:
        return (await open_ports(site, listener))[listener]

    await site.until(listening, "the listener listens")
    spec: dict[str, Any] = {"podSelector": {"matchLabels": {"tandem-test": "listener"}}, "policyTypes": ["Ingress"]}
    await site.apply(
        {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "deny"}, "spec": spec}
    )
    await site.pause()
    if await listening():
        pytest.skip("the network enforces no NetworkPolicy: a pod that one closes is open")
    await site.install()
    (router,), (prefill,) = await site.pods("router"), await site.pods("prefill")
    closed = [f"{prefill.ip}:50060", f"{router.ip}:50052"]
    public = [f"{RELEASE}:50051", f"{RELEASE}:8000", f"{router.ip}:9400"]
    found = await open_ports(site, *closed, *public)
    assert found == dict.fromkeys(closed, False) | dict.fromkeys(public, True)
    async with site.load(Load(SERVICE, once=True)) as end:
        result = await end()
        check(result, compares=False)
        assert result.verified_blocks > 0, "members reach each other"


async def test_volume(site: Site) -> None:
    if not site.settings.storage_class:
        pytest.skip("TANDEM_STORAGE_CLASS is unset")
    said = await site.install(check=False)
    assert "has no PersistentVolumeClaim models" in said
    spec = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": site.settings.storage_class,
        "resources": {"requests": {"storage": "1Gi"}},
    }
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "models"}, "spec": spec}
    data = {
        "mounts": [{"name": "data", "mountPath": "/data"}],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "models"}}],
    }
    await site.apply(claim, *site.pod("fill", FILLS, {}, **data))
    await site.ended("fill")
    await site.install()
    await site.helm("test", RELEASE)


# ---------------------------------------------------------------------------------------------------------- helpers


def check(result: Result, compares: bool = True) -> None:
    """No stream was lost and none had other tokens; the longest gap is printed, not judged."""
    print(f"{result.finished} streams, {result.lost} lost, {result.different} different,", end=" ")
    print(f"longest gap {result.longest_gap_s:.2f} s", flush=True)
    assert result.finished > 0
    assert (result.lost, result.different) == (0, 0), result.errors
    assert result.compared > 0 or not compares


async def finish_of(client: Client, **options: Any) -> pb.Finish:
    sampling = pb.Sampling(max_tokens=16, temperature=0, ignore_eos=True)
    async with client.stream(sampling=sampling, timeout_s=60, **options) as pieces:
        async for piece in pieces:
            if piece.HasField("finish"):
                return piece.finish
    raise ServiceError("the stream has no finish")


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        text: str = answer.read().decode()
        return text


async def uids_of(site: Site) -> set[str]:
    selector = f"app.kubernetes.io/instance={RELEASE},app.kubernetes.io/component in (router,prefill,decode)"
    return set((await site.kubectl("get", "pods", "-l", selector, "-o", "jsonpath={.items[*].metadata.uid}")).split())


async def drained(site: Site, node: str) -> None:
    """Drain the suite's pods from a node, and let others have it again."""
    selector = f"--pod-selector=app.kubernetes.io/instance={RELEASE}"
    try:
        await kubectl("drain", node, selector, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=540s")
        await site.settled()
        assert not [pod for pod in await site.pods() if pod.node == node]
    finally:
        await kubectl("uncordon", node)


async def open_ports(site: Site, *targets: str) -> dict[str, bool]:
    found: dict[str, bool] = json.loads(await site.output_of("caller", CALLS, TARGETS=json.dumps(targets)))
    return found


def secret(name: str, files: dict[str, bytes]) -> dict[str, Any]:
    data = {key: base64.b64encode(content).decode() for key, content in files.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": data}


def files_of(authority: Authority, name: str, *hosts: str) -> dict[str, bytes]:
    issued = authority.issue(name, hosts)
    paths = {"tls.crt": issued.cert, "tls.key": issued.key, "ca.crt": authority.path}
    return {key: path.read_bytes() for key, path in paths.items()}
