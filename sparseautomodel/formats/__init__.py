"""One file a storage format: decoded to dense or to compressed-tensors, and encoded."""
