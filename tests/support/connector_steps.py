"""A stock server with two steps in flight: `python -m support.connector_steps`, in vLLM's environment.

One request's step is in flight. The next step has two requests of one prompt, so the second finds blocks that this very
step is to fill for the first. The output is JSON: how many blocks have names at each moment.
"""

import itertools
import json

from support.connector_trials import Client, Server, Trial
from support.vllm_trials import BLOCK, MODELS

NUM_BLOCKS = 3
"""Whole blocks of the prompt."""


def overlapping_server() -> Server:
    """Return a server of one KV group that overlaps steps, and neither drafts nor borrows."""
    for seed in itertools.count(list(MODELS).index("full"), len(MODELS)):
        server = Trial(seed).servers[0]
        drafts_or_borrows = server.scheduler.num_spec_tokens or server.half.lenders.are_configured
        if server.overlaps and not drafts_or_borrows:
            server.scheduler.max_num_scheduled_tokens = 128
            return server
    raise AssertionError


def named_at(server: Server, is_cancelled: bool) -> dict[str, int]:
    """Return how many blocks have names after the first step and after the second."""
    ask = server._trial.ask
    prompt = list(range(NUM_BLOCKS * BLOCK + 1))
    ask(server, [900], 4, None)
    server._begin()
    ask(server, prompt, 4, None)
    second = ask(server, [*prompt, 901], 4, None)
    server._begin()
    assert found_of(second) == NUM_BLOCKS * BLOCK
    server._compute()
    server._end()
    if is_cancelled:
        server.cancel(second)
    before = len(server.kv.pool._place_of)
    server._compute()
    server._end()
    return {"in flight": before, "ended": len(server.kv.pool._place_of)}


def found_of(client: Client) -> int:
    """Return how many tokens vLLM found for a request whose first step is in flight."""
    return int(client.request.num_computed_tokens - client.request.num_in_flight_tokens)


def main() -> None:
    kinds = {"both run": False, "the second is cancelled": True}
    print(json.dumps({kind: named_at(overlapping_server(), is_cancelled) for kind, is_cancelled in kinds.items()}))


if __name__ == "__main__":
    main()
