"""The `tiered-cache` command."""
