"""Version of the internal protocols between the processes of one cluster."""

PROTOCOL = 4
"""Version number, raised with every change that an older process would misunderstand. Routers accept only workers with
their own version, and pair only workers that they accepted."""
