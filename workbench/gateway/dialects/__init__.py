"""Dialects: how each API says its requests, responses and streams, and what of that the ledger compares.

One file a dialect and one line in `DIALECTS`. All three give the same conversation the same parents: fingerprints and
digests read the items of each of them.
"""

from workbench.gateway.dialects.base import Assembler, Dialect
from workbench.gateway.dialects.chat import ChatDialect
from workbench.gateway.dialects.messages import MessagesDialect
from workbench.gateway.dialects.responses import ResponsesDialect

DIALECTS: dict[str, Dialect] = {
    dialect.path: dialect for dialect in (ChatDialect(), ResponsesDialect(), MessagesDialect())
}

__all__ = ["DIALECTS", "Assembler", "ChatDialect", "Dialect", "MessagesDialect", "ResponsesDialect"]
