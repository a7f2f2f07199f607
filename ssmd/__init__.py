"""ssmd: an on-device inference daemon for state-space and hybrid language models that never re-reads a conversation."""

__version__ = "0.1.0"
