"""What the unit tests share. TANDEM_TRIALS=n asks for n trials of every randomised test instead of the few here."""

import os

from hypothesis import settings

_trials = os.environ.get("TANDEM_TRIALS")
# Derandomised by default: a run on an unchanged tree gives what it gave before. Machines under load are slow at
# random, so no example has a deadline.
settings.register_profile("bounded", deadline=None, database=None, derandomize=True, max_examples=60)
settings.register_profile("long", deadline=None, database=None, max_examples=int(_trials or 1))
settings.load_profile("long" if _trials else "bounded")
