"""The frame that the speculators library writes around every head (https://github.com/vllm-project/speculators)."""

from __future__ import annotations

from specexport.exporter.config_values import text
from specexport.exporter.heads.base import Keys
from specexport.exporter.heads.record import HeadLineage
from specexport.runtime.errors import CheckpointError


def read_lineage(keys: Keys, kind: str) -> HeadLineage:
    """Take the frame's keys and return the verifier it names.

    Args:
        kind: what ``speculators_model_type`` must be, given the tensors.

    Raises:
        CheckpointError: another kind, or a frame that is not understood.
    """
    said = keys.need("speculators_model_type")
    if said != kind:
        raise CheckpointError(
            f"{keys.where}: speculators_model_type is {text(said)} but the tensors are those of {kind}"
        )
    keys.ignore("speculators_version", "has_no_defaults_at_init")
    frame = keys.object("speculators_config")
    if frame is None:
        return HeadLineage()
    algorithm = frame.take("algorithm", kind)
    if algorithm != kind:
        raise CheckpointError(f"{frame.where}: algorithm is {text(algorithm)} but the tensors are those of {kind}")
    # How many tokens to propose and how to accept them is this project's own choice, made at build and run time.
    frame.ignore("proposal_methods", "default_proposal_method")
    verifier = frame.object("verifier")
    frame.finish()
    if verifier is None:
        return HeadLineage()
    name = verifier.string("name_or_path")
    names = verifier.take("architectures", [])
    if not isinstance(names, list) or not all(isinstance(item, str) for item in names):
        raise CheckpointError(f"{verifier.where}: architectures must be a list of names, got {text(names)}")
    verifier.finish()
    return HeadLineage(name, names[0] if names else None)
