#!/bin/sh
# The database and its three roles. The image runs this once, when it makes the cluster.
#   lorikeet           owns the tables; only migrations connect as it
#   lorikeet_app       all other connections: reads and writes rows of one tenant at a time
#   lorikeet_operator  no connections; the other two switch to it for work across tenants
# Their passwords are variables, or the content of files that NAME_FILE names.
set -eu
owner=${POSTGRES_OWNER_PASSWORD:-$(cat "${POSTGRES_OWNER_PASSWORD_FILE:-/dev/null}")}
app=${POSTGRES_APP_PASSWORD:-$(cat "${POSTGRES_APP_PASSWORD_FILE:-/dev/null}")}
# In psql's own environment: a list of processes would show what is on its command line.
OWNER="$owner" APP="$app" psql --username "${PGUSER:-${POSTGRES_USER:-postgres}}" -v ON_ERROR_STOP=1 <<'SQL'
\getenv owner OWNER
\getenv app APP
create role lorikeet login password :'owner';
create role lorikeet_app login noinherit password :'app';
create role lorikeet_operator nologin;
grant lorikeet_operator to lorikeet, lorikeet_app;
create database lorikeet owner lorikeet;
SQL
