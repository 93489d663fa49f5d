"""Placement: which decode worker and which lender serve a request, and how much is borrowed.

Pure.

    place.py               `place`: the best candidate by predicted cost; `explain`: all of them
    demand.py              what a request needs; request_demand.py: from a checked request
    terms.py               the terms of a candidate's cost, by name; pairs.py: the quantities they read
    costs.py               the sums of all candidates at once; candidates.py: one candidate
    worker_table.py        the workers as arrays
    fleet.py               all known about the workers, and recent placements; worker_records.py: the records
    index.py               which worker holds which block
    rates.py               speeds; rate_learning.py, receipt_timings.py: learned from receipts
    placement_snapshot.py  inputs of a decision; decision_codec.py: as JSON
    prediction_error.py    quality of predictions
    traffic_counters.py    arrivals, for the planner
"""
