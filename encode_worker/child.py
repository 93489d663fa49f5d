"""Child process with the model's encoder: `python -m cluster.launch encode_worker.child FD`.

The descriptor is of a socket to the encode worker, `child_encoder.py`. The first frame has the settings; the answer has
the fingerprint of the model, or the setting at fault. Each further frame is one item, and gets one answer.
"""

import socket
import sys

from cluster.errors import StartError
from cluster.logs import set_up
from engine.config import WorkerConfig
from engine.media import MediaEncoder
from engine.process.start_up import become_child
from kvcache.items import Item
from preprocessor.frames import Frame, receive_frame, send_frame


def main() -> None:
    """Answer until the other end closes."""
    become_child()
    link = socket.socket(fileno=int(sys.argv[1]))
    with link.makefile("rb") as frames:
        if (first := receive_frame(frames)) is None:
            return
        try:
            config = WorkerConfig.parse(first.values["config"])
            set_up("encoder", "child", config)
            encoder = config.kind.open_encoder(config)
        except StartError as error:
            send_frame(link, Frame({"field": error.field, "reason": error.reason}))
            return
        send_frame(link, Frame({"fingerprint": encoder.fingerprint.hex()}))
        while (frame := receive_frame(frames)) is not None:
            send_frame(link, answer(encoder, frame))


def answer(encoder: MediaEncoder, frame: Frame) -> Frame:
    """Return the embeddings of an item, or a refusal."""
    identifier, details, blob = frame.parts
    try:
        done = encoder.encode(Item(identifier, 0, frame.values["length"], details), blob)
    except ValueError as error:
        return Frame({"refused": str(error)})
    return Frame({"dtype": done.dtype, "shape": done.shape}, [done.data])
