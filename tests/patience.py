"""How long tests wait for what should come at once."""

SOON = 20.0
"""Seconds. Long for a slow and busy machine, short of the timeout (60 s or more) that would end a hang."""

JOB = 180.0
"""Seconds after which a process that a test has started counts as hung; it takes a few."""
