"""Workbench: token-exact GRPO on language-model agents, explored in notebooks.

Importing the package is cheap: the rooms (`workbench.wire`, `workbench.capture`, `workbench.ledger`, ...) bring
their own dependencies when they are imported, and nothing here imports torch, ray, vllm or plotly.
"""

__version__ = "0.1.0"
