"""The file backend: one file per object in a directory that several processes may share.

    options.py     what can be configured
    layout.py      names: which file an object is, and that the directory is one of ours
    account.py     the lock between processes, and how much there is
    temporary.py   files that are being written, and those of processes that were killed
    victims.py     who goes first when room is needed
    directory.py   everything a thread does: read, write, delete, count, evict
    backend.py     the contract: batches become jobs

The directory is the index: no process keeps a list of the objects, so none can be wrong about what
others have written or removed. What a process keeps is how many there are, and the oldest of them.
"""

from __future__ import annotations

from tiered_cache_file.backend import FileBackend
from tiered_cache_file.options import FileOptions

__all__ = ["FileBackend", "FileOptions"]
