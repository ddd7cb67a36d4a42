#!/bin/sh
# Redis with a password, and data files that only it can read. The configuration comes through
# standard input, so that the password is not in the process list.
set -eu
umask 077
cd /data
chmod 700 .
# Remove files of a killed rewrite, and snapshots of an earlier version: they may contain prompts.
rm -f temp-*.aof temp-*.rdb
if [ -e appendonly.aof ]; then chmod 600 appendonly.aof; rm -f dump.rdb; fi
exec docker-entrypoint.sh redis-server - <<CONF
requirepass $REDIS_PASSWORD
# Streams have accepted work: write it to disk each second, never evict it.
appendonly yes
appendfsync everysec
save ""
maxmemory-policy noeviction
# No RDB preamble: the rewritten file would contain deleted entries of streams.
aof-use-rdb-preamble no
CONF
