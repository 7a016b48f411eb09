"""The operations on packed pages. `naive.py` defines each op. The other modules compute the same faster."""
