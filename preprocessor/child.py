"""Child process that makes media ready and may die of it: `python -m cluster.launch preprocessor.child FD`.

The descriptor is of a socket to the preprocessor, `children.py`. The first frame has the settings; the answer names
what the model reads, or the setting at fault. Each further frame is one request, and gets one answer.
"""

import array
import logging
import os
import resource
import socket
import sys
from pathlib import Path
from typing import Any

from cluster.errors import StartError
from cluster.logs import set_up
from engine.config import WorkerConfig
from engine.media import MediaInput, MediaLimits, MediaProcessor, MediaRefused
from engine.process.start_up import become_child
from preprocessor.frames import Frame, receive_frame, send_frame

log = logging.getLogger(__name__)

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
"""Environment without network: all files of the model are there."""


def main() -> None:
    """Answer until the other end closes."""
    become_child()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ.update(OFFLINE)
    os.environ["OMP_NUM_THREADS"] = "1"  # several children share the cores
    link = socket.socket(fileno=int(sys.argv[1]))
    with link.makefile("rb") as frames:
        if (first := receive_frame(frames)) is None:
            return
        try:
            config = WorkerConfig.parse(first.values["config"])
            set_up("preprocessor", f"child {os.getpid()}", config)
            processor = config.kind.open_media_processor(config)
        except StartError as error:
            send_frame(link, Frame({"field": error.field, "reason": error.reason}))
            return
        _limit_memory(first.values["memory_mib"])
        send_frame(link, Frame({"modalities": {kind: list(each) for kind, each in processor.modalities.items()}}))
        while (frame := receive_frame(frames)) is not None:
            send_frame(link, answer(processor, frame, first.values["memory_mib"]))


def answer(processor: MediaProcessor, frame: Frame, memory_mib: int = 0) -> Frame:
    """Return the answer to a request: its tokens and items, or a refusal."""
    token_ids = array.array("I")
    token_ids.frombytes(frame.parts[0])
    media = [MediaInput(kind, data) for kind, data in zip(frame.values["kinds"], frame.parts[1:], strict=True)]
    try:
        limits = MediaLimits(*frame.values["limits"])
        done = processor.process(token_ids.tolist(), media, limits, frame.values["thumbnails"])
    except MediaRefused as error:
        return Frame({"refused": error.reason, "place": error.place})
    except MemoryError:
        return Frame({"refused": f"processing needs more than {memory_mib} MiB of memory", "place": None})
    except Exception as error:  # decoders raise all kinds of exceptions for a broken file
        log.info("media could not be processed", exc_info=True)  # a client may send many
        return Frame({"refused": f"the file cannot be processed: {type(error).__name__}", "place": None})
    values: dict[str, Any] = {"items": [[each.identifier, each.offset, each.length] for each in done.items]}
    contents = [content for each in done.items for content in (each.details, each.blob)]
    return Frame(values, [array.array("I", done.token_ids).tobytes(), *contents, *done.thumbnails])


def _limit_memory(mib: int) -> None:
    """Let this process take so much memory beyond what it has now; more raises MemoryError."""
    status = Path("/proc/self/status").read_text()
    now = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData:"))
    limit = now + (mib << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


if __name__ == "__main__":
    main()
