"""Tuning: a budget of bytes, split over layers, keys and values by what each choice costs this model."""
