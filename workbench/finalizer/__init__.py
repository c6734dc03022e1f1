"""Finalizer: a group of finished rollouts becomes exactly as many verified training rows.

`verify_and_linearize` is the proof and imports nothing heavy; groups and the actor (`group`, `actor`) are imported by
name, because they need TransferQueue and Ray.
"""

from workbench.errors import ReceiptRejected
from workbench.finalizer.verify import LinearizedRow, verify_and_linearize

__all__ = ["LinearizedRow", "ReceiptRejected", "verify_and_linearize"]
