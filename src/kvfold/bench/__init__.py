"""Measurements on this machine. `*_times` are the commands of `kvfold bench`, and `selftest` is `kvfold selftest`.

Speeds are ratios to the best alternative in the same run. Nothing is timed before it is verified.
"""
