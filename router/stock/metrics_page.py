"""Figures of a stock server's `/metrics` page.

Pure.
"""

import re
from dataclasses import dataclass

CACHE_CONFIG = re.compile(r"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')
CONNECTOR = "vllm:tandem_loans_given_total"
"""Counter that only a server with TandemConnector has."""
PROGRESS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:iteration_tokens_total_count")
"""Counters that grow whenever the engine steps."""
RUNNING, WAITING, USE = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
READ = "|".join((RUNNING, WAITING, USE, CONNECTOR, *PROGRESS))
SAMPLE = re.compile(rf"^({READ})(?:\{{[^}}]*\}})? (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """Size of a server's KV cache, over all its data-parallel ranks."""

    block_tokens: int
    num_blocks: int
    caches_prefixes: bool


@dataclass(frozen=True, slots=True)
class Load:
    """Load of a server at one moment, of all its clients."""

    running: int
    waiting: int
    cache_use: float
    """Share of the blocks that running requests hold."""
    progress: float
    """Number that grows with each step of the engine."""
    lends: bool
    """Whether the server has TandemConnector."""


def cache_facts(page: str) -> CacheFacts | None:
    """Return the size of the cache; None where the page does not tell."""
    found = [dict(LABEL.findall(labels)) for labels in CACHE_CONFIG.findall(page)]
    if not found:
        return None
    try:
        block_tokens = int(found[0]["block_size"])
        num_blocks = sum(int(each["num_gpu_blocks"]) for each in found)
    except (KeyError, ValueError):
        return None
    return CacheFacts(block_tokens, num_blocks, found[0].get("enable_prefix_caching") == "True")


def load_of(page: str) -> Load | None:
    """Return the load; None for a page without vLLM's figures."""
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for name, value in SAMPLE.findall(page):
        sums[name] = sums.get(name, 0.0) + float(value)
        counts[name] = counts.get(name, 0) + 1
    if RUNNING not in sums:
        return None
    return Load(
        running=round(sums[RUNNING]),
        waiting=round(sums.get(WAITING, 0.0)),
        cache_use=sums.get(USE, 0.0) / counts.get(USE, 1),
        progress=sum(sums.get(name, 0.0) for name in PROGRESS),
        lends=CONNECTOR in sums,
    )
