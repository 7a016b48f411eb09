"""Tiny models, as fixtures."""

import pytest
import tiny_models


@pytest.fixture
def tiny():
    """Makes a model of a class by its name, with options added to its configuration."""
    return tiny_models.tiny


@pytest.fixture(params=tiny_models.ARCHITECTURES)
def architecture(request):
    """(name, layout, rotary_dim) of each class."""
    return request.param, *tiny_models.ARCHITECTURES[request.param][1:]


@pytest.fixture
def text():
    """Makes n random tokens."""
    return tiny_models.random_tokens
