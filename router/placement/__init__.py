"""Placement: which decode worker and which lender serve a request, and how much is borrowed.

Pure.

    place.py         `place`: the best pair by predicted cost             demand.py, request_demand.py  what a request needs
    candidates.py    each candidate with its cost terms                   explain.py           all candidates, for display
    worker_table.py  the workers as arrays                                index.py             who holds which block
    fleet.py         all known about the workers, and recent placements   worker_records.py    records of workers and placements
    rates.py         speeds: settings and learned                         rate_learning.py     learned from receipts
    placement_snapshot.py, decision_codec.py   inputs of a decision, kept and as JSON
    prediction_error.py   quality of predictions                          traffic_counters.py  arrivals, for the planner
"""
