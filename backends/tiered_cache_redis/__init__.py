"""The redis backend."""
