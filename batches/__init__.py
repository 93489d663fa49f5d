"""Files and batches of requests, as OpenAI's API has them: `python -m batches FOLDER`, a process beside each router.

client ──/v1/files, /v1/batches──▶ router ──FOLDER/batches.sock──▶ api/ ──▶ storage/
                                     ▲                                        ▲
                                     └──FOLDER/router.sock── router_client.py ◀── run.py: one batch, line by line

**What crosses.** The router makes FOLDER, which only its user may enter, and writes `link.json` into it at each start:
a new key, the settings, and which paths lines may name (`router/batches/link.py`). All else is HTTP with that key:

- `batches.sock`, from the router: the people's calls, with the tenant and the permissions that the router found for
  them (`x-tandem-caller`). The router has checked their keys and charged them; nothing is charged here.
- `router.sock`, to the router: each line as a request of its own, with the tenant and the key's name of whoever made
  its batch (`x-tandem-line`). The router gives it the permissions which that name has now, a priority below
  interactive requests, and counts it against the tenant's limits and quota as it counts any request, once a try.
  `/health` there tells whether the router is stopping.

No other port takes the key, and the sockets take no other key.

**Who owns what.** This process owns `batches_folder`, and nobody else opens it: a picture that a request names by its
file comes to the router through `batches.sock`. The router owns requests, keys, limits and usage. It starts this
process and restarts it, unless `batches_link` says that somebody else does, such as the pod's second container.

**What a crash loses: nothing that was acknowledged.** A line is answered when its answer is synced in a log of its
batch.

- This process dies: the router ends the lines in flight, as their clients are gone, and refuses calls with 503 until
  the next process is up. That one reads all logs, skips answered lines, and writes a log of its own, so a torn last
  line harms nothing. An upload in flight fails, and what it wrote is removed later.
- The router dies: the kernel ends this process with it, and the next router's goes on. A container's stays, leaves
  the batches to other routers' processes, and goes on once its router is back.
- The router hangs: after `AWAY_S` it is the same.
- The router stops: it finishes the lines in flight for `drain_s`, and no other one starts.

Every record is written once and whole: of two processes that believe to have a batch, the first to record a step
decides it for both. The outputs are a pure function of the input and of those parts of the logs that the record names.

| file | what |
| --- | --- |
| `program.py` | the process: its start and its end |
| `state.py` | what is recorded of a batch; its status and next step by the records. Pure |
| `lines.py` | a line and its answer; faults of an input; retries; the output files, made of the answers at the end |
| `storage/` | file system calls that survive a crash; files and batches of all tenants; answers, synced as they come |
| `claims.py` | which process runs a batch |
| `router_client.py` | lines' requests at the router |
| `run.py`, `runner.py` | one batch from step to step; all batches of a process |
| `service.py`, `api/` | all of this together; the HTTP paths |

The manual: docs/openai.md.
"""
