"""Events of a tenant for receivers outside, stored with the change that they describe."""
