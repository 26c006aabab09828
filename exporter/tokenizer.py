"""Everything textual that a bundle needs: tokenizer, chat template, generation defaults and the stop ids."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from specexport.exporter.checkpoint import Checkpoint, read_text
from specexport.exporter.gguf_tokenizer import frame, gguf_tokenizer
from specexport.exporter.shards import member, parse_json, read_json
from specexport.runtime.errors import CheckpointError

_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")
# Transformers sets bos and eos for these classes from tokenizer_config.json, whatever tokenizer.json says.
_FRAMED_CLASSES = frozenset({"LlamaTokenizer", "LlamaTokenizerFast", "GemmaTokenizer", "GemmaTokenizerFast"})
_NO_LIMIT = 1 << 31  # Transformers writes 1e30 for "no limit"
# GGUF files of chat models often name only eos; a turn's end is then told by the template that writes it.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What goes into a bundle.

    Attributes:
        tokenizer_json: a ``tokenizers`` file, without truncation or padding. Encoding with special tokens adds bos and
            eos as the model expects.
        tokenizer_config: ``bos_token``, ``eos_token``, ``pad_token``, ``unk_token`` (text or None) and each
            ``..._id``; ``add_bos_token`` and ``add_eos_token`` (what encoding really does); ``special_tokens``
            (text to id); ``model_max_length`` (tokens, or None).
        chat_template: Jinja source, or None for a base model.
        generation_config: the checkpoint's defaults, as they are.
        stop_ids: every id that ends a text, ascending.
        vocab_size: ids the tokenizer can give are below this. Rows of the model from here on are padding, which the
            runtime must never sample.
        pad_rows: how many those are.
    """

    tokenizer_json: bytes
    tokenizer_config: dict[str, Any]
    chat_template: str | None
    generation_config: dict[str, Any]
    stop_ids: tuple[int, ...]
    vocab_size: int
    pad_rows: int


def collect_tokenizer(checkpoint: Checkpoint, override: Path | None = None) -> TokenizerFiles:
    """Gather the tokenizer of ``checkpoint``.

    Args:
        override: a ``tokenizer.json``, or a directory that holds one (its ``tokenizer_config.json`` and chat template
            are then used too), instead of the checkpoint's own.

    Raises:
        CheckpointError: no tokenizer, a damaged one, or ids beyond the rows of the model.
    """
    rows = checkpoint.config.get("vocab_size")
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise CheckpointError(f"config: vocab_size must be a positive integer, got {str(rows)[:40]}")
    folder = override if override is not None and override.is_dir() else None
    raw = (_read(folder, "tokenizer_config.json") if folder else checkpoint.json("tokenizer_config.json")) or {}
    if override is not None:
        tokenizer = _load(_override(override), raw)
    elif checkpoint.gguf is not None:
        tokenizer = gguf_tokenizer(checkpoint.gguf)
        raw = _gguf_config(checkpoint.gguf.metadata)
    else:
        path = checkpoint.file("tokenizer.json")
        if path is None:
            raise CheckpointError(
                f"{checkpoint.directory}: no tokenizer.json; write one with transformers' "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...), and pass it with --tokenizer"
            )
        tokenizer = _load(path, raw)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer = _within(tokenizer, rows)
    size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    template = (_template_of(folder, raw) if folder else None) or _template(checkpoint, raw)
    generation = checkpoint.json("generation_config.json") or {}
    config = _config(tokenizer, raw)
    return TokenizerFiles(
        tokenizer_json=tokenizer.to_str().encode(),
        tokenizer_config=config,
        chat_template=template,
        generation_config=generation,
        # An id in the padding is never sampled, so it ends nothing.
        stop_ids=tuple(end for end in _stop_ids(checkpoint, config, generation, template, rows) if end < size),
        vocab_size=size,
        pad_rows=rows - size,
    )


def _override(path: Path) -> Path:
    found = path / "tokenizer.json" if path.is_dir() else path
    if not found.is_file():
        raise CheckpointError(f"--tokenizer {path}: no tokenizer.json there")
    return found


def _read(folder: Path, name: str) -> dict[str, Any] | None:
    path = member(folder, name)
    return None if path is None else read_json(path)


def _load(path: Path, raw: Mapping[str, Any]) -> Tokenizer:
    """``tokenizer.json`` with what Transformers adds to it from ``tokenizer_config.json``."""
    tokenizer = _parse(read_text(path), str(path))
    for key, value in sorted(_objects(raw.get("added_tokens_decoder")).items(), key=lambda item: str(item[0]).zfill(9)):
        content = value.get("content")
        if not isinstance(content, str) or not key.isdecimal():
            raise CheckpointError(f"{path.parent}: added_tokens_decoder entry {key[:40]!r} is not an id with a content")
        if tokenizer.token_to_id(content) is None:
            flags = {
                flag: bool(value.get(flag)) for flag in ("special", "normalized", "lstrip", "rstrip", "single_word")
            }
            tokenizer.add_tokens([AddedToken(content, **flags)])
        if tokenizer.token_to_id(content) != int(key):
            raise CheckpointError(
                f"{path.parent}: tokenizer_config.json gives {content!r} the id {key}, tokenizer.json the id "
                f"{tokenizer.token_to_id(content)}"
            )
    if str(raw.get("tokenizer_class")) in _FRAMED_CLASSES:
        bos = _content(raw.get("bos_token")) if raw.get("add_bos_token", True) else None
        eos = _content(raw.get("eos_token")) if raw.get("add_eos_token", False) else None
        for token in (bos, eos):
            if token is not None and tokenizer.token_to_id(token) is None:
                raise CheckpointError(f"{path}: has no token {token!r}, which tokenizer_config.json names")
        frame(tokenizer, bos, eos)
    return tokenizer


def _parse(text: str, where: str) -> Tokenizer:
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{where}: not a tokenizers file ({str(error)[:120]})") from None


def _within(tokenizer: Tokenizer, rows: int) -> Tokenizer:
    """Drop added tokens that have no row in the model (Gemma 3's text models keep the image token of their siblings).

    Raises:
        CheckpointError: an ordinary token has none.
    """
    if all(index < rows for index in tokenizer.get_vocab(with_added_tokens=True).values()):
        return tokenizer
    for token, index in tokenizer.get_vocab(with_added_tokens=False).items():
        if index >= rows:
            raise CheckpointError(f"token {token!r} has id {index} but the model has {rows} rows; not its tokenizer")
    data = parse_json(tokenizer.to_str().encode(), "tokenizer.json")
    data["added_tokens"] = [token for token in data["added_tokens"] if token["id"] < rows]
    return _parse(json.dumps(data, ensure_ascii=False), "tokenizer.json")


def _config(tokenizer: Tokenizer, raw: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for key in _NAMED:
        content = _content(raw.get(key))
        index = None if content is None else tokenizer.token_to_id(content)
        config[key] = None if index is None else content
        config[f"{key}_id"] = index
    framed = tokenizer.encode("", add_special_tokens=True).ids
    config["add_bos_token"] = bool(framed) and framed[0] == config["bos_token_id"]
    rest = framed[1:] if config["add_bos_token"] else framed
    config["add_eos_token"] = bool(rest) and rest[-1] == config["eos_token_id"]
    added = tokenizer.get_added_tokens_decoder()
    config["special_tokens"] = {token.content: index for index, token in sorted(added.items()) if token.special}
    limit = raw.get("model_max_length")
    config["model_max_length"] = int(limit) if isinstance(limit, (int, float)) and 0 < limit < _NO_LIMIT else None
    return config


def _gguf_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    raw: dict[str, Any] = {}
    for key, name in zip(_NAMED, ("bos", "eos", "padding", "unknown"), strict=True):
        index = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(index, int) and 0 <= index < len(tokens):
            raw[key] = tokens[index]
    raw["chat_template"] = metadata.get("tokenizer.chat_template")
    return raw


def _template(checkpoint: Checkpoint, raw: Mapping[str, Any]) -> str | None:
    if checkpoint.gguf is None:
        return _template_of(checkpoint.directory, raw)
    return _named_template(checkpoint.gguf.metadata.get("tokenizer.chat_template"))


def _template_of(folder: Path, raw: Mapping[str, Any]) -> str | None:
    """A file of its own wins over the entry in ``tokenizer_config.json``, as in Transformers."""
    if (path := member(folder, "chat_template.jinja")) is not None:
        return read_text(path)
    if (data := _read(folder, "chat_template.json")) is not None:
        return _named_template(data.get("chat_template"))
    return _named_template(raw.get("chat_template"))


def _named_template(value: Any) -> str | None:
    if isinstance(value, list):  # several templates: {"name", "template"}
        named = [entry for entry in value if isinstance(entry, dict) and entry.get("name") == "default"]
        value = named[0].get("template") if named else None
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"chat_template must be text or a list of named texts, got {type(value).__name__}")
    return value


def _stop_ids(
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    template: str | None,
    rows: int,
) -> tuple[int, ...]:
    found: set[int] = set()
    for where, value in (
        ("generation_config.json", generation.get("eos_token_id")),
        ("config.json", checkpoint.config.get("eos_token_id")),
        ("the tokenizer", config["eos_token_id"]),
        *_gguf_ends(checkpoint),
    ):
        for index in value if isinstance(value, list) else [value]:
            if index is None:
                continue
            if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < rows:
                raise CheckpointError(f"{where}: eos_token_id {str(index)[:40]} is not an id below {rows}")
            found.add(index)
    if checkpoint.gguf is not None and template is not None:
        ends = (config["special_tokens"].get(token) for token in _TURN_ENDS if token in template)
        found |= {index for index in ends if index is not None}
    return tuple(sorted(found))


def _gguf_ends(checkpoint: Checkpoint) -> Iterable[tuple[str, Any]]:
    metadata = checkpoint.gguf.metadata if checkpoint.gguf is not None else {}
    for name in ("eos", "eot", "eom"):
        yield f"tokenizer.ggml.{name}_token_id", metadata.get(f"tokenizer.ggml.{name}_token_id")


def _content(value: Any) -> str | None:
    """A token in ``tokenizer_config.json`` is its text, or an object that holds it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _objects(value: Any) -> dict[str, dict[str, Any]]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(entry, dict) for entry in value.values()):
        raise CheckpointError("tokenizer_config.json: added_tokens_decoder must map ids to objects")
    return value
