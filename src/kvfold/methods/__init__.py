"""One small file per method: a `Recipe` subclass whose docstring names the paper and the formula."""
