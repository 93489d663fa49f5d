"""Load for a live cluster, and what its clients saw: `tandem bench`.

    profile or trace ──▶ TraceRequests ──▶ drive.py ──▶ a door ──▶ Outcomes ──▶ table, JSON, picture, log of receipts
                         (lengths, sharing)  (when)      (gRPC, HTTP)

Requests are the simulator's, and so are outcomes and figures: what a live cluster did and what `tandem replay` says it
would do are counted alike.

**No coordinated omission.** In an open loop every request has a time at which it is due, whatever became of those
before it, and times count from then: a request that this process sent late, because it or the cluster was busy, was
slow. How late it sent them is part of the report. With `--concurrency` the loop is closed, since that is what was asked
for, and times count from the sending.
"""
