"""Decode rules: how numbers become codes and metadata, and back. One module per rule of `layout.Rule`."""
