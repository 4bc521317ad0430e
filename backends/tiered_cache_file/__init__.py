"""The file backend."""
