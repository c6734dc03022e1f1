"""Report: a recipe becomes an executed notebook, a page and a summary.

runner ─► execution (papermill, kernel) ─► notebook_file, html_export
       ─► progress (the terminal's line), summary
sweep: a run for each value; listing: many runs, one line each
"""
