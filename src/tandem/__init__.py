"""tandem: preference training on packed, prefix-shared sequences."""

__version__ = "0.1.0"
