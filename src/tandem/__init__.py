"""tandem: trains language models on preference pairs, in packed rows where all completions of a prompt share its tokens."""

__version__ = "0.1.0"
