"""The version, apart from the package, so that modules which the package imports can read it."""

__version__ = "0.2.0.dev0"
