"""The `tandem` command.

Commands import their modules when they run, so `--help` is fast.
"""
