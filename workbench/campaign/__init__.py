"""Campaign: everything a person starts. The command line, the controller, environments and agents, the runner.

Nothing is imported here, so that `workbench --help` answers at once.
"""
