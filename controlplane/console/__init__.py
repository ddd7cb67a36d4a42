"""The web console for tenants' people, with sign-in."""
