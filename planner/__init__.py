"""How large the pools are to be: decided by a pure policy, of what routers say, and carried out by an executor.

    routers ──ClusterStatus──▶ observation ──▶ policy.decide ──▶ wish ──▶ executor (Ray, Kubernetes, none)
                                    (state) ─────▲ │                 └──▶ metrics
                                                 └─┘

    config.py        settings, with a default each
    observation.py   what was seen at one moment, of all routers together
    learned.py       what workers turn out to be able to do; and the forecast of what comes
    sizing.py        how many workers a load takes
    policy.py        hysteresis, bounds, and whom to switch: `decide(state, seen, settings)`
    runtime.py       the process that does so, again and again

Everything above `runtime.py` has no clock and no socket: the simulator runs the same policy in virtual time.
"""
