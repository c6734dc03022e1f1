"""Commands: the functions behind `workbench`, in the order of a day's work: running, looking, preparing.

Invariant: each imports what it needs inside itself, so that `--help` is answered at once. Not here: how an error
becomes a line and an exit code (cli).
"""
