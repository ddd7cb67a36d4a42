"""What was used, by request and by day."""
