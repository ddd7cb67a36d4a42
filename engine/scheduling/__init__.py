"""Which sequences the next step carries, and the pages they need for it."""
