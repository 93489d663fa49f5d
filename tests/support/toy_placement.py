"""Placement over exact toy numbers: 4-token blocks, 1000 prefill tokens/s, 100 on a decode worker."""

from dataclasses import replace

from router.placement.rates import Priors
from router.placement.worker_table import WorkerView

RATES = Priors(
    prefill_tokens_per_s=1000,
    decode_prefill_tokens_per_s=100,
    kv_bytes_per_s=1e6,
    loan_overhead_s=0.01,
    step_s=0.0,
    stream_delay_s=0.001,
)


def worker(name: str, **changes: object) -> WorkerView:
    """An idle worker; one whose name begins with d decodes."""
    view = WorkerView(
        worker_id=name,
        decodes=name.startswith("d"),
        fingerprint=b"model",
        running=0,
        decoding=0,
        queued_prefill_tokens=0,
        available_blocks=100,
        num_blocks=100,
    )
    return replace(view, **changes)  # type: ignore[arg-type]
