"""Give the first operator of an installation a link to choose a password."""

from __future__ import annotations

from allauth.account.adapter import get_adapter
from allauth.account.forms import default_token_generator
from allauth.account.utils import user_pk_to_url_str

from controlplane.errors import Conflict
from controlplane.tenants import services
from controlplane.tenants.models import User


def first_operator(email: str) -> User | None:
    """Return an operator without a password; None if another operator has one.

    If there is no operator, make one with this address. Raises Conflict if it is a member's.
    """
    operators = list(User.objects.filter(is_staff=True, is_active=True).order_by("date_joined"))
    if not operators:
        if User.objects.filter(email=email.strip().lower()).exists():
            raise Conflict(f"{email} is a tenant's member: choose another address for the operator")
        return services.user_create(email=email, password=None, is_operator=True, is_proven=True)
    waiting = [user for user in operators if not user.has_usable_password()]
    return waiting[0] if len(waiting) == len(operators) else None


def password_link(user: User) -> str:
    """Return the URL of a page that sets the person's password; it works once.

    It expires after Django's PASSWORD_RESET_TIMEOUT, three days.
    """
    key = f"{user_pk_to_url_str(user)}-{default_token_generator.make_token(user)}"
    address: str = get_adapter().get_reset_password_from_key_url(key)
    return address
