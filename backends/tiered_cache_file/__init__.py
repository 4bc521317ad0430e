"""The file backend: one file per object in a directory that several processes may share.

    backend.py     the contract: batches become jobs
    directory.py   a job: read, write, delete
    reading.py     a file into a row
    room.py        the budget: count, evict
    account.py     the lock between processes, and how much there is
    victims.py     who goes first
    temporary.py   files that are being written, and those of processes that were killed
    objects.py     objects as files: look, list, touch, remove
    layout.py      names, and that the directory is one of ours
    options.py     what can be configured

The directory is the index: no process keeps a list of the objects, so none can be wrong about what
others have written or removed. What a process keeps is how many there are, and the oldest of them.
"""

from __future__ import annotations

from tiered_cache_file.backend import FileBackend
from tiered_cache_file.options import FileOptions

__all__ = ["FileBackend", "FileOptions"]
