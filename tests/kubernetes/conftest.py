"""Fixtures of the suite for real clusters, and its account of what it could not try."""

import json
from collections.abc import AsyncIterator, Generator

import pytest
import pytest_asyncio

from support.kubernetes.cluster import Site, kubectl, may, why_not
from support.kubernetes.plan import TRIALS
from support.kubernetes.settings import Settings

NOT_TRIED: list[tuple[str, str]] = []
"""Parts of trials that the cluster did not allow, with the reason."""
FAILED = pytest.StashKey[bool]()
"""Whether a test failed, which its fixtures want to know."""
NEVER = (
    ("GPUs, RDMA, NCCL", "no trial uses them: docs/kubernetes-gpu.md"),
    ("HorizontalPodAutoscalers, KEDA, monitors, routes", "no trial uses them: they need other operators"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.parent.name == "kubernetes"]
    if ours and (reason := why_not()):
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    def ours(outcome: str) -> list[pytest.TestReport]:
        reports = terminalreporter.stats.get(outcome, [])
        return [report for report in reports if "tests/kubernetes/" in getattr(report, "nodeid", "")]

    skipped = ours("skipped")
    if not (skipped or ours("passed") or ours("failed")):
        return
    terminalreporter.section("not tried")
    for report in skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        terminalreporter.write_line(f"{report.nodeid.rpartition('::')[2]}: {reason}")
    for what, reason in (*NOT_TRIED, *NEVER):
        terminalreporter.write_line(f"{what}: {reason}")


@pytest.fixture(scope="session")
def settings() -> Settings:
    return Settings.from_environment()


@pytest_asyncio.fixture
async def site(request: pytest.FixtureRequest, settings: Settings) -> AsyncIterator[Site]:
    """The namespace of the trial that the test is named for, without a release."""
    trial = TRIALS[request.node.name.removeprefix("test_")]
    if not await may("create", "namespaces"):
        pytest.skip("this account may not create namespaces")
    async with Site(trial, settings, NOT_TRIED) as entered:
        version = json.loads(await kubectl("version", "-o", "json"))["serverVersion"]["gitVersion"]
        print(f"\n{trial.name} on Kubernetes {version}", flush=True)
        yield entered
        if request.node.stash.get(FAILED, False):  # the exception does not pass through here
            print(await entered.account(), flush=True)
