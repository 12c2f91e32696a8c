"""A simulator of NKI with collectives. It imports nothing of the rest of the project."""
