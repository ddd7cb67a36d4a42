"""Trains one LoRA adapter on one data set; `worker.train` runs it."""
