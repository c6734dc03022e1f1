"""Table: one family of the gallery as a table: what was done, what the product said, what that means."""

from __future__ import annotations

import polars as pl

from workbench.inspect import html as markup
from workbench.inspect.snapshot import StaticView
from workbench.wire import Cause


class FamilyTable(StaticView):
    """The findings of one family. No id and no time is in it, so two runs of the gallery show the same."""

    def __init__(self, findings: pl.DataFrame, family: str) -> None:
        self.family = family
        self.findings = findings.filter(pl.col("family") == family)

    def sentence(self) -> str:
        named = self.findings.filter((pl.col("cause") == pl.col("said")) | (pl.col("cause") == pl.col("detail"))).height
        return (
            f"{self.family.capitalize()} · {markup.count(self.findings.height, 'cause')} provoked, {named} named by "
            f"the product · {int(self.findings['valid'].sum())} of the rollouts kept its vote"
        )

    def html(self) -> str:
        rows = [
            [
                markup.Cell(row["cause"], strong=True, under=Cause(row["cause"]).explanation),
                row["how"],
                markup.Cell("the same" if row["said"] == row["cause"] else row["said"], muted=True),
                markup.Cell("–" if row["position"] is None else str(row["position"]), right=True),
                "has a vote" if row["valid"] else "no vote",
            ]
            for row in self.findings.iter_rows(named=True)
        ]
        header = ("cause, and what it means", "what was done", "primary cause", "token", "the rollout")
        return markup.block(markup.line(self.sentence(), strong=True), markup.table(header, rows))
