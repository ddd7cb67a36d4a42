#!/bin/sh
# Redis with a password, and a file that only it may read. The configuration comes through standard
# input, so that the password is in no list of processes.
set -eu
umask 077
cd /data
chmod 700 .
# What a killed rewrite left, and snapshots of an earlier version: prompts may be in them.
rm -f temp-*.aof temp-*.rdb
if [ -e appendonly.aof ]; then chmod 600 appendonly.aof; rm -f dump.rdb; fi
exec docker-entrypoint.sh redis-server - <<CONF
requirepass $REDIS_PASSWORD
# Streams hold accepted work: written to disk each second, never evicted.
appendonly yes
appendfsync everysec
save ""
maxmemory-policy noeviction
# Without: what was deleted from a stream would be in the file that is written anew.
aof-use-rdb-preamble no
CONF
