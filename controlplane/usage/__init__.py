"""Usage, by request, hour and day."""
