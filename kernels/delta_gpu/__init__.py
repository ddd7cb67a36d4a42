"""The gated delta net on a GPU; the reference is `kernels.delta`."""
