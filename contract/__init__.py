"""Types and rules that control plane, workers and engine share; standard library only."""
