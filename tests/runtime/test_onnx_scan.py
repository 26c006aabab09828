from __future__ import annotations

from pathlib import Path

import pytest

from specexport.runtime import onnx_scan
from specexport.runtime.errors import BundleError
from specexport.runtime.onnx_scan import ExternalData, external_data
from tests.runtime.graphs import FIRST, PLACES, SECOND, external, model


@pytest.mark.parametrize("place", PLACES)
def test_scan_finds_external_data_wherever_it_may_be(place: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(PLACES[place]())
    found = sorted(external_data(path), key=lambda record: record.location)
    assert found == [ExternalData("a", 0, 4), ExternalData("b", 4, None)]


def _varint(value: int) -> bytes:
    out = b""
    while value >= 128:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _deep() -> bytes:
    content = b""
    for _ in range(1000):  # graph > node > attribute > graph
        content = _field(1, _field(5, _field(6, content)))
    return _field(7, content)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"not a model", "not a valid ONNX file"),
        (_field(2, b"producer"), "no graph in it"),
        (model(external())[:-3], "truncated"),
        (b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "truncated: a field of 18446744073709551615 bytes"),
        (b"\x3a" + b"\xff" * 11, "more than 64 bits"),
        (b"\x3b", "wire type 3"),
        (b"\x02\x00", "field number 0"),
        (_field(7, b"") * 2, "field 7 of a model occurs twice"),
        (_deep(), "nested more than"),
        (_field(7, _field(5, _field(13, _field(1, b"location") + _field(2, b"x" * 5000)))), "entry of 5000 bytes"),
        (_field(7, _field(5, _field(13, _field(1, b"location") + _field(2, b"\xff")))), "not UTF-8"),
        (_field(7, _field(5, _field(13, _field(1, b"location")) * 2)), "keys location, location"),
    ],
)
def test_refuses_malformed_graphs(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(BundleError, match=message):
        external_data(path)


def test_scan_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(_field(7, _field(1, b"") * 1000))
    assert external_data(path) == []
    monkeypatch.setattr(onnx_scan, "MAX_FIELDS", 999)
    with pytest.raises(BundleError, match="more than 999 fields"):
        external_data(path)


def test_refuses_every_truncation_or_finds_the_same(tmp_path: Path) -> None:
    """No prefix of a graph may hide a tensor's place: it is refused unless it ends before the graph."""
    whole = model(FIRST, SECOND)
    path = tmp_path / "m.onnx"
    for size in range(1, len(whole)):
        path.write_bytes(whole[:size])
        try:
            assert len(external_data(path)) == 2
        except BundleError:
            continue
