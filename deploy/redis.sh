#!/bin/sh
# Redis with a password, and data files that only it can read. The configuration comes through
# standard input, so that the password is not in the process list.
set -eu
umask 077
cd /data
chmod 700 .
password=${REDIS_PASSWORD:-$(cat "${REDIS_PASSWORD_FILE:-/dev/null}")}
# Remove files of a killed rewrite, and snapshots of an earlier version: they may contain prompts.
rm -f temp-*.aof temp-*.rdb
if [ -e appendonly.aof ]; then chmod 600 appendonly.aof; rm -f dump.rdb; fi
# Limit the data to two thirds of the container's memory; rewriting the file needs the rest. Redis then
# refuses writes, and clients get an error, before the kernel kills the server.
limit=$(cat /sys/fs/cgroup/memory.max 2>/dev/null \
    || cat /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null || echo max)
# No limit is a word, or a number with more digits than memory has bytes.
case $limit in
    *[!0-9]* | ????????????????*) most=0 ;;
    *) most=$((limit * 2 / 3)) ;;
esac
exec docker-entrypoint.sh redis-server - <<CONF
requirepass $password
# Streams have accepted work: write it to disk each second, never evict it.
appendonly yes
appendfsync everysec
save ""
maxmemory $most
maxmemory-policy noeviction
# No RDB preamble: the rewritten file would contain deleted entries of streams.
aof-use-rdb-preamble no
CONF
