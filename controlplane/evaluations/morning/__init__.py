"""The changes that schedules made last night: as a page, as JSON, and as one event."""
