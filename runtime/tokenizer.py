"""The tokenizer of a bundle: ``tokenizer.json`` and ``tokenizer_config.json``, without Transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from specexport.runtime.chat import ChatTemplate
from specexport.runtime.detokenize import Detokenizer
from specexport.runtime.errors import BundleError, UsageError

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"

_MAX_BYTES = {TOKENIZER_FILE: 256 << 20, CONFIG_FILE: 16 << 20, TEMPLATE_FILE: 1 << 20}

#: Classes for which Transformers ignores the file's post-processor and adds the ends by two flags of the
#: configuration, with these defaults: (add_bos_token, add_eos_token).
_ENDS_BY_FLAGS = {
    name + suffix: (True, False)
    for name in ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer")
    for suffix in ("", "Fast")
}
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """Text to token ids and back, as Transformers' fast tokenizer of the same files does.

    Attributes:
        backend: the ``tokenizers.Tokenizer``. config: ``tokenizer_config.json`` ({} if absent).
        special_tokens: text of ``bos_token``, ``eos_token`` and the like, where the configuration names them.
        bos_id, eos_id: their ids, or None. vocab_size: highest token id + 1.
        template_source: text of the default chat template, or None.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, config: dict[str, Any], template_source: str | None = None
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.config = config
        self.special_tokens = {name: text for name in _NAMED_TOKENS if (text := _token_text(config, name)) is not None}
        self.bos_id = self._id_of("bos_token")
        self.eos_id = self._id_of("eos_token")
        size = backend.get_vocab_size(with_added_tokens=True)
        whole = backend.id_to_token(size - 1) is not None and backend.id_to_token(size) is None
        self.vocab_size = size if whole else max(backend.get_vocab().values(), default=-1) + 1
        if not self.vocab_size:
            raise BundleError(f"{TOKENIZER_FILE} has no tokens")
        self._ends = self._explicit_ends()
        self.template_source = _default_template(config) if template_source is None else template_source

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """The tokenizer of a bundle or a Hugging Face directory.

        Raises:
            BundleError: a file is missing, too large or not what it should be.
        """
        text = _read(path / TOKENIZER_FILE)
        if text is None:
            raise BundleError(f"{path / TOKENIZER_FILE} is missing: a bundle needs it; build the bundle again")
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except BaseException as error:  # the library's panics are no Exception
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise BundleError(f"{path / TOKENIZER_FILE} is not a tokenizer: {_one_line(error)}") from error
        config: Any = {}
        if (text := _read(path / CONFIG_FILE)) is not None:
            try:
                config = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise BundleError(f"{path / CONFIG_FILE} is not JSON: {_one_line(error)}") from error
        if not isinstance(config, dict):
            raise BundleError(f"{path / CONFIG_FILE} must hold an object, got {type(config).__name__}")
        return cls(backend, config, _read(path / TEMPLATE_FILE))

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of ``text``. Special tokens written in the text become their ids.

        Args:
            add_special: also add the ends the model was trained with (usually a bos). Not for a rendered chat
                template, which writes them itself.

        Raises:
            UsageError: ``text`` is not valid Unicode (a lone surrogate).
        """
        by_file = add_special and self._ends is None
        try:
            ids: list[int] = self.backend.encode(text, add_special_tokens=by_file).ids
        except (UnicodeError, TypeError) as error:
            raise UsageError("the text cannot be tokenized: it is not valid Unicode, give it as UTF-8") from error
        if add_special and self._ends is not None:
            return [*self._ends[0], *ids, *self._ends[1]]
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ``ids``; ids without a token have no text."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def detokenizer(self, *, skip_special: bool = True) -> Detokenizer:
        """A fresh incremental detokenizer; its text adds up to :meth:`decode`."""
        return Detokenizer(self.backend, skip_special=skip_special)

    def chat_template(self) -> ChatTemplate:
        """The default chat template, ready to render.

        Raises:
            UsageError: there is none. BundleError: it is not valid.
        """
        if self.template_source is None:
            raise UsageError("this model has no chat template: give the prompt as plain text")
        return ChatTemplate(self.template_source, self.special_tokens)

    def _id_of(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        if text is None:
            return None
        token_id: int | None = self.backend.token_to_id(text)
        if token_id is None:
            raise BundleError(f"{CONFIG_FILE}: {name} {text!r} is not a token of {TOKENIZER_FILE}")
        return token_id

    def _explicit_ends(self) -> tuple[list[int], list[int]] | None:
        defaults = _ENDS_BY_FLAGS.get(str(self.config.get("tokenizer_class")))
        if defaults is None:
            return None
        ends: list[list[int]] = []
        for name, token_id, default in zip(("bos", "eos"), (self.bos_id, self.eos_id), defaults, strict=True):
            wanted = self.config.get(f"add_{name}_token")
            if not (default if wanted is None else wanted):
                ends.append([])
            elif token_id is None:
                raise BundleError(f"{CONFIG_FILE}: add_{name}_token is on, but there is no {name}_token")
            else:
                ends.append([token_id])
        return ends[0], ends[1]


def _token_text(config: dict[str, Any], name: str) -> str | None:
    value = config.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise BundleError(f"{CONFIG_FILE}: {name} must be a text or null, got {str(value)[:60]!r}")
    return value


def _default_template(config: dict[str, Any]) -> str | None:
    """``chat_template`` is a text, or a list of named ones of which ``default`` counts."""
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        if "default" not in named:
            raise BundleError(
                f"{CONFIG_FILE}: none of the chat templates is named 'default': {sorted(map(str, named))}"
            )
        value = named["default"]
    if value is not None and not isinstance(value, str):
        raise BundleError(f"{CONFIG_FILE}: chat_template must be a text, got {type(value).__name__}")
    return value


def _read(path: Path) -> str | None:
    """The text of a file within its size limit; None if it does not exist."""
    limit = _MAX_BYTES[path.name]
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > limit:
        raise BundleError(f"{path} is larger than {limit >> 20} MiB")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BundleError(f"{path} is not UTF-8: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
