"""One LoRA adapter from one data set: what `worker.train` runs."""
