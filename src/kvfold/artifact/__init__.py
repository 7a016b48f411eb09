"""Artifacts: what calibration found for one model, as a folder with kvfold.json and tensors.safetensors."""

from kvfold.artifact.artifact import MEANS, TEXT, Artifact
from kvfold.artifact.check_results import CheckResult, Measure
from kvfold.artifact.fingerprint import Fingerprint, digest_model
from kvfold.artifact.metadata import SCHEMA, Metadata, Provenance

__all__ = [
    "MEANS",
    "SCHEMA",
    "TEXT",
    "Artifact",
    "CheckResult",
    "Fingerprint",
    "Measure",
    "Metadata",
    "Provenance",
    "digest_model",
]
