"""Adapters to the engines that hold models: each shows the way from its hooks to the paged cache."""
