"""How numbers become codes: a module for each decode rule, and the optimal levels and centroids they use."""
