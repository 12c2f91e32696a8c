"""NKI device code, one file per kernel, each with its torch twin beside it."""
