"""Multi-rank testing: run_ranks() and the pytest plugin."""
