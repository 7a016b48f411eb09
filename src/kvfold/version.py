"""The version. Modules that `kvfold/__init__.py` imports read it from here."""

__version__ = "0.3.0"
