"""Placement: which decode worker and which lender serve a request, and how much is borrowed.

Pure.

    place.py               `place`: the best candidate by predicted cost; `explain`: all of them
    demand.py              what a request needs; request_demand.py: from a checked request
    terms.py               the terms of a candidate's cost, by name; pairs.py: the quantities they read
    costs.py               the sums of all candidates at once; candidates.py: one candidate
    worker_table.py        the workers as arrays
    rates.py               speeds
    fleet/                 all known about the workers: reports, index of cached blocks, recent placements, arrivals
    learning/              what receipts teach: speeds, lengths of outputs, quality of predictions
    snapshots/             inputs of a decision, also as JSON
"""
