"""The engine core: scheduling, preemption and the step loop over requests and loans."""
