"""The operator's own pages: health, the live pool, queues, dead letters, quarantine.

Each action has an address that describes the action on GET and does it on POST.
"""
