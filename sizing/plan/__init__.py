"""`tandem plan`: GPUs that a load needs, by formulas.

Finds the smallest cluster of prefill and decode workers that keeps an SLO for nine of ten requests, and the smallest of
workers that do both.

    load.py           the load: a rate, lengths, share of cached tokens
    prompts.py        time of a prompt, alone or packed with others; waits in the queue of prompts: M/G/c
    streams.py        time of a step with so many streams, and how many fit the memory
    layouts.py        a disaggregated cluster, an aggregated one: share of requests that keep TTFT, ITL, find capacity
    search.py         the cheapest numbers of workers and TPs, the advice, a check in the simulated cluster
    arithmetic.py     every figure with its formula

Times are those of the simulator's `Roofline`: there is no second model of GPUs. Queueing is added as an approximation:
arrivals are Poisson, without bursts; the shares that keep TTFT, ITL and find capacity are taken as independent; the
same share of every prompt is cached; every prompt is lent by a prefill worker, which `conditional` clusters need not
do. `search.py` measures the distance to what the real router and engine would do.
"""
