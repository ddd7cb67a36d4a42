"""What the control plane, the workers and the engine agree on; standard library only."""
