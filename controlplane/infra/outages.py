"""The exceptions of servers that cannot be reached: the same work will succeed later."""

from django.db import InterfaceError, OperationalError
from redis.exceptions import RedisError

from controlplane.errors import Unavailable
from controlplane.infra.storage import STORAGE_ERRORS

DATABASE_OUTAGE = (OperationalError, InterfaceError)
#: Raised by the asyncio client. uvloop raises RuntimeError for a connection that was just closed.
REDIS_OUTAGE = (RedisError, OSError, RuntimeError)
#: Errors of the database and of the object store.
STORE_OUTAGE = (*DATABASE_OUTAGE, *STORAGE_ERRORS)


class DatabaseAway(Unavailable):
    """PostgreSQL cannot be reached; `controlplane.infra.circuit` finds out when it can."""

    def __init__(self) -> None:
        super().__init__("The database does not answer.", retry_after_s=2)
