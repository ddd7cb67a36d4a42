"""Messages between the control plane and workers, and the calls of tools inside them."""
