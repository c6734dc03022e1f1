"""Verify: everything that a stored run claims, computed again and compared.

run ─► ledger (custody)      groups and their calls, receipts, rows
    ─► steps, logs           lines of groups and steps, the trainer's parts
    ─► account, events       what the run says of itself as a whole
each difference and remark goes into one report
"""

from workbench.campaign.verify.report import VerifyReport
from workbench.campaign.verify.run import verify_run

__all__ = ["VerifyReport", "verify_run"]
