"""Status of the cluster as a router knows it, for people and consoles.

Pure.
"""

import math
import time

from protos import inference_pb2 as pb
from router.admission.admission import Admission
from router.models.model_runtime import ModelRuntime
from router.models.model_runtimes import ModelRuntimes
from router.placement.fleet.fleet import Fleet
from router.placement.fleet.worker_records import WorkerRecord, running_of

MAX_LINKS = 1024


def cluster_status(
    router_id: str, draining: bool, models: ModelRuntimes, started_at: float, isolates_tenants: bool = False
) -> pb.ClusterStatusResponse:
    """Build the status; `started_at` is seconds of the monotonic clock."""
    return pb.ClusterStatusResponse(
        router_id=router_id,
        draining=draining,
        models=map(_model, models),
        uptime_s=time.monotonic() - started_at,
        isolates_tenants=isolates_tenants,
    )


def _model(model: ModelRuntime) -> pb.ModelStatus:
    fleet, costs = model.fleet, model.costs
    ratio = fleet.ttft_scores.quantiles([0.5])[0]
    status = load_status(model.name, fleet, model.dispatcher.admission)
    status.links.extend(_links(fleet))
    status.requests = costs.num_requests
    status.input_tokens, status.output_tokens = costs.input_tokens, costs.output_tokens
    if not math.isnan(ratio):
        status.prediction_ratio = ratio
    return status


def load_status(name: str, fleet: Fleet, admission: Admission) -> pb.ModelStatus:
    """Return the part that a planner reads: workers, queued requests and traffic."""
    return pb.ModelStatus(
        name=name,
        workers=[_worker(fleet, worker) for worker in sorted(fleet.workers, key=lambda worker: worker.worker_id)],
        waiting=admission.num_waiting,
        refused={str(reason): count for reason, count in admission.num_refused.items()},
        traffic=fleet.traffic.to_proto(admission.waiting_tokens),
    )


def _worker(fleet: Fleet, worker: WorkerRecord) -> pb.WorkerStatus:
    hello, load = worker.hello, worker.load
    status = pb.WorkerStatus(
        worker_id=hello.worker_id,
        role="decode" if worker.decodes else "prefill",
        address=hello.address,
        draining=worker.draining,
        num_blocks=hello.num_blocks,
        cached_blocks=max(0, worker.num_cached),
        block_tokens=hello.block_tokens,
        transport=hello.transport,
        asked_blocks=worker.asked_blocks,
        hit_blocks=worker.hit_blocks,
        failing=worker.failing,
        failing_lenders=fleet.failing_lenders(worker),
        start_seconds=hello.start_seconds,
        weights_source=hello.weights_source,
        group=hello.group,
        group_rank=hello.group_rank,
        revision=hello.revision.hex(),
        server=worker.server,
    )
    if load is not None:
        status.has_reported = True
        status.running, status.decoding = running_of(worker), load.decoding
        status.loans, status.queued_loans = load.loans, load.queued_loans
        status.queued_prefill_tokens = load.queued_prefill_tokens
        status.available_blocks = load.available_blocks
        row = fleet.snapshot.row_of.get(hello.worker_id)
        if row is not None:
            status.prefill_tokens_per_s = fleet.rates.prefill_tokens_per_s[row]
            status.decode_prefill_tokens_per_s = fleet.rates.decode_prefill_tokens_per_s[row]
    return status


def _links(fleet: Fleet) -> list[pb.LinkStatus]:
    """Return the links from every worker to every decode worker."""
    rates, ids = fleet.rates, fleet.snapshot.ids
    decodes = {worker.worker_id for worker in fleet.workers if worker.decodes}
    links: list[pb.LinkStatus] = []
    for borrower, borrower_id in enumerate(ids):
        if borrower_id not in decodes:
            continue
        for lender, lender_id in enumerate(ids):
            if fleet.snapshot.compatible[borrower, lender] and len(links) < MAX_LINKS:
                overhead_ms = float(rates.loan_overhead_s[borrower, lender]) * 1e3
                bytes_per_s = float(rates.kv_bytes_per_s[borrower, lender])
                link = pb.LinkStatus(
                    borrower=borrower_id, lender=lender_id, bytes_per_s=bytes_per_s, overhead_ms=overhead_ms
                )
                links.append(link)
    return links
