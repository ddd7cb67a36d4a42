"""Pages of an organization, its members, and their sign-in."""
