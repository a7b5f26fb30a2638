"""The version of this package, which is that of the workspace."""

__version__ = "0.1.0"
