"""Both sides of a start from a peer, as an engine process opens them; each has a transport of its own.

A transport has one pool, and the engine's own is its KV. These pools live for one start only.
"""

import logging
import secrets
from collections.abc import Callable
from functools import partial

from engine.model.model_dir import ModelDir
from engine.model_runner import ModelInfo
from engine.process.spec import EngineSpec
from engine.process.start_up import open_transport_of
from engine.process.weights_lender import WeightsLender
from engine.weights.fetch import WeightsFetch

log = logging.getLogger(__name__)


def open_fetch(spec: EngineSpec) -> WeightsFetch | None:
    """Begin to read the offered weights; return None without an offer, or without memory for them."""
    if (offer := spec.weights) is None:
        return None
    digest = ModelDir.open(spec.config.model).begin_weights_digest()
    opener = partial(open_transport_of, spec.config, f"{spec.agent_name}-weights", on_gpu=False)
    try:
        return WeightsFetch(offer, digest, opener, spec.config.peer_silence_s)
    except MemoryError as error:
        log.warning("weights are read from the disk, not from %s: %s", offer.worker_id, error)
        return None


def open_lender(spec: EngineSpec, info: ModelInfo, wake: Callable[[], None]) -> WeightsLender:
    """Return the lender of this engine's weights."""

    def is_loaded(saved: bytes) -> bool:
        return spec.config.quantization().fingerprint(saved) == info.weights_fingerprint

    return WeightsLender(
        spec.config.model,
        is_loaded,
        lambda: open_transport_of(spec.config, f"{spec.agent_name}-lent-{secrets.token_hex(4)}", on_gpu=False),
        wake,
    )
