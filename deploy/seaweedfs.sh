#!/bin/sh
# SeaweedFS with the S3 API for one identity: without identities everybody has all rights.
set -eu
umask 077
keys=${WEED_KEYS:-/keys}
id=${S3_ACCESS_KEY_ID:-$(cat "${S3_ACCESS_KEY_ID_FILE:-/dev/null}")}
secret=${S3_SECRET_ACCESS_KEY:-$(cat "${S3_SECRET_ACCESS_KEY_FILE:-/dev/null}")}
cat > /tmp/identities.json <<JSON
{"identities": [{"name": "lorikeet",
  "credentials": [{"accessKey": "$id", "secretKey": "$secret"}],
  "actions": ["Admin", "Read", "Write", "List", "Tagging"]}]}
JSON
# Its parts authenticate each other with a certificate, and with tokens signed by keys of this start:
# other containers reach the S3 part's gRPC port (18333), which would give everybody an identity.
export "WEED_GRPC_CA=$keys/cert.pem"
for part in MASTER VOLUME FILER S3 CLIENT; do
    export "WEED_GRPC_${part}_CERT=$keys/cert.pem" "WEED_GRPC_${part}_KEY=$keys/key.pem"
done
for name in SIGNING SIGNING_READ FILER_SIGNING FILER_SIGNING_READ; do
    export "WEED_JWT_${name}_KEY=$(od -An -tx1 -N32 /dev/urandom | tr -d ' \n')"
done
unset S3_ACCESS_KEY_ID S3_SECRET_ACCESS_KEY
# Its other parts listen only on this container's address, without HTTP: the filer's HTTP port would
# bypass S3's keys.
exec weed -logtostderr=true server -dir=/data -ip=127.0.0.1 -ip.bind=127.0.0.1 \
    -disableHttp -filer.disableHttp -master.telemetry=false \
    -s3 -s3.ip.bind=0.0.0.0 -s3.port=8333 -s3.config=/tmp/identities.json \
    -s3.port.iceberg=0 -s3.port.lance=0
