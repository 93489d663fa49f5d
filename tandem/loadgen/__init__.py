"""`tandem bench`: load for a live cluster, and measurements of its clients.

    profile or trace ──▶ TraceRequests ──▶ drive.py ──▶ frontends.py ──▶ Outcomes ──▶ table, JSON, picture, receipts
                     (lengths, sharing)    (when)      (gRPC, HTTP)

Requests, outcomes and figures are the simulator's: a live cluster and `tandem replay` are measured alike.

**No coordinated omission.** In an open loop every request has a due time, whatever became of earlier ones, and times
count from it: a request that this process sent late, because it or the cluster was busy, was slow. The report has the
lateness. With `--concurrency` the loop is closed, and times count from the sending.
"""
