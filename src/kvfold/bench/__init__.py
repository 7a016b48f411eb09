"""Benchmarks: speeds as ratios to the best alternative, measured in one run."""
