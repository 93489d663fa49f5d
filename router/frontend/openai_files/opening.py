"""Opening of files and batches as a router's settings say."""

from collections.abc import Mapping
from functools import partial

from cluster.process.life import Drain
from router.batches.claims.claims import Claims, LockClaims
from router.batches.lines.line import FRAME_BYTES, Handle
from router.batches.service import Batches
from router.batches.threads import Threads
from router.config import RouterConfig
from router.frontend.http.body.fields import parse_object
from router.frontend.http.endpoint import BodyLimits


def open_batches(
    config: RouterConfig, handlers: Mapping[str, Handle], limits: BodyLimits, drain: Drain
) -> Batches | None:
    """Return the files and batches, or None without `batches_folder`.

    Raises StartError.
    """
    if config.batches_folder is None:
        return None
    return Batches(
        config,
        config.batches_folder,
        dict(handlers),
        partial(parse_object, max_values=limits.max_values),
        limits.max_bytes + FRAME_BYTES,
        drain,
        partial(_claims, config),
    )


def _claims(config: RouterConfig, threads: Threads) -> Claims:
    if not config.redis_url:
        return LockClaims(threads)
    from router.batches.claims.redis_claims import (
        RedisClaims,  # imported late, because an unused import costs start time
    )

    return RedisClaims(config.redis_url, config.cluster_name)
