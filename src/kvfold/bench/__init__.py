"""Measurements on this machine: the `*_times` modules are the commands of `kvfold bench`, `selftest` is one of its own.

Speeds are ratios to the best alternative in the same run. Nothing is timed before it is verified.
"""
