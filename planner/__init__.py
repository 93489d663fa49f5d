"""The planner: decides how large the worker pools should be, by a pure policy over what routers report.

    routers ──ClusterStatus──▶ observation ──▶ policy.decide ──▶ desired sizes ──▶ executor (Ray, Kubernetes, none)
                                    (state) ─────▲ │                  └──▶ metrics
                                                 └─┘

    config.py        settings and their defaults
    observation.py   the state of all routers at one moment
    estimates.py     measured speed of workers, and a forecast of arrivals
    sizing.py        workers needed for a load
    policy.py        hysteresis, bounds and role switches: `decide(state, seen, settings)`
    runtime.py       the process that repeats this

All modules but `runtime.py` use no clock and no socket: the simulator runs the same policy in virtual time.
"""
