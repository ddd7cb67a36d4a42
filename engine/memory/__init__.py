"""Pages: who holds them, which prefixes they keep, and what gives way when they run out."""
