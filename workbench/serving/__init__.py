"""Serving: one policy behind HTTP, by vLLM or by a script, and new weights for it while it serves.

Nothing here imports `workbench.capture` unless the worker's settings switch it on.
"""
