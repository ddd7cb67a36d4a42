"""A batch as tensors, and the forward pass over it: on the CPU, on a GPU, as recorded graphs."""
