#!/bin/sh
# The database and its three roles. The image runs this once, when it makes the cluster.
#   lorikeet           owns the tables; only migrations connect as it
#   lorikeet_app       all other connections: reads and writes rows of one tenant at a time
#   lorikeet_operator  no connections; the other two switch to it for work across tenants
set -eu
psql -v ON_ERROR_STOP=1 -v owner="$POSTGRES_OWNER_PASSWORD" -v app="$POSTGRES_APP_PASSWORD" <<'SQL'
create role lorikeet login password :'owner';
create role lorikeet_app login noinherit password :'app';
create role lorikeet_operator nologin;
grant lorikeet_operator to lorikeet, lorikeet_app;
create database lorikeet owner lorikeet;
SQL
