"""The operator's own pages: the live pool, queues, dead letters, quarantine, and what they sum up.

Each action has an address that shows with GET what it would do, and does it on POST.
"""
