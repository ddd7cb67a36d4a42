#!/bin/sh
# As far as our compose file relies on it, what the official image's docker-entrypoint.sh does.
set -e
if [ "$1" = redis-server ] && [ "$(id -u)" = 0 ]; then
    find . \! -user redis -exec chown redis '{}' +
    exec setpriv --reuid=redis --regid=redis --clear-groups "$0" "$@"
fi
exec "$@"
