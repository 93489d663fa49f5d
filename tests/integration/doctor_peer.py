"""A process of the doctor with something wrong: `python doctor_peer.py MODE SPEC`; MODE is WHAT:SEED, or WHAT for all.

corrupt: one byte that it lends is another. hang: it stops when it is told to read. die: likewise, it ends.
missing: its transport's library is not installed.
"""

import os
import signal
import sys

from tandem.doctor import peer

PLACE = 12345


def main() -> None:
    what, _, seed = sys.argv[1].partition(":")
    spec = peer.spec_of(sys.argv[2])
    pattern = peer.make_pattern(spec.seed, spec.num_bytes)
    if seed in ("", str(spec.seed)):
        if what == "corrupt":
            pattern[PLACE] ^= 1
        elif what == "missing":
            sys.modules["ucxx"] = sys.modules["nixl_cu12"] = None  # type: ignore[assignment]
        else:
            number = signal.SIGSTOP if what == "hang" else signal.SIGKILL
            peer.read_pattern = lambda *_: os.kill(os.getpid(), number)  # type: ignore[assignment]
    peer.serve(spec, pattern)


if __name__ == "__main__":
    main()
