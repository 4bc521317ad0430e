"""Token keys and their content addresses: the only hashing code.

Owns: taking tokens in from whatever a caller has, comparing and cutting them, and the chain of page
keys (semantics §10.1). Refuses to know: the tree, tiers, fingerprints.

Tokens are kept as the bytes of native int64, the type of torch and numpy, because then a radix edge
is compared with one memcmp and no token ever becomes a Python object. They become u32 little endian
only when hashed.

A bigram key (draft heads that look at token pairs) is a sequence of overlapping pairs. It keeps its
n tokens as they are and reads as n − 1 units; the bytes of units `[a, b)` are those of tokens `[a,
b + 1)`. So the two kinds differ by one number, `overlap`, and nothing in the tree branches on it.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Mapping, Set
from copy import copy
from operator import index
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numpy import ndarray

from tiered_cache.types import Namespace

TOKEN_BYTES: Final = 8
DIGEST_BYTES: Final = 32
MAX_TOKEN: Final = 0xFFFF_FFFF
SHORT_BYTES: Final = 1 << 15
"""Up to here looking for non-zero high halves, which has less overhead than a reduction, is the
faster range check."""

UINT32: Final = np.dtype(np.uint32)  # a dtype instance saves its look-up
UINT64: Final = np.dtype(np.uint64)
INT64: Final = np.dtype(np.int64)
HIGH_HALF: Final = 4 if sys.byteorder == "little" else 0
"""Where in a token's bytes the half begins that is zero in all of u32."""

NO_SEQUENCES: Final = (str, bytes, bytearray, memoryview, Set, Mapping)
"""Iterable, but text, raw memory, or without an order of their own."""

HASH_PAGES: Final = 256
"""Page keys that are computed between two turns of a loop (0.3 ms at 16 tokens a page)."""

NAMESPACE_TAG: Final = b"tiered-cache-namespace-v1"


class RadixKey:
    """A token sequence in a namespace; `len()` is its number of units (tokens, or pairs for a
    bigram key).

    Args:
        tokens: a list or other sequence of ints, an `array`, a 1-D numpy array or a 1-D torch
            tensor (any integer type). The tokens are copied: the caller's buffer may change
            afterwards.
        extra_key, cache_salt: what reuse must not cross: an adapter, a tenant. `None` and `""` are
            the same.
        is_bigram: units are pairs of neighbouring tokens.

    Raises:
        ValueError: a token id outside u32 (the message names its position), or not one-dimensional.
        TypeError: tokens that are not integers, or a namespace part that is not text.
    """

    __slots__ = (
        "_appended",
        "_data",
        "_page_keys",
        "_page_keys_size",
        "namespace",
        "overlap",
        "place",
        "root_prefix",
    )

    def __init__(
        self,
        tokens: Any,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        is_bigram: bool = False,
    ) -> None:
        self._data = tokens_to_bytes(tokens)
        self._appended: array[int] | None = None
        self._page_keys: list[bytes] = NO_KEYS
        self._page_keys_size = 0
        self.overlap = TOKEN_BYTES if is_bigram else 0
        self.place: Any = None  # a tree's node that is on its path, as far as the tree knows
        self.namespace = DEFAULT_NAMESPACE
        self.root_prefix = b""
        if extra_key is not None or cache_salt is not None or is_bigram:
            self.namespace = _checked_namespace(extra_key, cache_salt, is_bigram)
            self.root_prefix = _root_prefix(self.namespace)

    @property
    def data(self) -> bytes:
        """The tokens as native int64 bytes."""
        if self._appended:
            self._data += self._appended.tobytes()
            self._appended = None
        return self._data

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """Read-only view of the tokens, int64 [n]."""
        return np.frombuffer(self.data, dtype=np.int64)

    def span(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The tokens `[start, stop)`, read-only int64; as cheap right after `append`."""
        base = len(self._data) // TOKEN_BYTES
        if self._appended and start >= base:
            recent = self._appended[start - base : stop - base]
            return np.frombuffer(recent.tobytes(), dtype=np.int64)
        return np.frombuffer(self.data, INT64, stop - start, start * TOKEN_BYTES)

    @property
    def num_tokens(self) -> int:
        return len(self._data) // TOKEN_BYTES + (len(self._appended) if self._appended else 0)

    def __len__(self) -> int:
        num_bytes = len(self._data) - self.overlap
        if self._appended:
            num_bytes += len(self._appended) * TOKEN_BYTES
        return num_bytes // TOKEN_BYTES if num_bytes > 0 else 0

    def append(self, token: int) -> None:
        """Add one token; amortised O(1)."""
        check_token(token, self.num_tokens)
        if self._appended is None:
            self._appended = array("q")
        self._appended.append(token)

    def extend(self, tokens: Any) -> None:
        """Add tokens at the end. Page keys already computed stay valid."""
        self._data = self.data + tokens_to_bytes(tokens, position=self.num_tokens)

    def snapshot(self) -> RadixKey:
        """The key as it is now, for who goes on with it while its owner changes it. O(1): tokens
        and page keys are shared."""
        made = copy(self)
        made._data, made._appended = self.data, None
        return made

    def truncate(self, num_tokens: int) -> None:
        """Drop all tokens from `num_tokens` on."""
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(
                f"cannot truncate to {num_tokens} tokens: the key has {self.num_tokens}"
            )
        self._data = self.data[: num_tokens * TOKEN_BYTES]
        self.place = None
        if self._page_keys:
            self._page_keys = self._page_keys[: len(self) // self._page_keys_size]

    def child_key(self, start: int, page_size: int) -> bytes:
        """The key under which a child that begins at unit `start` hangs: its own first page
        (semantics §2.6).

        Below the root the namespace goes in front, so one tree holds all namespaces and they meet
        only at the root.
        """
        page = self.data[start * TOKEN_BYTES : (start + page_size) * TOKEN_BYTES + self.overlap]
        return page if start else self.root_prefix + page

    def page_keys(self, page_size: int, count: int | None = None) -> list[bytes]:
        """The first `count` page keys (None: of all whole pages), 32 bytes each; computed once,
        then remembered.

        Hashing is done here and now: a caller on an event loop asks for a few more at a time.
        """
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        whole = len(self) // page_size
        count = whole if count is None else min(count, whole)
        if page_size != self._page_keys_size:
            self._page_keys, self._page_keys_size = NO_KEYS, page_size
        done = len(self._page_keys)
        if done < count:
            previous = self._page_keys[-1] if done else namespace_seed(self.namespace)
            units = self.tokens[done * page_size : count * page_size + (1 if self.overlap else 0)]
            more = hash_pages(units, page_size, previous, is_bigram=self.namespace.is_bigram)
            self._page_keys = self._page_keys + more
        return self._page_keys[:count]

    def __repr__(self) -> str:
        """Length and kind only: prompts and salts do not belong in logs."""
        kind = "pairs" if self.overlap else "tokens"
        own = "" if self.namespace == DEFAULT_NAMESPACE else ", own namespace"
        return f"RadixKey({len(self)} {kind}{own})"


def check_token(token: int, position: int) -> None:
    """Raise `ValueError` for a token id outside u32, `TypeError` for what is not an integer.

    `position` is where it was to go.
    """
    if type(token) is not int and (isinstance(token, bool) or not hasattr(token, "__index__")):
        raise TypeError(f"token at position {position}: {type(token).__name__} is not an integer")
    if not 0 <= index(token) <= MAX_TOKEN:
        raise _outside_u32(token, position)


def tokens_to_bytes(tokens: Any, position: int = 0) -> bytes:
    """Tokens as native int64 bytes, without a Python loop; ids outside u32 are refused.

    `position` is the place of the first token, for error messages.
    """
    if type(tokens) is array and tokens.typecode == "q":
        data = tokens.tobytes()
    elif isinstance(tokens, np.ndarray):
        data = _array_to_bytes(tokens, position)
    elif hasattr(tokens, "detach"):  # a torch tensor, without importing torch
        data = _array_to_bytes(tokens.detach().cpu().numpy(), position)
    elif isinstance(tokens, array):
        data = _array_to_bytes(np.asarray(tokens), position)
    else:
        data = _sequence_to_bytes(tokens, position)
    if not data:
        return data
    if len(data) < SHORT_BYTES:
        high_halves = ndarray(len(data) // TOKEN_BYTES, UINT32, data, HIGH_HALF, TOKEN_BYTES)
        bad = len(high_halves.nonzero()[0])  # a method, which numpy does not dispatch first
    else:
        # A negative id reads as a huge one.
        bad = np.bitwise_or.reduce(np.frombuffer(data, UINT64)) > MAX_TOKEN
    if bad:
        ids = np.frombuffer(data, np.int64)
        at = int(np.argmax((ids < 0) | (ids > MAX_TOKEN)))
        raise _outside_u32(int(ids[at]), position + at)
    return data


def hash_pages(
    tokens: npt.NDArray[np.int64], page_size: int, previous: bytes, *, is_bigram: bool = False
) -> list[bytes]:
    """The chain over whole pages: `sha256(previous digest + the page's tokens as u32 LE)`, from
    `previous` on.

    A bigram page hashes both tokens of each pair; `tokens` then has one more entry than there are
    units.
    """
    words = tokens.astype("<u4")
    width = page_size
    if is_bigram:
        words = np.stack((words[:-1], words[1:]), axis=1).reshape(-1)
        width = 2 * page_size
    data = words.tobytes()
    step = width * 4
    keys = []
    for start in range(0, len(data) - step + 1, step):
        previous = hashlib.sha256(previous + data[start : start + step]).digest()
        keys.append(previous)
    return keys


def namespace_seed(namespace: Namespace) -> bytes:
    """What the chain of a namespace starts from: nothing for the default one, so that its keys are
    the ecosystem's."""
    if not namespace.extra_key and not namespace.cache_salt:
        return b""
    parts = [NAMESPACE_TAG]
    for text in (namespace.extra_key, namespace.cache_salt):
        raw = text.encode()
        parts.append(b"\x01" + len(raw).to_bytes(8, "little") + raw if raw else b"\x00")
    return hashlib.sha256(b"".join(parts)).digest()


DEFAULT_NAMESPACE: Final = Namespace()
NO_KEYS: Final[list[bytes]] = []


def _root_prefix(namespace: Namespace) -> bytes:
    """What keeps namespaces apart below the root: a tag for the kind, then the seed.

    Tags make the lengths differ modulo the token size, and where they cannot, the first byte does;
    so no two namespaces give equal keys, whatever the page size.
    """
    if namespace == DEFAULT_NAMESPACE:
        return b""
    seed = namespace_seed(namespace)
    return bytes([1 + namespace.is_bigram + 2 * bool(seed)]) + seed


def _checked_namespace(extra_key: Any, cache_salt: Any, is_bigram: bool) -> Namespace:
    for name, value in (("extra_key", extra_key), ("cache_salt", cache_salt)):
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{name} must be a str or None, not {type(value).__name__}")
        try:
            (value or "").encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"{name} is not valid Unicode: it holds an unpaired surrogate"
            ) from None
    return Namespace(extra_key or "", cache_salt or "", bool(is_bigram))


def _array_to_bytes(tokens: npt.NDArray[Any], position: int) -> bytes:
    if tokens.ndim != 1:
        raise ValueError(
            f"tokens must be one-dimensional, not of shape {tokens.shape}: one key is one sequence"
        )
    if tokens.dtype.kind not in "iu":
        raise TypeError(f"tokens must be integers, not {tokens.dtype}")
    if tokens.dtype == np.uint64 and tokens.size and tokens.max() > MAX_TOKEN:
        at = int(np.argmax(tokens > MAX_TOKEN))
        raise _outside_u32(int(tokens[at]), position + at)
    return tokens.astype(np.int64, copy=False).tobytes()


def _sequence_to_bytes(tokens: Any, position: int) -> bytes:
    if not isinstance(tokens, (list, tuple)):
        if isinstance(tokens, NO_SEQUENCES) or not isinstance(tokens, Iterable):
            raise TypeError(f"tokens must be a sequence of integers, not {type(tokens).__name__}")
        tokens = list(tokens)
    if tokens and type(tokens[0]) is bool:  # a mask; to look at every token would cost too much
        raise TypeError("tokens must be integers, not bool")
    try:
        return array("q", tokens).tobytes()
    except (OverflowError, TypeError):
        for at, token in enumerate(tokens):
            if not hasattr(token, "__index__"):
                raise TypeError(
                    f"token at position {position + at} is a {type(token).__name__}, not an int"
                ) from None
            if not 0 <= int(token) <= MAX_TOKEN:
                raise _outside_u32(int(token), position + at) from None
        raise


def _outside_u32(token: int, position: int) -> ValueError:
    return ValueError(f"token id {token} at position {position} is outside u32 (0 .. {MAX_TOKEN})")
