"""Saved runs: their file (`saved_run`), their tables (`report`), their curves, and what changed between two
(`compare`)."""
