"""Replica groups, KV layouts and the shapes they apply to. Pure functions: no process group, no I/O."""
