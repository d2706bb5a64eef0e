"""One file a scheme family: modules that run a layer from its compressed tensors."""
