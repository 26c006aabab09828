"""Speculative heads: reading their checkpoints in every public dialect into one explicit record."""
