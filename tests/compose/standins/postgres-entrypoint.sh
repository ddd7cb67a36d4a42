#!/bin/bash
# As far as our compose file relies on it, what the official image's docker-entrypoint.sh does.
set -Eeo pipefail
read_file() {
    local file="$1_FILE"
    if [ -n "${!file:-}" ]; then export "$1=$(cat "${!file}")"; unset "$file"; fi
}
read_file POSTGRES_PASSWORD
export POSTGRES_USER="${POSTGRES_USER:-postgres}"
mkdir -p "$PGDATA"
chmod 00700 "$PGDATA" || :
mkdir -p /var/run/postgresql || :
if [ "$(id -u)" = 0 ]; then
    chown -R postgres "$PGDATA" /var/run/postgresql
    exec setpriv --reuid=postgres --regid=postgres --clear-groups "$BASH_SOURCE" "$@"
fi
if [ ! -s "$PGDATA/PG_VERSION" ]; then
    if [ -z "$POSTGRES_PASSWORD" ]; then
        echo "Error: Database is uninitialized and superuser password is not specified." >&2
        exit 1
    fi
    initdb --username="$POSTGRES_USER" --pwfile=<(printf '%s\n' "$POSTGRES_PASSWORD") -D "$PGDATA"
    printf '\nhost all all all scram-sha-256\n' >> "$PGDATA/pg_hba.conf"
    export PGPASSWORD="${PGPASSWORD:-$POSTGRES_PASSWORD}"
    pg_ctl -D "$PGDATA" -o "-c listen_addresses='' -p 5432" -w start
    for file in /docker-entrypoint-initdb.d/*.sh; do
        if [ -x "$file" ]; then "$file"; else . "$file"; fi
    done
    pg_ctl -D "$PGDATA" -m fast -w stop
    unset PGPASSWORD
fi
exec "$@"
