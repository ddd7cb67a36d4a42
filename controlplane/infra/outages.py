"""What servers, and the ways to them, raise while they are away: the same work will do later."""

from django.db import InterfaceError, OperationalError
from redis.exceptions import RedisError

from controlplane.infra.storage import STORAGE_ERRORS

DATABASE_OUTAGE = (OperationalError, InterfaceError)
#: Of asyncio's client. uvloop says RuntimeError of a connection that was cut a moment ago.
REDIS_OUTAGE = (RedisError, OSError, RuntimeError)
#: Of what rows and their objects are kept in.
STORE_OUTAGE = (*DATABASE_OUTAGE, *STORAGE_ERRORS)
