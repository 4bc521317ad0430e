"""The states of linear layers, from the attributes by which Hugging Face configs describe them.

Families are told apart by their attributes, not by a model's name. Shapes are those in which
transformers keeps the states, without the batch: of a convolution `[channels, kernel]` in the
model's type, of the recurrence in float32.
"""

from __future__ import annotations

from typing import Any, Final

Shapes = dict[str, tuple[int, ...]]

STATE_SIZE: Final = ("mamba_d_state", "ssm_state_size", "state_size")
KERNEL: Final = ("mamba_d_conv", "conv_kernel")


def layer_states(text: Any, dtype: str | None) -> list[dict[str, Any]] | None:
    """`model.states`; None: no family that is known here."""
    if getattr(text, "number_of_conv_states", 1) != 1:
        return None
    dtypes = {"conv": {} if dtype is None else {"dtype": dtype}, "temporal": {"dtype": "float32"}}
    for family in (_delta_rule, _kimi_delta, _mamba2, _mamba, _short_conv):
        if shapes := family(text):
            return [
                {"name": name, "row_shape": shape, **dtypes[name]} for name, shape in shapes.items()
            ]
    return None


def _numbers(text: Any, *names: str | tuple[str, ...]) -> list[int] | None:
    """One number for each name, or for the first of several names that is there; None: not all."""
    found = []
    for group in names:
        aliases = (group,) if isinstance(group, str) else group
        values = [getattr(text, name, None) for name in aliases]
        number = next((value for value in values if isinstance(value, int)), None)
        if number is None:
            return None
        found.append(number)
    return found


def _delta_rule(text: Any) -> Shapes | None:
    """Gated delta rule: Qwen3-Next, Qwen3.5, OLMo-Hybrid."""
    numbers = _numbers(
        text,
        *("linear_num_key_heads", "linear_key_head_dim"),
        *("linear_num_value_heads", "linear_value_head_dim", "linear_conv_kernel_dim"),
    )
    if numbers is None:
        return None
    key_heads, key_dim, value_heads, value_dim, kernel = numbers
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return {"conv": (channels, kernel), "temporal": (value_heads, key_dim, value_dim)}


def _kimi_delta(text: Any) -> Shapes | None:
    """Kimi's delta attention: keys and values have the same heads."""
    numbers = _numbers(text, "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    if numbers is None:
        return None
    heads, dim, kernel = numbers
    return {"conv": (3 * heads * dim, kernel), "temporal": (heads, dim, dim)}


def _mamba2(text: Any) -> Shapes | None:
    """Mamba2, which has heads: Bamba, Falcon-H1, Granite, Nemotron-H, Zamba2."""
    numbers = _numbers(
        text,
        ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads"),
        ("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim"),
        ("mamba_n_groups", "mamba_ngroups", "n_groups"),
        *(STATE_SIZE, KERNEL),
    )
    if numbers is None:
        return None
    heads, dim, groups, state_size, kernel = numbers
    channels = heads * dim + 2 * groups * state_size
    return {"conv": (channels, kernel), "temporal": (heads, dim, state_size)}


def _mamba(text: Any) -> Shapes | None:
    """Mamba, which has none: Jamba."""
    numbers = _numbers(text, "hidden_size", ("mamba_expand", "expand"), STATE_SIZE, KERNEL)
    if numbers is None:
        return None
    hidden, expand, state_size, kernel = numbers
    return {"conv": (hidden * expand, kernel), "temporal": (hidden * expand, state_size)}


def _short_conv(text: Any) -> Shapes | None:
    """Short convolutions alone: LFM2."""
    numbers = _numbers(text, "hidden_size", "conv_L_cache")
    return None if numbers is None else {"conv": (numbers[0], numbers[1])}
