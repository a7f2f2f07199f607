"""Core ML: artifacts for Apple's machines, built and verified on any other."""
