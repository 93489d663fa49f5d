"""Where a request goes: which decode worker, which lender, how much is borrowed. Pure: snapshots in, decisions out.

core.py        place: the best pair by predicted time to the first token      demand.py    what is asked for
candidates.py  each pair with its terms                                       explain.py   them, shown
snapshot.py    the pools as arrays, frozen for one decision                   index.py     who holds which block
fleet.py       what is known of the workers, and what was just placed         scores.py    predictions, scored
rates.py       how fast things go: settings and what was learnt               learning.py  learnt from receipts
"""
