"""Opens the discovery backend that the settings name."""

from collections.abc import Iterable

from cluster.discovery.discovery import Discovery, StaticDiscovery


def open_discovery(redis_url: str, cluster_name: str, addresses: Iterable[str] = ()) -> Discovery:
    """Return Redis discovery when `redis_url` is set, otherwise static discovery of `addresses`. Raises StartError."""
    if not redis_url:
        return StaticDiscovery(addresses)
    # Imported here because the Redis client costs a fifth of a worker's start.
    from cluster.discovery.redis_discovery import RedisDiscovery

    return RedisDiscovery(redis_url, cluster_name)
