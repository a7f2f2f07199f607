"""A runtime for ssmd in plain numpy: attention and Mamba-1."""
