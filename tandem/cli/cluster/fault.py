"""`tandem fault`: one fault for one worker, or a drill."""

from rich.console import Console

from cluster.errors import InvalidRequest
from cluster.network.tls import TlsIdentity
from protos import inference_pb2 as pb
from tandem.cli.tables import uncut
from tandem.client import Client, Target
from tandem.drill.drill import Drill, DrillPlan
from tandem.drill.load import DrillLoad, LoadSize
from tandem.drill.report import FAULTS, DrillCluster, FaultOptions


async def inject_fault(
    console: Console,
    target: Target,
    member: TlsIdentity | None,
    fault: str,
    worker: str,
    peer: str,
    options: FaultOptions,
) -> None:
    """Inject one fault.

    Raises ServiceError.
    """
    async with target.client() as client:
        await DrillCluster(client, member).inject(fault, worker, options, peer)
    console.print(f"{fault} of {worker}" + (f" from {peer}" if peer else ""), markup=False)


async def run_drill(
    console: Console,
    target: Target,
    member: TlsIdentity | None,
    model: str,
    size: LoadSize,
    plan: DrillPlan,
    as_json: bool,
) -> bool:
    """Run a drill and print its report; return whether it passed.

    Raises ServiceError.
    """
    async with target.client() as client:
        served = await _served(client, model)
        cluster = DrillCluster(client, member, served.base_model or served.name)
        tell = (lambda _: None) if as_json else (lambda line: console.print(line, markup=False))
        report = await Drill(cluster, DrillLoad(client, served, size, plan.seed), plan, tell).run()
    if as_json:
        print(report.to_json())
        return report.passed
    with uncut(console):
        console.print(report.table())
    for remark in report.remarks():
        console.print(remark, markup=False)
    return report.passed


def faults_of(text: str) -> tuple[str, ...]:
    """Return the faults of `all`, or of names separated by commas."""
    return FAULTS if text == "all" else tuple(name.strip() for name in text.split(","))


async def _served(client: Client, name: str) -> pb.Model:
    models = await client.list_models()
    matches = [
        model for model in models if name in ("", model.name) and not (model.embedding_dimensions or model.labels)
    ]
    if len(matches) == 1 or (matches and not name and all(model.base_model for model in matches[1:])):
        return matches[0]
    known = ", ".join(model.name for model in models) or "none"
    raise InvalidRequest("model", f"must be one of the served models with text output: {known}")
