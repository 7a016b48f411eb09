"""The operations on packed pages. `naive.py` defines an op; what stands beside it computes the same thing faster."""
