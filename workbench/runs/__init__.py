"""The run store: what a campaign leaves on disk. Columns are declared in `schema`, written by `writer`."""
