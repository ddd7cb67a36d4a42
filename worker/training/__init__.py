"""Trains LoRA adapters of one base, one or many in a batch; `worker.train` runs it."""
