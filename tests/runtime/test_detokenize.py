"""Concatenated deltas equal the full decode, for every decoder family, any ids and any split into blocks."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from specexport.runtime.detokenize import _BYTES, Detokenizer

SAMPLES = [
    "Hello world, it's a test. Don't stop!",
    "naïve café — “quotes” … ÀÉÎ",
    "日本語のテキスト 中文字符 한국어",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈 flag 👍🏽 e\u0301",
    "\n\n  indent\ttab  \r\n",
    "Здравствуй мир עברית العربية",
]


def add_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(["<s>", "</s>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("日本", special=False), "é!"])
    return tokenizer


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(SAMPLES * 3, trainer)
    return add_tokens(tokenizer)


SPM_VOCAB = [
    *("<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "<0x+A>"),
    *(
        "▁",
        "▁▁",
        "▁▁▁",
        "▁Hello",
        "▁world",
        "lo",
        "H",
        "▁t",
        "e",
        "s",
        "t",
        "。",
        "日",
        "本",
        "▁日",
        "é",
        "👍",
        ".",
        "a▁b",
    ),
]


def spm(decoder: decoders.Decoder) -> Tokenizer:
    vocab = {token: i for i, token in enumerate(dict.fromkeys(SPM_VOCAB))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoder
    return add_tokens(tokenizer)


def llama() -> Tokenizer:
    return spm(
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    )


def gemma() -> Tokenizer:
    return spm(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))


def word_piece() -> Tokenizer:
    words = [
        "[UNK]",
        "hello",
        "##lo",
        "##s",
        "do",
        "not",
        "n't",
        "'s",
        "'",
        "'m",
        "##'m",
        ".",
        ",",
        "!",
        "?",
        "##.",
        "é",
        "日",
        "##本",
        "i",
    ]
    tokenizer = Tokenizer(models.WordPiece(vocab={word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return add_tokens(tokenizer)


def bpe_suffix() -> Tokenizer:
    words = ["<unk>", "hel", "lo</w>", "world</w>", "a", "b</w>", "日</w>", "</w>"]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    return add_tokens(tokenizer)


def without_decoder() -> Tokenizer:
    return add_tokens(Tokenizer(models.WordLevel({"a": 0, "b": 1, "日本": 2, "[UNK]": 3}, unk_token="[UNK]")))


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "llama": llama,
    "gemma": gemma,
    "metaspace": lambda: spm(decoders.Metaspace()),
    "metaspace-never": lambda: spm(decoders.Metaspace(prepend_scheme="never")),
    "byte-fallback-metaspace": lambda: spm(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
    "strip-3": lambda: spm(decoders.Sequence([decoders.Fuse(), decoders.Strip("▁", 3, 0)])),
    "sequence-byte-level": lambda: spm(decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 2, 0)])),
    "word-piece": word_piece,
    "bpe-suffix": bpe_suffix,
    "none": without_decoder,
    "unknown-regex": lambda: spm(decoders.Sequence([decoders.Replace(Regex("l+"), "L"), decoders.Fuse()])),
    "unknown-ctc": lambda: spm(decoders.CTC(pad_token="e", word_delimiter_token="t")),
    "unknown-fused-replace": lambda: spm(decoders.Sequence([decoders.Fuse(), decoders.Replace("lo", "X")])),
    "unknown-strip-each": lambda: spm(decoders.Sequence([decoders.Strip("e", 1, 0), decoders.Fuse()])),
}
TOKENIZERS = {name: build() for name, build in FAMILIES.items()}


def deltas(tokenizer: Tokenizer, ids: list[int], sizes: list[int], **options: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    pieces, at = [], 0
    for size in sizes:
        pieces.append(detokenizer.push(ids[at : at + size]))
        at += size
    pieces.append(detokenizer.push(ids[at:]))
    pieces.append(detokenizer.flush())
    assert detokenizer.flush() == ""
    return pieces


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=120, deadline=None)
@given(
    numbers=st.lists(st.integers(0, 10_000), max_size=40),
    sizes=st.lists(st.integers(0, 4), max_size=20),
    skip=st.booleans(),
)
@example(numbers=[], sizes=[], skip=True)
def test_any_ids_in_any_split(family: str, numbers: list[int], sizes: list[int], skip: bool) -> None:
    tokenizer = TOKENIZERS[family]
    ids = [number % (tokenizer.get_vocab_size() + 2) for number in numbers]  # two of them unknown
    full = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(deltas(tokenizer, ids, sizes, skip_special=skip)) == full
    assert "".join(deltas(tokenizer, ids, [1] * len(ids), skip_special=skip)) == full


@pytest.mark.parametrize("family", ["llama", "gemma", "byte-fallback-metaspace"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_runs_of_bytes(family: str, data: st.DataObject) -> None:
    """Byte tokens that are valid, cut off, or broken by one byte, between other tokens."""
    tokenizer = TOKENIZERS[family]
    ids: list[int] = []
    for _ in range(data.draw(st.integers(1, 4))):
        raw = bytearray(data.draw(st.text(max_size=4)).encode())
        if raw and data.draw(st.booleans()):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        ids += [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in raw]
        ids += data.draw(
            st.lists(st.sampled_from([tokenizer.token_to_id("▁Hello"), tokenizer.token_to_id("<s>")]), max_size=2)
        )
    assert "".join(deltas(tokenizer, ids, [1] * len(ids))) == tokenizer.decode(ids)


@settings(max_examples=300, deadline=None)
@given(raw=st.binary(max_size=24), sizes=st.lists(st.integers(0, 3), max_size=24))
@example(raw=b"\xf0\x9f\x91", sizes=[1, 1])
@example(raw=b"\xed\xa0\x80\xe2\x28\xa1\xf4\x90\x80\x80", sizes=[1] * 10)
def test_invalid_bytes_at_byte_level(raw: bytes, sizes: list[int]) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    alphabet = {byte: character for character, byte in _BYTES.items()}
    ids = [tokenizer.token_to_id(alphabet[byte]) for byte in raw]
    assert "".join(deltas(tokenizer, ids, sizes)) == tokenizer.decode(ids) == raw.decode(errors="replace")


@pytest.mark.parametrize("family", ["byte-level", "llama", "gemma"])
def test_no_early_replacement_character(family: str) -> None:
    tokenizer = TOKENIZERS[family]
    for text in SAMPLES:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if family == "byte-level":
            assert tokenizer.decode(ids) == text
        elif "<unk>" in (tokenizer.id_to_token(i) for i in ids):
            continue
        pieces = deltas(tokenizer, ids, [1] * len(ids))
        assert "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize("family", ["byte-level", "llama", "gemma", "metaspace", "word-piece", "none"])
def test_text_streams(family: str) -> None:
    """Nothing is held longer than needed: plain words arrive with their tokens."""
    tokenizer = TOKENIZERS[family]
    word = {"word-piece": "hello", "none": "a", "byte-level": "H"}.get(family, "▁Hello")
    pieces = deltas(tokenizer, [tokenizer.token_to_id(word)] * 5, [1] * 5)
    assert all(pieces[:5]) and not any(pieces[5:])


def test_push_after_flush_is_refused() -> None:
    detokenizer = Detokenizer(TOKENIZERS["llama"])
    detokenizer.flush()
    with pytest.raises(ValueError, match="flushed"):
        detokenizer.push([1])


def test_work_is_linear() -> None:
    """Each token is looked up once, however long the sequence."""
    tokenizer = TOKENIZERS["byte-level"]
    detokenizer = Detokenizer(tokenizer)
    lookups = 0

    def counting(token: int) -> str | None:
        nonlocal lookups
        lookups += 1
        return tokenizer.id_to_token(token)

    detokenizer._token_of = counting
    rng = random.Random(0)
    held = 0
    for _ in range(5000):
        detokenizer.push([rng.randrange(250)])
        held = max(held, len(detokenizer._stage._stages[0]._decoder.getstate()[0]))  # type: ignore[attr-defined]
    assert lookups == 5000
    assert held <= 3
