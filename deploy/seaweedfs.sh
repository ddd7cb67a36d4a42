#!/bin/sh
# SeaweedFS with the S3 API open to one identity: without identities anybody may do anything.
set -eu
umask 077
cat > /tmp/identities.json <<JSON
{"identities": [{"name": "lorikeet",
  "credentials": [{"accessKey": "$S3_ACCESS_KEY_ID", "secretKey": "$S3_SECRET_ACCESS_KEY"}],
  "actions": ["Admin", "Read", "Write", "List", "Tagging"]}]}
JSON
# The filer's own HTTP port is closed to other containers: it would pass by S3's keys.
exec weed -logtostderr=true server -dir=/data -ip=127.0.0.1 -ip.bind=127.0.0.1 \
    -s3 -s3.ip.bind=0.0.0.0 -s3.port=8333 -s3.config=/tmp/identities.json
