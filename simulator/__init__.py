"""A cluster in virtual time: the router and the engines are the real ones, what they run on is modelled.

    trace ──▶ SimCluster ──▶ SimRouter ──▶ Fronts ──▶ SimWorker ──▶ outcomes ──▶ table, JSON, picture
                             Fleet          loans      EngineCore
                             Admission      between    BytelessRunner
                             placement      workers    VirtualTransport ──▶ Links
    all on one VirtualClock

| what | is | where |
| --- | --- | --- |
| placement, admission, the prefix index, learning from receipts | real | `router`, called by `router.py` |
| scheduling, block pools, prefix caches, loans, preemption, load reports | real | `engine`, called by `worker.py` |
| receipts | real | `decode_worker.receipt` |
| what fronts, streams and futures do between those | a stand-in that decides nothing | `front_processes.py`, `router.py` |
| how long a step takes | modelled: a roofline of a named GPU, or a line | `gpus.py`, `engine/backends/sim/timing.py` |
| how long a read takes | modelled: NICs shared among transfers | `links.py` |
| how late a message is | one constant between processes, another for what workers tell routers | `ClusterSpec` |
| workers that come, go and switch roles | as they do; a start takes what one says | `cluster.py`, `worker_drain.py` |
| how many there are to be | the real planner's policy | `autoscale.py` |
| deaths of workers | a machine without power, noticed one message later | `SimCluster.kill` |
| bytes of KV | left out: blocks have no memory, and one fingerprint | `runner.py` |
| tokens | prompts repeat one number per block of the trace's hashes; outputs their request's | `request.py` |

Left out, so that a real cluster may be slower: tokenisation, detokenisation, the CPU time of routers and fronts, gRPC's
own queues; tiers below the pool; stop strings and end tokens (a request generates what the trace says, and its
max_tokens are just that); clients that give up; workers that hang without dying; routers that die.

**Deterministic**: one thread, one clock, one queue, and every random number from the run's seed. The same run gives the
same figures, to the bit.

**Fast**: every step may be computed by itself, as an engine does. By default steps that are all alike are not: a decode
worker whose next k steps only add a token to each stream makes them at once (`engine/core/uniform_decode.py`, `worker.py`). A test
holds both ways to the same outcomes, reports and times to the bit.

**Other policies** (`policies.py`) stand where placement does, for comparison: nothing but ours is ever served by.

Whoever has another clock, other links or other clients to offer builds on `cluster.py`; `tandem replay` is `replay.py`
(what to compare), `results.py` (figures), `report.py` and `plot.py` (what a person sees).
"""
