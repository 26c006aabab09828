"""Rebuilding a ``tokenizers.Tokenizer`` from the vocabulary in a GGUF file.

Two kinds of model are known. ``gpt2``: byte-level BPE, whose pre-tokenizer GGUF stores only as a name
(``tokenizer.ggml.pre``), so only names whose expression is known are accepted. ``llama``: SentencePiece BPE, stored as
scores; merging the pair of the best score first is BPE with merges ranked by the score of what they make.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from specexport.exporter.gguf_file import GgufFile
from specexport.runtime.errors import CheckpointError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_MAX_PIECE = 512  # characters of a piece whose splits are tried: real ones have under 100

_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TAIL_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_LLAMA3 = rf"{_WORD}|\p{{N}}{{1,3}}{_TAIL}"
_GPT4O = rf"{_LEAD}{_UPPER}*{_LOWER}+{_SUFFIX}?|{_LEAD}{_UPPER}+{_LOWER}*{_SUFFIX}?|\p{{N}}{{1,3}}{_TAIL_SLASH}"
_TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}{_TAIL_SLASH}"

# tokenizer.ggml.pre: the expression that splits before GPT-2's byte alphabet is applied.
_SPLITS = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": rf"{_WORD}|\p{{N}}{_TAIL}",
    "deepseek-r1-qwen": rf"{_WORD}|\p{{N}}{_TAIL}",
    "gpt-4o": _GPT4O,
    "tekken": _TEKKEN,
}
_WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})  # a word that is a token is not merged
_BOS_BY_DEFAULT = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
_NFC = frozenset({"qwen2"})
_PRES = (*_SPLITS, "smollm", "gpt-2")


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer of ``file``, adding bos and eos where its metadata says so.

    Raises:
        CheckpointError: no vocabulary, an inconsistent one, or a kind that cannot be rebuilt exactly.
    """
    vocab = _Vocabulary(file)
    if vocab.model == "gpt2":
        tokenizer = _byte_level(vocab)
    elif vocab.model == "llama":
        tokenizer = _sentencepiece(vocab)
    else:
        raise vocab.error(f"a tokenizer of model {str(vocab.model)[:40]!r} is not rebuilt (gpt2 and llama are)")
    rstrip = vocab.rstrip_specials()
    added = [
        AddedToken(token, normalized=False, special=kind == _CONTROL, rstrip=kind == _CONTROL and token in rstrip)
        for token, kind in zip(vocab.tokens, vocab.kinds.tolist(), strict=True)
        if token and (kind in (_CONTROL, _USER_DEFINED) or (kind == _UNKNOWN and vocab.model == "llama"))
    ]
    # Specials and others in the order of their ids, each list in one call: they are thousands.
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])
    if tokenizer.get_vocab_size() != len(vocab.tokens):
        raise vocab.error("its special tokens do not keep their ids")
    bos = vocab.flag("add_bos_token", vocab.model == "llama" or vocab.pre in _BOS_BY_DEFAULT)
    frame(tokenizer, vocab.token("bos") if bos else None, vocab.token("eos") if vocab.flag("add_eos_token") else None)
    return tokenizer


def frame(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make ``encode(..., add_special_tokens=True)`` put ``bos`` before the text and ``eos`` after it."""
    ids = {token: tokenizer.token_to_id(token) for token in (bos, eos) if token is not None}
    single = [token for token in (bos, "$A", eos) if token is not None]
    pair = [f"{token}:0" for token in single] + [f"{t}:1" for t in (bos, "$B", eos) if t is not None]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[f"{token}:0" for token in single], pair=pair, special_tokens=list(ids.items())
    )


class _Vocabulary:
    def __init__(self, file: GgufFile) -> None:
        self.file, self.metadata = file, file.metadata
        self.model = self.metadata.get("tokenizer.ggml.model")
        self.pre = self.metadata.get("tokenizer.ggml.pre")
        self.tokens: list[str] = self.metadata.get("tokenizer.ggml.tokens", [])
        kinds = self.metadata.get("tokenizer.ggml.token_type", np.full(len(self.tokens), _NORMAL))
        if not isinstance(self.tokens, list) or not self.tokens or not isinstance(kinds, np.ndarray):
            raise self.error("no tokenizer vocabulary")
        if len(kinds) != len(self.tokens) or len(set(self.tokens)) != len(self.tokens):
            raise self.error("its token list has duplicates, or not one type for each")
        self.kinds: np.ndarray[Any, Any] = kinds

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, bool):
            raise self.error(f"tokenizer.ggml.{key} is {str(value)[:40]}, expected true or false")
        return value

    def token(self, key: str) -> str | None:
        index = self.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is None:
            return None
        if not isinstance(index, int) or not 0 <= index < len(self.tokens):
            raise self.error(f"tokenizer.ggml.{key}_token_id is {str(index)[:40]}, not a token")
        return self.tokens[index]

    def rstrip_specials(self) -> frozenset[str]:
        """Special tokens that swallow the white space after them. GGUF does not say; Phi-3's are known."""
        if self.metadata.get("general.architecture") != "phi3" or self.model != "llama":
            return frozenset()
        return frozenset(self.tokens) - {"<unk>", "<s>", "<|endoftext|>"}

    def error(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path}: {reason}; pass the original with --tokenizer")


def _byte_level(vocab: _Vocabulary) -> Tokenizer:
    if vocab.pre not in _PRES:
        raise vocab.error(f"the pre-tokenizer {str(vocab.pre)[:40]!r} is not one of {', '.join(_PRES)}")
    merges = vocab.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise vocab.error("has no tokenizer.ggml.merges")
    pairs = []
    for merge in merges:
        # A piece may hold a space only at its start, which the byte alphabet never makes: the middle one divides.
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise vocab.error(f"the merge {merge[:40]!r} is not two pieces")
        pairs.append((left, right))
    ids = {token: index for index, token in enumerate(vocab.tokens)}
    if bad := next((p for p in pairs if not {p[0], p[1], p[0] + p[1]} <= ids.keys()), None):
        raise vocab.error(f"the merge {bad!r} is of pieces that are no tokens")
    tokenizer = Tokenizer(models.BPE(ids, pairs, ignore_merges=vocab.pre in _WHOLE_WORDS))
    if vocab.pre in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    if vocab.pre in _SPLITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLITS[vocab.pre]), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, gpt2]) if vocab.pre == "smollm" else gpt2
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocab: _Vocabulary) -> Tokenizer:
    if vocab.flag("remove_extra_whitespaces") or "tokenizer.ggml.precompiled_charsmap" in vocab.metadata:
        raise vocab.error("its text normalisation is not rebuilt")
    scores = vocab.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(vocab.tokens) or not np.isfinite(scores).all():
        raise vocab.error("needs one score a token")
    ids = {token: index for index, token in enumerate(vocab.tokens)}
    unknown = vocab.token("unknown")
    tokenizer = Tokenizer(
        models.BPE(ids, _merges(vocab, ids, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    space = normalizers.Replace(" ", "▁")
    tail = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocab.flag("add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
        tokenizer.decoder = decoders.Sequence([*tail, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = space
        tokenizer.decoder = decoders.Sequence(tail)
    return tokenizer


def _merges(vocab: _Vocabulary, ids: dict[str, int], scores: np.ndarray[Any, Any]) -> list[tuple[str, str]]:
    """Every way to make a normal piece of two others, best score first.

    Among the splits of one piece the longer left part goes first, as in the converters of Transformers, whose
    ``tokenizer.json`` files this is to equal.
    """
    ranked = []
    normal = {token for token, kind in zip(vocab.tokens, vocab.kinds.tolist(), strict=True) if kind == _NORMAL}
    for token in normal:
        if not 1 < len(token) <= _MAX_PIECE:
            continue
        score = float(scores[ids[token]])
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                ranked.append((-score, -cut, ids[token], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]
