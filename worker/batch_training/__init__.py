"""Many training jobs over one base in one batch: what `worker.train_many` runs."""
