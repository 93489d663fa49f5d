"""The simulator: a cluster in virtual time, with the real router and engines on modelled hardware.

    trace ──▶ SimCluster ──▶ SimRouter ──▶ FrontProcesses ──▶ SimWorker ──▶ outcomes ──▶ table, JSON, picture
                             Fleet          loans             EngineCore
                             Admission      between           BytelessRunner
                             placement      workers           VirtualTransport ──▶ Links
                                    all on one VirtualClock

| part | how | where |
| --- | --- | --- |
| a request's path, queue and placement; membership, prefix index, learning | real | `router`; `cluster/router.py` |
| scheduling, block pools, prefix caches, loans, preemption, reports | real | `engine`, called by `cluster/worker.py` |
| receipts, drains of workers | real | `worker.requests.receipt`, `worker.front.lent_loans` |
| clients, and the router's reading of prompts | requests of the trace | `cluster/router.py` |
| fronts, and the connections of routers to them | a stand-in that decides nothing | `cluster/front_processes.py` |
| duration of a step | modelled: a roofline of a named GPU, or a line | `gpus.py`, `engine/backends/sim/settings.py` |
| duration of a read | modelled: NICs shared among transfers | `cluster/links.py` |
| the shared store | one more NIC, and a set of blocks in order of use | `cluster/store.py` |
| delay of a message | one constant between processes, another for workers' reports to routers | `ClusterSpec` |
| workers that come, go and switch roles | as in reality; a start takes a given time | `cluster/cluster.py` |
| sizes of the pools | the real planner's policy | `cluster/autoscale.py` |
| deaths of workers | a machine without power, noticed one message later | `SimCluster.kill` |
| bytes of KV | left out: blocks have no memory, and one fingerprint | `cluster/runner.py` |
| tokens | prompts repeat one number per block of the trace's hashes; outputs their request's | `request.py` |

Left out, so a real cluster may be slower: tokenisation, detokenisation, CPU time of routers and fronts, gRPC's queues;
host and disk tiers; stop strings and end tokens (a request generates what the trace says, and its max_tokens are
exactly that); clients that give up; workers that hang without dying; routers that die.

**Deterministic**: one thread, one clock, one queue, and every random number from the run's seed. A run repeated gives
the same figures, to the bit. A seed draws arrivals within the trace's resolution, and the router of each request.

**Fast**: by default uniform decode steps are not computed one by one: a decode worker whose next k steps only add a
token to each stream makes them at once (`engine/core/uniform_decode.py`, `cluster/worker.py`). A test holds both ways
to the same outcomes, reports and times, to the bit.

**Other policies** (`comparison/policies.py`) replace placement for comparison only; no real request is ever routed by
them.

For another clock, other links or other clients, build on `cluster/cluster.py`. `tandem replay` is `comparison/`:
`replay.py` (what to compare), `results.py` (figures), `advice.py` (differences told from noise), `report.py` and
`plot.py` (display). `models/` has the shapes of models.
"""
