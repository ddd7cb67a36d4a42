"""Sign-in: allauth's flows in the console's design, with the platform's own rules.

`adapters` has the hooks that allauth calls, `provider` an OpenID Connect issuer, `guessing` the
limits of wrong passwords; `controlplane.tenants.second_factor` decides who needs a second factor.
"""
