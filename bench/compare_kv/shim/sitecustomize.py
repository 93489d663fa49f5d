"""Flips of one bit of a KV block on demand, in the process that holds the KV memory of a vLLM engine.

The program serves one order a connection at the Unix socket that TANDEM_DAMAGE names: `mark` remembers the blocks,
`flip SEED` changes a full block that was written since then, `arm SEED` does so with one that arrives, and `tell` tells
which block was changed. The seed chooses the value in the block.
"""

import json
import os
import random
import socketserver
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class Damage:
    """KV memory of this process, as the connector was given it."""

    def __init__(self) -> None:
        self._layers: list[Any] = []
        self._block_dimension = 0
        self._before: Any = None
        self.seed = ""
        self.armed = False
        self.struck: int | None = None
        """Block of the last flip; None since the last mark."""

    def offer(self, caches: dict[str, Any], num_blocks: int) -> None:
        """Take the layers' caches, all of one shape."""
        self._layers = list(caches.values())
        self._block_dimension = list(self._layers[0].shape).index(num_blocks)

    def mark(self) -> None:
        self._before, self.armed, self.struck = self._layers[0].clone(), False, None

    def flip_changed(self) -> None:
        """Flip a bit of the last of the blocks with the most changed values: a full one, since tails have fewer."""
        now, before = (each.contiguous().view(self._bits) for each in (self._layers[0], self._before))
        counts = (now != before).movedim(self._block_dimension, 0).flatten(1).sum(1).tolist()
        counts[0] = 0  # the null block, which belongs to no request
        if most := max(counts):
            self.flip(max(block for block, count in enumerate(counts) if count == most))

    def flip(self, block: int) -> None:
        """Flip the highest bit of the exponent of any value in the block."""
        chosen = random.Random(self.seed)
        part = chosen.choice(self._layers).select(self._block_dimension, block)
        value = part[tuple(chosen.randrange(size) for size in part.shape)].view(self._bits)
        value.bitwise_xor_(1 << 8 * value.element_size() - 2)
        self.armed, self.struck = False, block

    @property
    def _bits(self) -> Any:
        import torch

        return {2: torch.int16, 4: torch.int32}[self._layers[0].element_size()]


damage = Damage()


class Order(socketserver.StreamRequestHandler):
    """Order of the benchmark."""

    def handle(self) -> None:
        match self.rfile.readline().decode().split(maxsplit=1):
            case ["mark"]:
                damage.mark()
            case ["flip", seed]:
                damage.seed = seed
                damage.flip_changed()
            case ["arm", seed]:
                damage.mark()
                damage.seed, damage.armed = seed, True
        self.wfile.write(json.dumps({"struck": damage.struck}).encode())


def serve() -> None:
    """Serve orders, at the socket of an earlier process that was killed."""
    path = os.environ["TANDEM_DAMAGE"]
    if os.path.exists(path):
        os.unlink(path)
    server = socketserver.UnixStreamServer(path, Order)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def watch_connectors(module: Any) -> None:
    """Take the KV memory of every worker's connector, and look at what it has received."""
    original = module.KVConnectorFactory.create_connector.__func__

    def create(cls: Any, config: Any, role: Any, kv_cache_config: Any) -> Any:
        connector = original(cls, config, role, kv_cache_config)
        if role.name != "WORKER":
            return connector
        register = connector.register_kv_caches

        def register_kv_caches(caches: dict[str, Any]) -> None:
            damage.offer(caches, kv_cache_config.num_blocks)
            serve()
            register(caches)

        def look_at(name: str, received: Callable[[Any], Any]) -> None:
            tell = getattr(connector, name)

            def told(request_ids: set[str]) -> Any:
                results = tell(request_ids)
                if damage.armed and received(results):
                    damage.flip_changed()
                return results

            setattr(connector, name, told)

        connector.register_kv_caches = register_kv_caches
        look_at("get_finished", lambda results: results[1])
        if hasattr(connector, "get_transfer_results"):  # from 0.32 on
            look_at("get_transfer_results", lambda results: results.finished_recving)
        return connector

    module.KVConnectorFactory.create_connector = classmethod(create)


class ArrivingDamage:
    """What `LocalRank` takes for a drill's corruption: a flip before the arrived blocks are verified."""

    @property
    def active(self) -> bool:
        return damage.armed

    def strike(self, blocks: Sequence[int]) -> None:
        if damage.armed:
            damage.flip(blocks[0])


def strike_arrivals(module: Any) -> None:
    """Let Tandem's borrowers verify blocks after the flip, as if it had happened on the way."""
    original = module.LocalRank.__init__

    def create(self: Any, *given: Any, **named: Any) -> None:
        original(self, *given, **named)
        self.corruption = ArrivingDamage()

    module.LocalRank.__init__ = create


AFTER: dict[str, Callable[[ModuleType], None]] = {
    "vllm.distributed.kv_transfer.kv_connector.factory": watch_connectors,
    "loans.reads.block_reads": strike_arrivals,
}


class Changes(MetaPathFinder):
    """Finder that makes the changes when their modules have been imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in AFTER:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        original = spec.loader.exec_module

        def execute(module: ModuleType) -> None:
            original(module)
            AFTER[name](module)

        spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


if "TANDEM_DAMAGE" in os.environ:
    sys.meta_path.insert(0, Changes())
