"""Adapters: each connects the hooks of one engine to packed pages."""
