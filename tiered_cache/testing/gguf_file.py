"""What a GGUF file holds, and what it takes to make a transformers model of one.

Owns: reading values and tensors. Refuses to know: any architecture; `gguf_llama` and `gguf_gemma3`
are one each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedModel

CONTROL_TOKEN: Final = 3
"""A token's type in the file: never cut out of text by the vocabulary, and not shown."""

OWN_TOKEN: Final = 4
"""The same, but shown."""


OUTSIDE_BLOCKS: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}


def hf_name(name: str, in_block: Mapping[str, str]) -> str:
    """What transformers calls a tensor of the file; `in_block`: its names within a layer."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{in_block[parts[2]]}.weight"
    return OUTSIDE_BLOCKS[name]


class GgufFile:
    """A file, with its numbers as float32, whatever they were quantised to."""

    def __init__(self, path: Path) -> None:
        import gguf  # only the first start needs it

        self._reader: Any = gguf.GGUFReader(str(path))
        self._dequantize: Any = gguf.dequantize

    def value(self, name: str) -> Any:
        """What is written under a name. KeyError: nothing is."""
        return self._reader.fields[name].contents()

    def tensors(self) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        """Each in its own memory, under the file's names."""
        for tensor in self._reader.tensors:
            yield (tensor.name, self._dequantize(tensor.data, tensor.tensor_type).astype("float32"))

    def added_tokens(self) -> tuple[list[AddedToken], list[AddedToken]]:
        """What is found in text before anything else: control tokens, and others."""
        from tokenizers import AddedToken

        tokens = self.value("tokenizer.ggml.tokens")
        kinds = self.value("tokenizer.ggml.token_type")

        def of(wanted: int) -> list[AddedToken]:
            return [
                AddedToken(token, special=wanted == CONTROL_TOKEN, normalized=False)
                for token, kind in zip(tokens, kinds, strict=True)
                if kind == wanted
            ]

        return of(CONTROL_TOKEN), of(OWN_TOKEN)


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a file of one architecture becomes a transformers model.

    Attributes:
        config_class, model_class: their names in transformers.
        settings: of the configuration object.
        weights: the file's tensors under transformers' names, float32.
        tokenizer: as the file describes it.
        restore_buffers: gives a model, made on the meta device, the buffers that are not saved.
    """

    config_class: str
    model_class: str
    settings: Callable[[GgufFile], dict[str, Any]]
    weights: Callable[[GgufFile], Iterator[tuple[str, npt.NDArray[np.float32]]]]
    tokenizer: Callable[[GgufFile], Tokenizer]
    restore_buffers: Callable[[PreTrainedModel], None]
