"""The engine process of a node above 0: `python -m cluster.launch engine.process.vllm.node FD`.

It runs vLLM's executor for the ranks of its host, which node 0's engine drives (`engine/process/ranks/nodes.py`). It
waits for node 0, starts the ranks together with it, and ends with it or with any of them; its front then starts another
one.
"""

import logging
import os
import pickle
import select
import socket
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

from cluster.errors import StartError
from cluster.logs import set_up
from engine.messages.from_engine import NodeLinked, StartFailed
from engine.process.front_link import FrontLink, MessageSocket, receive_spec
from engine.process.ranks.nodes import NodeLink, wait_for_name
from engine.process.start_up import become_child, prepare
from engine.process.vllm.start import configure_vllm, prepare_vllm

log = logging.getLogger(__name__)

NODE_SPEC = "TANDEM_NODE"
"""Environment variable with the path of the file that has this node's start parameters, for worker processes."""


def main() -> None:
    """Serve the front at the other end of the socket whose descriptor is the argument."""
    become_child()
    link = socket.socket(fileno=int(sys.argv[1]))
    messages = MessageSocket(link)
    spec = receive_spec(messages)
    front = FrontLink(messages)
    config = spec.config
    set_up(spec.role, f"{spec.worker_id}/node {config.node_rank}", config)
    try:
        config.kind.check(config, spec.role)
        prepare(config.model_copy(update={"threads": config.of_rank(0).threads}))
        wait_for_name(config)
        prepare_vllm(config)
        configured = configure_vllm(config, spec.role)
        node = NodeLink(config, configured.facts)
    except StartError as error:
        front.send(StartFailed(str(error)))
        front.finish()
        os._exit(0)
    front.send(NodeLinked())
    front.flush()
    threading.Thread(target=_end_with, args=(link,), name="front-watch", daemon=True).start()
    folder = tempfile.TemporaryDirectory(prefix="tandem-node-")  # only this user may enter it
    path = Path(folder.name) / "spec"
    path.write_bytes(pickle.dumps(replace(spec, agent_name=node.agent_name)))
    os.environ[NODE_SPEC] = str(path)
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    try:
        executor = MultiprocExecutor(configured.vllm_config, monitor_workers=False)
        folder.cleanup()
        executor.start_worker_monitor(inline=True)
    except Exception as error:
        log.error("the ranks of this node did not start: %s", error)
    os._exit(1)  # node 0 notices


def _end_with(front: socket.socket) -> None:
    """End this process when the front closes its end."""
    while not (select.select([front], [], [])[0] and not front.recv(1, socket.MSG_PEEK)):
        pass
    os._exit(0)
