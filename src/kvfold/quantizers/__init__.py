"""How numbers become codes: a module per decode rule, and the optimal levels and centroids they use."""
