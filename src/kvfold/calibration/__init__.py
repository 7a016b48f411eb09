"""Calibration: what recipes need to know about a model, from a short text."""

from kvfold.calibration.fit import calibrate

__all__ = ["calibrate"]
