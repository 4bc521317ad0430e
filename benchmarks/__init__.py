"""Benchmarks of tiered-cache: `python -m benchmarks` (see README.md beside this file)."""
