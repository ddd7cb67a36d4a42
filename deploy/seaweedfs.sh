#!/bin/sh
# SeaweedFS with the S3 API open to one identity: without identities anybody may do anything.
set -eu
umask 077
cat > /tmp/identities.json <<JSON
{"identities": [{"name": "lorikeet",
  "credentials": [{"accessKey": "$S3_ACCESS_KEY_ID", "secretKey": "$S3_SECRET_ACCESS_KEY"}],
  "actions": ["Admin", "Read", "Write", "List", "Tagging"]}]}
JSON
# Its parts know each other by a certificate, and by tokens signed with keys of this start: the S3
# part's gRPC port (18333) is open to other containers, and would make whoever asks an identity.
export WEED_GRPC_CA=/keys/cert.pem
for part in MASTER VOLUME FILER S3 CLIENT; do
    export "WEED_GRPC_${part}_CERT=/keys/cert.pem" "WEED_GRPC_${part}_KEY=/keys/key.pem"
done
for name in SIGNING SIGNING_READ FILER_SIGNING FILER_SIGNING_READ; do
    export "WEED_JWT_${name}_KEY=$(od -An -tx1 -N32 /dev/urandom | tr -d ' \n')"
done
unset S3_ACCESS_KEY_ID S3_SECRET_ACCESS_KEY
# Its other parts listen on this container's own address alone, without HTTP: that of the filer
# would pass by S3's keys.
exec weed -logtostderr=true server -dir=/data -ip=127.0.0.1 -ip.bind=127.0.0.1 \
    -disableHttp -filer.disableHttp -master.telemetry=false \
    -s3 -s3.ip.bind=0.0.0.0 -s3.port=8333 -s3.config=/tmp/identities.json \
    -s3.port.iceberg=0 -s3.port.lance=0
