"""Which waiting request starts next, which is refused, and why. A pure core: whoever calls it brings the time.

    limits.py       per tenant: rates, concurrency; state that is bounded          bucket.py   a token bucket
    quota.py        per tenant: tokens per window, shared by several routers
    request.py      what waits                                                     queues.py   its order: class, tenant
    room.py         on which workers a class may start; which are kept for whom    forecast.py how long one will wait
    failing.py      workers and pairs of them that fail, and when they are tried again
    core.py         Admission: events in, starts and refusals out                  refusals.py the errors, with reasons

`router/admission/dispatcher.py` is the shell: futures, a timer and the quota's ledger around one `Admission`.

Each distinct priority is a class. A request costs its prompt and the output it is promised blocks for, in tokens.

What holds at the end of every event:

1.  Bounded. At most `max_queued` requests wait, and `max_queued_per_tenant` of one tenant; only those that were placed
    before (their worker died or refused) come back above that. Of more, the last of the lowest class goes, if that
    class is below the newcomer's; else the newcomer.
2.  Work conserving. Who waits cannot start now, for a reason that can be named: no worker has the room that its class
    may take there, its tenant runs `max_running`, the lender it would go to is too deep in work, its worker has just
    refused it or failed others, or a worker is kept for another.
3.  Classes. A higher class goes first, but while lower ones wait they get `lower_class_share` of the tokens started
    beside it; and likewise among the lower ones. So each class with a request that can start gets a share.
4.  Fair. Deficit round robin: between two tenants of one class that both had a request that could start all the while,
    the tokens started, each divided by the tenant's weight, differ by at most QUANTUM + C1 / weight 1 + C2 / weight 2,
    with C1 and C2 the greatest cost of a request of either.
5.  Within a tenant of a class whose first token is due earliest goes first, then who arrived first.
6.  Nobody is passed for ever. A request that has its turn but no room is passed by others of its class or below, and
    from above when its class is owed its share; after `max_passed_s` or `max_passed_tokens` of that one worker that
    could hold it is kept for it: the one predicted to have room first. At most a quarter of the workers are kept, at
    least one.
7.  A request larger than the pool of every worker there blocks nobody and has no worker kept for it; after
    `no_worker_grace_s` it is refused.
8.  Batch (classes below 0) leaves 1 - `batch_block_share` of each worker's blocks free at its start; what is larger
    than the share starts on a worker that is otherwise empty. Long prompts together occupy at most
    `long_prompt_lender_share` of the lenders, and leave `short_prompt_lenders` of them or half; at least one is theirs.
9.  An idle cluster always starts. Room is tried before anything is predicted, and a request that has room is refused
    only where prompts are queued at its workers. So no figure, however wrong, refuses at a cluster with nothing queued.
    And the wait of the first in line is never predicted: it is what the next prediction is learnt from.
10. No phantom load: what was counted for a placement is given back by `ended`, exactly once; a worker is kept only for
    one that waits.

The cost of an event: one comparison for each tenant of a class that waits (its least demand with the greatest room); a
walk along one tenant's line and one decision for each request that starts. Decisions that end in holding a request back
are limited to HOLDS_PER_S.
"""
