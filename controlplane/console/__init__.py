"""The web console for the people of tenants, with sign-in."""
