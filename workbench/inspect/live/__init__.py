"""Live: the inspectors as widgets, over the same objects that make the snapshots.

One widget class an inspector, one JavaScript module each over small shared ones in `js/`. Binary columns travel packed
(`pack`), nothing is fetched, and what is not in the browser is asked of the kernel.
Not here: what is shown and why (the inspectors' own modules).
"""
