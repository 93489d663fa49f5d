"""How many GPUs a load takes, by formulas: the smallest cluster of prefill and decode workers that keeps an SLO for
nine of ten requests, and the smallest of workers that do both.

    load.py        what is asked: a rate, lengths, how many tokens are cached
    prompts.py     what a prompt takes of a worker, alone or packed with others; and the line of prompts
    waiting.py     who waits in a line, and how long: M/G/c
    streams.py     what a step of so many streams takes, and how many fit the memory
    apart.py       both pools of a disaggregated cluster: which part of the requests keeps TTFT, ITL, finds room
    together.py    the same of an aggregated one, where prompts hold streams up
    search.py      the cheapest numbers of workers and TPs, and the advice
    arithmetic.py  every figure with its formula
    check.py       requests as the plan assumes them, through the simulated cluster that it found

Times are those of the simulator's `Roofline`: there is no second model of GPUs. What is added is queueing, and that is
an approximation: arrivals are Poisson, without bursts; the parts that keep TTFT, ITL and find room are taken not to
depend on each other; what is cached is the same part of every prompt; every prompt is lent by a prefill worker, which
`conditional` clusters need not do. `check.py` tells how far that is from what the real router and engine would do.
"""
