"""What schedules changed last night: as a page, as JSON, and as one event of a tenant."""
