"""Admission: which waiting request starts next, which is refused, and why.

Pure: callers pass the time.

    admission.py          Admission: events in, starts and refusals out; its shell is dispatcher.py
    request.py            requests and queued requests
    queues.py             order: priority class, tenant
    scheduling_round.py   one attempt to start requests of a class
    wait_forecast.py      predicted waits
    refusals.py           errors and their reasons
    arrivals.py           bounds before a request is read
    workers/              workers on which a class may start; reserved, busy and failing ones
    limits/               limits of tenants over all models; quotas may be shared by several routers

Each distinct priority is a class. A request costs its prompt and the output for which it reserves blocks, in tokens.

Invariants at the end of every event:

1.  Bounded. At most `max_queued` requests wait, and `max_queued_per_tenant` of one tenant; only requests that were
    placed before (their worker died or refused) may exceed that. Beyond it, the last request of the lowest class is
    refused if that class is below the newcomer's, otherwise the newcomer.
2.  Work conserving. A waiting request cannot start now for a reason that can be named: no worker has the capacity that
    its class may use there, its tenant runs `max_running`, its lender is too busy, its worker just refused it or failed
    others, or a worker is reserved for another request.
3.  Classes. A higher class goes first, but while lower ones wait they get `lower_class_share` of the tokens started
    beside it, and likewise among the lower ones. So each class with a request that can start gets a share.
4.  Fair. Deficit round robin: between two tenants of one class that both had a request that could start all the while,
    the tokens started, each divided by the tenant's weight, differ by at most QUANTUM + C1 / weight 1 + C2 / weight 2,
    with C1 and C2 the greatest cost of a request of either.
5.  Within a tenant and class the request whose first token is due earliest goes first, then the first arrival.
6.  No starvation. A request without capacity in its turn is overtaken by others of its class or below, and from above
    when its class is owed its share. After `max_passed_s` or `max_passed_tokens` of that, one worker that could hold it
    is reserved for it: the one predicted to have capacity first. At most a quarter of the workers are reserved, at
    least one.
7.  A request larger than the pool of every present worker blocks no other request and gets no reservation; after
    `no_worker_grace_s` it is refused.
8.  Batch (classes below 0) leaves 1 - `batch_block_share` of each worker's blocks free at its start; a larger request
    starts on an otherwise empty worker. Long prompts together occupy at most `long_prompt_lender_share` of the lenders,
    and leave `short_prompt_lenders` of them, or half, to others; at least one lender may compute them.
9.  An idle cluster always starts. Capacity is tried before anything is predicted, and a request with capacity is
    refused only where prompts are queued at its workers. So no wrong figure makes a cluster refuse while nothing is
    queued. The wait of the first in the queue is never predicted: it is measured, and later predictions learn from it.
10. No phantom load: what was counted for a placement is given back by `ended`, exactly once; a worker is reserved only
    for a waiting request.

The cost of an event: one comparison per tenant of a waiting class (its least demand with the greatest capacity); a walk
along one tenant's queue and one decision per request that starts. Decisions that end in holding a request back are
limited to HOLDS_PER_S.
"""
