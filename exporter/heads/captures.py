"""Which states of the target an EAGLE-3 head reads: two conventions of layer ids, resolved to boundaries.

Boundary b is the residual stream entering layer b (b == n: leaving the last layer, before the final norm). *Boundary*
ids are those (speculators, vLLM); *layer-output* ids name the layer that the stream leaves, one less (SpecForge,
DeepSpec). A capture off by one costs nearly all acceptance and no error, so what cannot be told apart is refused.
"""

from __future__ import annotations

from specexport.exporter.heads.base import OVERRIDES, Keys, both
from specexport.runtime.errors import CheckpointError

_FIX = f'say which with HEADS?captures=A,B,C (boundaries), or "{OVERRIDES}": {{"captures": [..]}} in its config.json'
_LIMIT = 1024


def resolve_captures(
    explicit: tuple[int, ...] | None,
    boundaries: tuple[int, ...] | None,
    outputs: tuple[int, ...] | None,
    unsure: tuple[int, ...] | None,
    layers: int | None,
) -> tuple[int, ...]:
    """Boundaries, ascending.

    Args:
        explicit: boundaries that the user wrote; they settle everything.
        boundaries, outputs: ids of a dialect with one convention. ``unsure``: of ``eagle_config``, which has both.
        layers: n, the target's layers, None where unknown.

    Raises:
        CheckpointError: ids that contradict or can be read in two ways, or none and n unknown.
    """
    readings = []
    if boundaries is not None:
        readings.append(boundaries)
    if outputs is not None:
        readings.append(tuple(i + 1 for i in outputs))
    if unsure is not None:
        readings.append(_tell(unsure, layers, explicit))
    if explicit is not None:
        readings = [explicit]
    if not readings:
        if layers is None:
            raise both(
                "a head without capture ids and with no target",
                "the boundaries (2, n // 2, n - 3) of a target of n layers, EAGLE-3's default",
                "other layers that its training chose",
                f"name the target (--target) for the first, or {_FIX}",
            )
        readings.append((2, layers // 2, layers - 3))
    if any(reading != readings[0] for reading in readings):
        raise both("the capture ids", f"boundaries {list(readings[0])}", f"boundaries {list(readings[1])}", _FIX)
    found = readings[0]
    if list(found) != sorted(set(found)) or found[0] < 0 or (layers is not None and found[-1] > layers):
        limit = "" if layers is None else f" to {layers}, the layers of the target"
        raise CheckpointError(
            f"config: captures resolve to the boundaries {list(found)}; they must ascend from 0{limit}; {_FIX}"
        )
    return found


def _tell(ids: tuple[int, ...], layers: int | None, explicit: tuple[int, ...] | None) -> tuple[int, ...]:
    """``eagle_config`` ids: SGLang takes them as layer outputs if the first is 1; known targets tell the rest."""
    shifted = tuple(i + 1 for i in ids)
    if explicit is not None:
        return explicit
    if ids[0] == 1:
        return shifted
    if layers is not None:
        usual = (2, layers // 2, layers - 3)
        if ids[-1] == layers or ids == usual:  # no layer has the index n
            return ids
        if shifted == usual:
            return shifted
    raise both(
        f"eagle_aux_hidden_state_layer_ids {list(ids)}",
        f"boundaries {list(ids)} (vLLM, gpt-oss heads)",
        f"layer outputs, boundaries {list(shifted)} (SpecForge)",
        _FIX + ("" if layers is not None else ", or name the target (--target), which may tell"),
    )


def read_ids(keys: Keys, key: str) -> tuple[int, ...] | None:
    """A list of layer ids; -1 is the embedding as a layer output."""
    return keys.integers(key, -1, _LIMIT)
