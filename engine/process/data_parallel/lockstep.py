"""Steps that the ranks of a data-parallel group make together.

In a mixture-of-experts model with data-parallel attention each rank computes its own requests, but every forward pass
has collectives of all ranks. So the ranks make *steps* together: step n of a rank is its n-th forward pass since the
group met, with a batch of its own requests or, without any, a dummy batch.

Rank 0 *grants* steps. A rank with work asks it for steps up to a number; rank 0 tells the largest such number to all.
These are the invariants:

1. A rank launches its steps in order, and step n only if more than n steps are granted.
2. A rank launches every granted step as soon as it may have another batch in flight, whether it has work or not. A
   rank waits for nothing but results of its earlier steps meanwhile, and those need no step that is not granted.
3. Grants only grow, and every rank hears of each. So when nothing is on its way, all ranks have launched equally many
   steps, and no rank waits in a collective that another one does not enter.
4. A rank with work has asked for a step that it has not launched, so work never waits for ever.
5. A rank asks only for work. Without any all ranks come to the end of the last grant, at most `interval` steps later,
   and wait without computing, until a rank asks again.

vLLM's own data-parallel engines reach the same by waves: a message starts one at all ranks, and an all-reduce every
`dp_sync_interval` steps tells whether it ends. Grants need neither the all-reduce nor numbers of waves: a request that
arrives while a wave would end just asks for more steps.

Pure; `step_group.py` carries the messages.
"""


class Lockstep:
    """Steps of one rank: granted, asked for, and launched ones."""

    def __init__(self, interval: int) -> None:
        """Create it for a group that has just met; a rank asks for `interval` steps, at least 1, at once."""
        self._interval = interval
        self.num_launched = 0
        self._num_granted = 0
        self._num_asked = 0

    @property
    def may_launch(self) -> bool:
        """Whether a step is granted that was not launched; then it must be launched."""
        return self.num_launched < self._num_granted

    def launched(self) -> None:
        """Record that the next step is launched."""
        assert self.may_launch
        self.num_launched += 1

    def to_ask(self) -> int | None:
        """Return the number of steps that a rank with work must ask for now; None where it has enough.

        It asks when half of its steps are left, so that an answer comes in time.
        """
        if max(self._num_granted, self._num_asked) - self.num_launched > self._interval // 2:
            return None
        self._num_asked = self.num_launched + self._interval
        return self._num_asked

    def granted(self, num_steps: int) -> None:
        """Record that so many steps since the group met are granted."""
        self._num_granted = max(self._num_granted, num_steps)


class Grants:
    """Steps that rank 0 has granted."""

    def __init__(self) -> None:
        self._num_granted = 0

    def asked(self, num_steps: int) -> int | None:
        """Process what a rank asks for; return the number of granted steps if all ranks must hear it."""
        if num_steps <= self._num_granted:
            return None
        self._num_granted = num_steps
        return num_steps
