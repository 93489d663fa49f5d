"""`tandem fault`: faults injected into a live cluster, one by one or as a drill under load.

cluster.py ── which workers there are, faults and audits
load.py    ── greedy streams through the public API, and their undisturbed answers
drill.py   ── one fault after another while streams run; report.py is the result
"""
