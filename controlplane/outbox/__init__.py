"""Events of a tenant that somebody outside may want to know, stored with the change they tell."""
