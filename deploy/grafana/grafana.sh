#!/bin/sh
# Start Grafana with the password that init made, and without calls to its maker.
set -eu
export GF_SECURITY_ADMIN_PASSWORD__FILE="$GRAFANA_PASSWORD_FILE"
export GF_USERS_ALLOW_SIGN_UP=false GF_AUTH_ANONYMOUS_ENABLED=false
export GF_LOG_MODE=console GF_PLUGINS_PREINSTALL_DISABLED=true
export GF_ANALYTICS_REPORTING_ENABLED=false GF_ANALYTICS_CHECK_FOR_UPDATES=false
export GF_ANALYTICS_CHECK_FOR_PLUGIN_UPDATES=false GF_NEWS_NEWS_FEED_ENABLED=false
export GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH=/etc/grafana/dashboards/lorikeet.json
exec /run.sh
