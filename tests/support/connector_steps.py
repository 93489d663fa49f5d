"""Steps of a stock server in one exact order: `python -m support.connector_steps`, in vLLM's environment.

*Found blocks.* While a step is in flight, the next one gets two requests of one prompt. The second finds blocks
that this very step is to fill for the first. The output is how many blocks have names at each moment.

*Fingerprints.* The fingerprints of a loan's blocks are taken. Before they are recorded, a request fills all blocks that
nobody holds. The output is how many are recorded.

The output is JSON.
"""

import itertools
import json
from typing import Any

from loans.network import Want
from support.connector_trials import FINGERPRINT, Client, Server, Trial
from support.hand_network import Stream
from support.vllm_trials import BLOCK, MODELS
from tandem_connector.kv import Naming

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
    ask = server.trial.ask
    prompt = list(range(NUM_BLOCKS * BLOCK + 1))
    ask(server, [900], 4, None)
    server.begin()
    ask(server, prompt, 4, None)
    second = ask(server, [*prompt, 901], 4, None)
    server.begin()
    assert found_of(second) == NUM_BLOCKS * BLOCK
    server.compute()
    server.end()
    if is_cancelled:
        server.cancel(second)
    before = len(server.kv.pool.place_of)
    server.compute()
    server.end()
    return {"in flight": before, "ended": len(server.kv.pool.place_of)}


def found_of(client: Client) -> int:
    """Return how many tokens vLLM found for a request whose first step is in flight."""
    return int(client.request.num_computed_tokens - client.request.num_in_flight_tokens)


def recorded_at(server: Server, is_over: bool) -> int:
    """Return how many fingerprints are recorded of a loan that goes on, or `is_over` before they are."""
    lender, prompt = server.half.loans.lender, list(range(NUM_BLOCKS * BLOCK + 1))
    names = Naming(FINGERPRINT, BLOCK).of(compute(server, prompt))
    assert names is not None
    want = Want("", names.upto(NUM_BLOCKS), 0, False, prompt, names.root)
    nobody: Any = None
    stream = Stream(server.network, server.network, want, nobody)
    lender.open(stream, want)
    server.fingerprint()
    if is_over:
        lender.close(stream)
    num_free = server.kv.pool.num_available
    compute(server, [500 + number for number in range(num_free * BLOCK - 1)])
    server.announce()
    server.check_contents()
    return len(server.kv.fingerprinted)


def compute(server: Server, prompt: list[int]) -> Any:
    """Run a request for one token to its end, and return it."""
    client = server.trial.ask(server, prompt, 1, None)
    while not client.is_over:
        server.begin()
        server.compute()
        server.end()
    return client.request


def main() -> None:
    kinds = {"both run": False, "the second is cancelled": True}
    found = {kind: named_at(overlapping_server(), is_cancelled) for kind, is_cancelled in kinds.items()}
    kinds = {"the loan goes on": False, "the loan is over": True}
    recorded = {kind: recorded_at(overlapping_server(), is_over) for kind, is_over in kinds.items()}
    print(json.dumps({"found blocks": found, "fingerprints": recorded}))


if __name__ == "__main__":
    main()
