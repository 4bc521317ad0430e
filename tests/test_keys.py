"""Keys: what tokens are taken, how they are compared and cut, and the chain of page keys (semantics
§1.6, §10.1)."""

from __future__ import annotations

import gc
import hashlib
import os
import struct
import subprocess
import sys
from array import array
from collections.abc import Callable
from itertools import pairwise
from types import FrameType
from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tiered_cache import keys
from tiered_cache.keys import MAX_TOKEN, TOKEN_BYTES, RadixKey
from tiered_cache.types import Namespace

TOKENS: Final = [0, 1, 2, 3, MAX_TOKEN, 5, 6, 7]

INPUTS: Final[dict[str, Callable[[list[int]], Any]]] = {
    "list": list,
    "tuple": tuple,
    "generator": lambda tokens: (token for token in tokens),
    "list of numpy scalars": lambda tokens: [np.int64(token) for token in tokens],
    "array q": lambda tokens: array("q", tokens),
    "array Q": lambda tokens: array("Q", tokens),
    "array I": lambda tokens: array("I", tokens),
    "numpy int64": lambda tokens: np.array(tokens, np.int64),
    "numpy uint32": lambda tokens: np.array(tokens, np.uint32),
    "numpy uint64": lambda tokens: np.array(tokens, np.uint64),
    "numpy big endian": lambda tokens: np.array(tokens, ">i8"),
    "numpy with strides": lambda tokens: np.repeat(np.array(tokens, np.int64), 3)[::3],
    "torch int64": lambda tokens: torch.tensor(tokens, dtype=torch.int64),
    "torch with strides": lambda tokens: (
        torch.tensor(tokens, dtype=torch.int64).repeat(3, 1).T[:, 1]
    ),
}
NARROW_INPUTS: Final[dict[str, Callable[[list[int]], Any]]] = {
    "array i": lambda tokens: array("i", tokens),
    "numpy int32": lambda tokens: np.array(tokens, np.int32),
    "numpy uint8": lambda tokens: np.array(tokens, np.uint8),
    "torch int32": lambda tokens: torch.tensor(tokens, dtype=torch.int32),
    "torch uint8": lambda tokens: torch.tensor(tokens, dtype=torch.uint8),
    "range": lambda tokens: range(tokens[0], tokens[-1] + 1),
}


# --- the chain, told again from the text of the semantics -----------------------------------------


def seed(extra_key: str, cache_salt: str) -> bytes:
    """§10.1: `sha256("tiered-cache-namespace-v1" + for extra_key, cache_salt each: 0x00 if absent
    or empty, else 0x01 + u64 LE length + UTF-8)`."""
    text = b"tiered-cache-namespace-v1"
    for part in (extra_key, cache_salt):
        raw = part.encode("utf-8")
        text += b"\x01" + struct.pack("<Q", len(raw)) + raw if raw else b"\x00"
    return hashlib.sha256(text).digest()


def chain(
    tokens: list[int],
    page_size: int,
    extra_key: str = "",
    cache_salt: str = "",
    is_bigram: bool = False,
) -> list[str]:
    """§10.1: `sha256(previous digest + tokens as u32 LE)`, pairs for a bigram key."""
    digest = seed(extra_key, cache_salt) if extra_key or cache_salt else b""
    units = list(pairwise(tokens)) if is_bigram else [(token,) for token in tokens]
    page_keys = []
    for start in range(0, len(units) - page_size + 1, page_size):
        words = [token for unit in units[start : start + page_size] for token in unit]
        digest = hashlib.sha256(digest + struct.pack(f"<{len(words)}I", *words)).digest()
        page_keys.append(digest.hex())
    return page_keys


def page_keys(key: RadixKey, page_size: int, count: int | None = None) -> list[str]:
    return [page_key.hex() for page_key in key.page_keys(page_size, count)]


@pytest.mark.parametrize(
    ("extra_key", "cache_salt", "is_bigram", "wanted"),
    [
        (
            "",
            "",
            False,
            [
                "baed642339816affb3fe8719792d0e4ce82f12db72b7373d244eaa65445800fe",
                "1081d965b3fddebb77bd93380780ae99e05800ba5440fc6739b5a3a53029fc03",
            ],
        ),
        (
            "",
            "tenant-1",
            False,
            [
                "40b9aeedc98e44b2b6568fad8365b874ba316b03c84dd57f1d3383813382f52e",
                "4f4a271bf2f086b2811e163b5449cac71d31ae6c449d647ff33df497a552d905",
            ],
        ),
        (
            "lora-é",
            "",
            False,
            [
                "384ef4e4e35f0a2f74acced951164c3b8fb582431e9808724c67003a115604e4",
                "178b5e8061f59041dc93034d596917b26dcdfdfedc2c5078a3b556fc5fd86c4d",
            ],
        ),
        (
            "lora-é",
            "tenant-1",
            False,
            [
                "a47634bbc6822b833ebfb3810fbbdcf364559765611ebb8029d5994537f9fffd",
                "6588a016c9e9f7524c653a9e7fab62549853934ee8e67346b64c150bc6f7ad49",
            ],
        ),
        ("", "", True, ["803c43fb104582ea2290fcac0eae68d96b05ffb1f3f90f12a707581ac66f5274"]),
        (
            "",
            "tenant-1",
            True,
            ["e48bc65210d8715cb504b4fbbdf9e0820f8a256ad27f2e4a79ce1016d3be3eed"],
        ),
    ],
)
def test_b83_golden_page_keys(
    extra_key: str, cache_salt: str, is_bigram: bool, wanted: list[str]
) -> None:
    """B83, §10.1: the chain gives these very keys, today and in ten years, here and elsewhere."""
    assert chain(TOKENS, 4, extra_key, cache_salt, is_bigram) == wanted
    assert page_keys(RadixKey(TOKENS, extra_key, cache_salt, is_bigram), 4) == wanted


@given(
    tokens=st.lists(st.integers(0, MAX_TOKEN), max_size=70),
    page_size=st.integers(1, 20),
    extra_key=st.text(max_size=3),
    cache_salt=st.text(max_size=3),
    is_bigram=st.booleans(),
)
@settings(max_examples=150, derandomize=True, deadline=None)
def test_page_keys_follow_the_text(
    tokens: list[int], page_size: int, extra_key: str, cache_salt: str, is_bigram: bool
) -> None:
    """§10.1: any tokens, page size and namespace give the chain as the semantics tells it."""
    key = RadixKey(tokens, extra_key, cache_salt, is_bigram)
    wanted = chain(tokens, page_size, extra_key, cache_salt, is_bigram)
    assert page_keys(key, page_size) == wanted


@pytest.mark.parametrize("kind", INPUTS)
def test_b83_every_kind_of_input_gives_the_same_keys(kind: str) -> None:
    """B83: tokens are numbers, whatever they came in."""
    key = RadixKey(INPUTS[kind](TOKENS))
    assert key.tokens.tolist() == TOKENS
    assert page_keys(key, 4) == chain(TOKENS, 4)


@pytest.mark.parametrize("kind", NARROW_INPUTS)
def test_b83_narrow_inputs_give_the_same_keys(kind: str) -> None:
    """B83: also those whose type cannot hold every u32."""
    tokens = list(range(3, 40))
    key = RadixKey(NARROW_INPUTS[kind](tokens))
    assert key.tokens.tolist() == tokens
    assert page_keys(key, 4) == chain(tokens, 4)


def test_b83_other_processes_with_other_hash_seeds_agree() -> None:
    """B83: page keys do not depend on the process, nor on PYTHONHASHSEED."""
    script = (
        "import sys; from tiered_cache.keys import RadixKey\n"
        "key = RadixKey([0, 1, 2, 3, 4294967295, 5, 6, 7], cache_salt='tenant-1')\n"
        "print(*(page_key.hex() for page_key in key.page_keys(4)))\n"
    )
    for hash_seed in ("0", "4711"):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == chain(TOKENS, 4, cache_salt="tenant-1")


def test_the_default_namespace_is_the_plain_chain() -> None:
    """B81, §10.1: adding namespaces has not changed the keys of those who use none."""
    plain = RadixKey(TOKENS)
    for none in (None, ""):
        assert RadixKey(TOKENS, none, none).page_keys(4) == plain.page_keys(4)
        assert RadixKey(TOKENS, none, none).namespace == plain.namespace == Namespace()
    assert plain.page_keys(4)[0] == hashlib.sha256(struct.pack("<4I", *TOKENS[:4])).digest()


def test_extra_key_and_salt_are_not_interchangeable() -> None:
    """§10.1: the two parts are framed, so no pair of texts reads as another pair."""
    parts = [("a", ""), ("", "a"), ("ab", "c"), ("a", "bc"), ("a", "a"), ("aa", ""), ("\x00", "a")]
    first = {RadixKey(TOKENS, *pair).page_keys(4)[0] for pair in parts}
    assert len(first) == len(parts)


# --- lazy, in increments --------------------------------------------------------------------------


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pages were hashed, call by call."""
    calls: list[int] = []
    hash_pages = keys.hash_pages

    def counting(*args: Any, **kwargs: Any) -> list[bytes]:
        more = hash_pages(*args, **kwargs)
        calls.append(len(more))
        return more

    monkeypatch.setattr(keys, "hash_pages", counting)
    return calls


def test_nothing_is_hashed_until_asked_and_nothing_twice(hashed: list[int]) -> None:
    """§10.1: lazy, and a few more pages at a time, so that a loop is never held up."""
    key = RadixKey(range(100))
    key.extend([1, 2])
    assert hashed == []
    key.page_keys(10, 2)
    key.page_keys(10, 1)
    key.page_keys(10, 2)
    assert hashed == [2]
    key.page_keys(10, 5)
    assert hashed == [2, 3]
    assert page_keys(key, 10) == chain([*range(100), 1, 2], 10)
    assert sum(hashed) == 10


def test_increments_equal_the_whole(hashed: list[int]) -> None:
    """The chain goes on from what is remembered."""
    key = RadixKey(range(64), "x", is_bigram=True)
    for count in range(1, 9):
        assert page_keys(key, 7, count) == chain(list(range(64)), 7, "x", is_bigram=True)[:count]
    assert hashed == [1] * 8


def test_count_beyond_the_key_is_all_of_it() -> None:
    """A key has its whole pages and no more; none when shorter than a page."""
    assert len(RadixKey(range(33)).page_keys(16, 99)) == 2
    assert RadixKey(range(15)).page_keys(16) == []
    assert RadixKey(range(16), is_bigram=True).page_keys(16) == []
    assert RadixKey([], is_bigram=True).page_keys(1) == []


def test_another_page_size_starts_anew() -> None:
    """Keys of one page size are never mixed with those of another."""
    key = RadixKey(range(64))
    key.page_keys(16)
    assert page_keys(key, 8) == chain(list(range(64)), 8)
    assert page_keys(key, 16) == chain(list(range(64)), 16)
    with pytest.raises(ValueError, match="at least 1"):
        key.page_keys(0)


# --- growing and shrinking ------------------------------------------------------------------------


def test_append_extend_and_truncate_keep_the_chain_true(hashed: list[int]) -> None:
    """Keys already made stay as long as their tokens do, and go with them."""
    key = RadixKey(range(20))
    key.page_keys(4)
    for token in range(20, 26):
        key.append(token)
    assert (len(key), key.num_tokens) == (26, 26)
    key.extend(np.arange(26, 30))
    assert page_keys(key, 4) == chain(list(range(30)), 4)
    assert hashed == [5, 2]
    key.truncate(10)
    key.extend([7, 7, 7])
    tokens = [*range(10), 7, 7, 7]
    assert key.tokens.tolist() == tokens
    assert page_keys(key, 4) == chain(tokens, 4)
    assert hashed == [5, 2, 1]


def test_truncate_of_a_bigram_key_drops_the_page_whose_last_pair_is_gone() -> None:
    """A pair needs both tokens: n tokens are n − 1 units."""
    key = RadixKey(range(9), is_bigram=True)
    assert len(key) == 8
    key.page_keys(4)
    key.truncate(8)
    assert len(key) == 7
    key.append(99)
    tokens = [*range(8), 99]
    assert page_keys(key, 4) == chain(tokens, 4, is_bigram=True)


def test_a_snapshot_is_its_own() -> None:
    """Neither the key's changes nor its own reach the other; what was appended or hashed is in
    it."""
    key = RadixKey(range(8), "adapter")
    key.append(8)
    keys = key.page_keys(4)
    made = key.snapshot()
    key.truncate(4)
    key.extend([70, 71, 72, 73])
    assert made.tokens.tolist() == [*range(9)]
    assert (made.namespace, made.page_keys(4)) == (key.namespace, keys)
    made.append(9)
    assert key.tokens.tolist() == [0, 1, 2, 3, 70, 71, 72, 73]
    assert key.page_keys(4)[0] == keys[0]
    assert key.page_keys(4)[1] != keys[1]


def test_appended_tokens_are_seen_everywhere() -> None:
    """`append` is cheap because it waits with the copy; nobody can tell."""
    key = RadixKey([1, 2])
    key.append(3)
    assert (len(key), key.num_tokens) == (3, 3)
    assert key.span(2, 3).tolist() == [3]
    key.append(4)
    assert key.span(1, 4).tolist() == [2, 3, 4]
    assert key.tokens.tolist() == [1, 2, 3, 4]
    key.append(5)
    key.truncate(4)
    assert key.tokens.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("num_tokens", [-1, 4])
def test_truncate_refuses_what_is_not_there(num_tokens: int) -> None:
    """Nothing changes."""
    key = RadixKey([1, 2, 3])
    with pytest.raises(ValueError, match=f"cannot truncate to {num_tokens} tokens"):
        key.truncate(num_tokens)
    assert len(key) == 3


def test_the_callers_buffer_may_change_afterwards() -> None:
    """A key copies its tokens, and shows them read-only."""
    for buffer in (np.arange(8), torch.arange(8), array("q", range(8)), list(range(8))):
        key = RadixKey(buffer)
        buffer[3] = 77
        assert key.tokens.tolist() == list(range(8))
        assert not key.tokens.flags.writeable


# --- bad tokens -----------------------------------------------------------------------------------

LONG: Final = 10_000
"""Beyond the size up to which ranges are checked another way."""


@pytest.mark.parametrize("length", [4, LONG])
@pytest.mark.parametrize("token", [-1, 1 << 32, (1 << 63) - 1, -(1 << 63)])
@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        lambda tokens: array("q", tokens),
        lambda tokens: np.array(tokens, np.int64),
        lambda tokens: torch.tensor(tokens, dtype=torch.int64),
    ],
    ids=["list", "tuple", "array", "numpy", "torch"],
)
def test_a_token_outside_u32_is_named_with_its_position(
    make: Callable[[list[int]], Any], token: int, length: int
) -> None:
    """Every input type, at the start, in the middle and at the end; the first one is named."""
    for position in (0, length // 2, length - 1):
        tokens = [5] * length
        tokens[position] = token
        tokens[-1] = token
        with pytest.raises(
            ValueError, match=rf"token id {token} at position {position} is outside"
        ):
            RadixKey(make(tokens))


@pytest.mark.parametrize("token", [1 << 63, (1 << 64) - 1])
@pytest.mark.parametrize(
    "make",
    [
        list,
        lambda tokens: array("Q", tokens),
        lambda tokens: np.array(tokens, np.uint64),
        lambda tokens: torch.tensor(tokens, dtype=torch.uint64),
    ],
    ids=["list", "array", "numpy", "torch"],
)
def test_a_token_beyond_int64_is_named_too(make: Callable[[list[int]], Any], token: int) -> None:
    """It must not wrap around into a valid one."""
    with pytest.raises(ValueError, match=rf"token id {token} at position 2 is outside u32"):
        RadixKey(make([1, 2, token, token]))


@pytest.mark.parametrize("token", [1 << 70, -(1 << 70)])
def test_a_token_of_any_size_in_a_list_is_named(token: int) -> None:
    """Python's integers have no end."""
    with pytest.raises(ValueError, match=rf"token id {token} at position 1 is outside u32"):
        RadixKey([1, token])


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32])
def test_a_negative_token_of_a_narrow_type_is_named(dtype: Any) -> None:
    """Widening keeps the sign."""
    with pytest.raises(ValueError, match="token id -3 at position 1"):
        RadixKey(np.array([1, -3], dtype))
    with pytest.raises(ValueError, match="token id -3 at position 1"):
        RadixKey(torch.tensor([1, -3]).to(getattr(torch, np.dtype(dtype).name)))


def test_positions_count_from_the_keys_start() -> None:
    """`extend` and `append` name the place in the whole key, and change nothing when they fail."""
    key = RadixKey([1, 2])
    key.append(3)
    for bad in ([4, -1], np.array([4, -1]), torch.tensor([4, -1]), array("q", [4, -1])):
        with pytest.raises(ValueError, match="token id -1 at position 4"):
            key.extend(bad)
    with pytest.raises(ValueError, match="token id 4294967296 at position 3"):
        key.append(1 << 32)
    with pytest.raises(ValueError, match="token id -1 at position 3"):
        key.append(-1)
    assert key.tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, 2.0], "token at position 1 is a float"),
        ([1, None], "token at position 1 is a NoneType"),
        (["a"], "token at position 0 is a str"),
        ([[1, 2]], "token at position 0 is a list"),
        ("hello", "not str"),
        (b"hello", "not bytes"),
        (None, "not NoneType"),
        (7, "not int"),
        (np.array([1.0]), "integers, not float64"),
        (np.array([True]), "integers, not bool"),
        ([True, False], "integers, not bool"),
        (np.array([1, 2], object), "integers, not object"),
        (torch.tensor([1.0]), "integers, not float32"),
        (torch.tensor([True]), "integers, not bool"),
        (array("d", [1.0]), "integers, not float64"),
        ({1: "a"}, "not dict"),
        ({1, 2}, "not set"),
    ],
    ids=repr,
)
def test_what_is_not_a_sequence_of_integers_is_a_type_error(tokens: Any, message: str) -> None:
    """And says what it got; nothing is rounded, parsed or put in an order of its own."""
    with pytest.raises(TypeError, match=message):
        RadixKey(tokens)


@pytest.mark.parametrize(
    "tokens",
    [np.zeros((2, 3), np.int64), torch.zeros((1, 4), dtype=torch.int64), np.array(3)],
    ids=["numpy 2-D", "torch 2-D", "numpy 0-D"],
)
def test_one_key_is_one_sequence(tokens: Any) -> None:
    """A batch is not flattened silently."""
    with pytest.raises(ValueError, match="one-dimensional"):
        RadixKey(tokens)


@pytest.mark.parametrize("name", ["extra_key", "cache_salt"])
@pytest.mark.parametrize("value", [0, 7, b"", b"x", False, 1.5, ("a",), []], ids=repr)
def test_a_namespace_part_that_is_not_text_is_refused(name: str, value: Any) -> None:
    """§1.6: an adapter numbered 0 must not share what has no adapter, only because 0 is falsy."""
    with pytest.raises(TypeError, match=f"{name} must be a str or None"):
        RadixKey([1], **{name: value})


def test_a_namespace_that_cannot_be_encoded_is_refused() -> None:
    """An unpaired surrogate has no UTF-8."""
    with pytest.raises(ValueError, match="cache_salt is not valid Unicode"):
        RadixKey([1], cache_salt="\ud800")


# --- what a tree sees -----------------------------------------------------------------------------


@given(
    first=st.tuples(st.text("ab\x00", max_size=2), st.text("ab\x00", max_size=2), st.booleans()),
    second=st.tuples(st.text("ab\x00", max_size=2), st.text("ab\x00", max_size=2), st.booleans()),
    tokens=st.lists(st.integers(0, MAX_TOKEN), min_size=9, max_size=9),
    others=st.lists(st.integers(0, MAX_TOKEN), min_size=9, max_size=9),
    page_size=st.integers(1, 4),
    other_size=st.integers(1, 4),
)
@example(("", "", False), ("", "", True), [1] * 9, [1] * 9, 2, 1)
@settings(max_examples=200, derandomize=True, deadline=None)
def test_two_namespaces_never_meet_below_the_root(
    first: tuple[str, str, bool],
    second: tuple[str, str, bool],
    tokens: list[int],
    others: list[int],
    page_size: int,
    other_size: int,
) -> None:
    """§1.6, B81: no tokens of one namespace give a first page's key of another."""
    ours, theirs = RadixKey(tokens, *first), RadixKey(others, *second)
    if first == second:
        assert ours.root_prefix == theirs.root_prefix
        return
    assert ours.child_key(0, page_size) != theirs.child_key(0, other_size)
    assert ours.page_keys(page_size)[0] != theirs.page_keys(page_size)[0]


def test_root_prefixes_differ_in_length_or_first_byte() -> None:
    """What keeps them apart whatever the tokens are: only the default namespace has a key of whole
    tokens, and every other kind begins with a byte of its own."""
    prefixes = [
        RadixKey([1], extra_key, "", is_bigram).root_prefix
        for extra_key in ("", "x")
        for is_bigram in (False, True)
    ]
    assert prefixes[0] == b""
    assert all(len(prefix) % TOKEN_BYTES == 1 for prefix in prefixes[1:])
    assert len({prefix[0] for prefix in prefixes[1:]}) == 3


def test_a_child_key_is_the_first_page_of_the_child() -> None:
    """§2.6: with the namespace in front below the root, and the pair's second token for bigrams."""
    key = RadixKey(range(9))
    assert np.frombuffer(key.child_key(4, 4), np.int64).tolist() == [4, 5, 6, 7]
    assert np.frombuffer(key.child_key(0, 4), np.int64).tolist() == [0, 1, 2, 3]
    salted = RadixKey(range(9), cache_salt="s")
    assert salted.child_key(0, 4) == salted.root_prefix + key.child_key(0, 4)
    assert salted.child_key(4, 4) == key.child_key(4, 4)
    pairs = RadixKey(range(9), is_bigram=True)
    assert np.frombuffer(pairs.child_key(4, 4), np.int64).tolist() == [4, 5, 6, 7, 8]


@pytest.mark.parametrize(("tokens", "units"), [([], 0), ([1], 0), ([1, 2], 1), ([1, 2, 3], 2)])
def test_a_bigram_key_of_n_tokens_has_n_minus_1_units(tokens: list[int], units: int) -> None:
    """And keeps its tokens."""
    key = RadixKey(tokens, is_bigram=True)
    assert len(key) == units
    assert key.num_tokens == len(tokens)
    assert len(RadixKey(tokens)) == len(tokens)


def test_a_repr_shows_no_token_and_no_salt() -> None:
    """Prompts and secrets do not belong in logs."""
    key = RadixKey([123456, 654321], extra_key="adapter-x", cache_salt="secret")
    assert repr(key) == "RadixKey(2 tokens, own namespace)"
    assert repr(RadixKey([123456] * 3, is_bigram=True)) == "RadixKey(2 pairs, own namespace)"
    assert repr(RadixKey([])) == "RadixKey(0 tokens)"


# --- no loop over tokens --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["list", "array q", "array I", "numpy int64", "torch int64"])
def test_no_python_loop_over_tokens(kind: str) -> None:
    """Taking in 50 times as many tokens runs not one line of Python more."""
    few, many = INPUTS[kind](TOKENS * 10), INPUTS[kind](TOKENS * 500)

    def use(tokens: Any) -> None:
        key = RadixKey(tokens)
        key.extend(tokens)
        key.child_key(16, 16)
        len(key)

    assert lines_run(lambda: use(few)) == lines_run(lambda: use(many)) > 10


def lines_run(work: Callable[[], None]) -> int:
    """Lines that Python executes; each round of a loop counts.

    The garbage collector is off meanwhile: callbacks that others hang on it are Python, too.
    """
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return lines
