"""The Batch API: files of requests, run on what interactive requests leave."""
