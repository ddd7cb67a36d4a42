"""Many runs' LoRA adapters trained over one base: token ids in, adapters and metrics out.

Knows nothing of tenants' names, files or queues. Start reading at
`engine.training.trainer.BatchTrainer.step`; docs/training.md explains the batch.
"""
