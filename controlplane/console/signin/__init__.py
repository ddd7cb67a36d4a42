"""Sign-in: allauth's flows in the console's look, with the platform's own rules.

What allauth asks its adapters is answered in `adapters`; an OpenID Connect issuer is `provider`;
who needs a second factor is decided in `second_factor`.
"""
