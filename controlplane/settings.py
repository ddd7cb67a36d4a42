"""All settings of the control plane; no other file of it reads the environment."""

import logging
import os
from pathlib import Path
from urllib.parse import urlsplit

import dj_database_url
from django.core.exceptions import ImproperlyConfigured

from contract.process.child_environment import child_environment
from contract.process.log_lines import log_uncaught
from contract.training.daily_window import DailyWindow
from contract.training.gpu_share import trainer_gpu_share
from controlplane.beat import beat_schedule
from controlplane.gateway.rest.framework import REST_FRAMEWORK, SPECTACULAR_SETTINGS  # noqa: F401
from controlplane.infra.logs import WrongSetting, logging_config
from controlplane.infra.mail import email_settings
from controlplane.infra.outbound.outbound_policy import hub_endpoint, outbound_policy
from controlplane.infra.variables import Variables
from controlplane.tenancy.database.patient import PatientConnection
from controlplane.tenancy.scope import add_tenant

BASE_DIR = Path(__file__).resolve().parent.parent

_variables = Variables(os.environ)
env, env_bool, env_number = _variables.text, _variables.flag, _variables.number

DEBUG = env_bool("LORIKEET_DEBUG", False)
#: Trainer and beat need neither, and Compose does not give them. Django raises when an empty
#: SECRET_KEY is used; without a pepper there is no such setting, and its use raises, too.
SECRET_KEY = env("LORIKEET_SECRET_KEY", "")
if _pepper := env("LORIKEET_KEY_PEPPER", ""):
    #: Key of the HMAC over API key secrets, and of stored encrypted values.
    API_KEY_PEPPER = _pepper
#: Other peppers under which stored values are still read: docs/backup.md says how to change one.
ACCEPTED_PEPPERS = [
    pepper.strip() for pepper in env("LORIKEET_ACCEPTED_PEPPERS", "").split(",") if pepper.strip()
]
BASE_URL = env("LORIKEET_BASE_URL", "http://127.0.0.1:8000").rstrip("/")
#: 127.0.0.1 is for the health check.
ALLOWED_HOSTS = [
    *env("LORIKEET_ALLOWED_HOSTS", f"{urlsplit(BASE_URL).hostname},localhost").split(","),
    "127.0.0.1",
]
CSRF_TRUSTED_ORIGINS = [BASE_URL]
#: Proxies whose X-Forwarded-For and X-Forwarded-Proto are trusted: addresses and networks.
FORWARDED_ALLOW_IPS = env("FORWARDED_ALLOW_IPS", "")
#: Most connections of one address, or IPv6 network of 64 bits; 0: no limit.
MAX_CONNECTIONS_PER_ADDRESS = env_number("LORIKEET_MAX_CONNECTIONS_PER_ADDRESS", 1000)
#: Seconds for which browsers use only https, after one answer by https.
HSTS_S = 365 * 24 * 3600

INSTALLED_APPS = [
    "unfold.apps.BasicAppConfig",
    "unfold.contrib.filters",
    "controlplane.operator.apps.OperatorConfig",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django.contrib.humanize",
    "django_htmx",
    "controlplane.console.signin",  # before allauth, whose templates it replaces
    "allauth",
    "allauth.account",
    "allauth.mfa",
    "allauth.socialaccount",
    "allauth.usersessions",
    "rest_framework",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "controlplane.tenancy.database",
    "controlplane.events.audit",
    "controlplane.events.outbox",
    "controlplane.tenants",
    "controlplane.operator.service_keys",
    "controlplane.adapters",
    "controlplane.aliases",
    "controlplane.inference",
    "controlplane.requestlog",
    "controlplane.queue",
    "controlplane.usage.limits",
    "controlplane.training",
    "controlplane.training.primitives",
    "controlplane.evaluations.inspections",
    "controlplane.evaluations",
    "controlplane.evaluations.morning",
    "controlplane.deletion",
    "controlplane.files",
    "controlplane.files.batches",
    "controlplane.gateway.fine_tuning",
    "controlplane.usage",
    "controlplane.webhooks",
    "controlplane.console",
    "controlplane.maintenance",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "controlplane.tenancy.away.DatabaseAwayMiddleware",
    "controlplane.events.audit.origin.AuditOriginMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "allauth.account.middleware.AccountMiddleware",
    "controlplane.console.headers.ConsoleMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
    "controlplane.tenancy.scoping.OperatorScopeMiddleware",
]

ROOT_URLCONF = "controlplane.urls"
ASGI_APPLICATION = "controlplane.asgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        # Before the apps' folders, because it replaces a template of unfold's.
        "DIRS": [BASE_DIR / "controlplane" / "operator" / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

# A pool and persistent connections exclude each other; under ASGI only the pool is bounded.
DATABASE_POOL_SIZE = env_number("DATABASE_POOL_SIZE", 0)
MAX_DATABASE_AWAY_S = 600
#: Time for which gateways use cached keys, models and limits while PostgreSQL is away.
DATABASE_AWAY_S = env_number("LORIKEET_DATABASE_AWAY_S", 30.0, 0, MAX_DATABASE_AWAY_S)
DATABASES = {
    "default": dj_database_url.parse(
        env("DATABASE_URL"),
        engine="controlplane.tenancy.database",
        conn_max_age=0,
        # Later statements fetch such a cursor's rows, and may have another scope.
        disable_server_side_cursors=True,
    )
}
# Timeouts for a server that does not answer, and for the locks of a process that hangs in a
# transaction. DATABASE_URL may set others.
DATABASES["default"]["OPTIONS"] = {
    "connect_timeout": 10,
    "keepalives_idle": 20,
    "keepalives_interval": 5,
    "keepalives_count": 4,
    "tcp_user_timeout": 40_000,
    "options": "-c idle_in_transaction_session_timeout=60s",
    **DATABASES["default"].get("OPTIONS", {}),
}
#: The role for all connections except migrations; it owns nothing.
DATABASE_APPLICATION_ROLE = DATABASES["default"]["USER"]
#: The owner of the tables; only `manage.py migrate` connects as this role.
DATABASE_OWNER = dj_database_url.parse(env("DATABASE_OWNER_URL", "") or env("DATABASE_URL"))
if DATABASE_OWNER["NAME"] != DATABASES["default"]["NAME"]:
    raise ImproperlyConfigured("DATABASE_OWNER_URL and DATABASE_URL name two databases")
if DATABASE_POOL_SIZE:
    # Else a connection that died in a restart of PostgreSQL would fail its next request.
    DATABASES["default"]["CONN_HEALTH_CHECKS"] = True
    DATABASES["default"]["OPTIONS"]["pool"] = {
        "min_size": 1,
        "max_size": DATABASE_POOL_SIZE,
        "timeout": 10,
        # A failed attempt is repeated for this time; then the next request makes a new one. The
        # default, five minutes, has pauses in which the pool does not see that the server is back.
        "reconnect_timeout": 1,
        "connection_class": PatientConnection,
    }

DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
AUTH_USER_MODEL = "tenants.User"
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator"},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
LOGIN_URL = "/console/sign-in"
LOGIN_REDIRECT_URL = "/console/"
LOGOUT_REDIRECT_URL = LOGIN_URL

#: Allauth is used only to sign in: no form makes an account.
ACCOUNT_ADAPTER = "controlplane.console.signin.adapters.AccountAdapter"
ACCOUNT_LOGIN_METHODS = {"email"}
ACCOUNT_SIGNUP_FIELDS = ["email*", "password1*"]
ACCOUNT_USER_MODEL_USERNAME_FIELD = None
ACCOUNT_EMAIL_VERIFICATION = "optional"
ACCOUNT_MAX_EMAIL_ADDRESSES = 1
ACCOUNT_EMAIL_SUBJECT_PREFIX = "[Lorikeet] "
ACCOUNT_EMAIL_NOTIFICATIONS = True
ACCOUNT_SESSION_REMEMBER = True
ACCOUNT_CONFIRM_EMAIL_ON_GET = False
ACCOUNT_FORMS = {
    "login": "controlplane.console.signin.forms.SignInForm",
    "reset_password": "controlplane.console.signin.forms.ResetPasswordForm",
    "reset_password_from_key": "controlplane.console.signin.forms.ResetPasswordKeyForm",
    "change_password": "controlplane.console.signin.forms.ChangePasswordForm",
    "set_password": "controlplane.console.signin.forms.SetPasswordForm",
    "reauthenticate": "controlplane.console.signin.forms.ReauthenticateForm",
}
MFA_ADAPTER = "controlplane.console.signin.adapters.MfaAdapter"
MFA_SUPPORTED_TYPES = ["totp", "webauthn", "recovery_codes"]
MFA_PASSKEY_LOGIN_ENABLED = True
#: The sender of an invite has its token, too: a factor they set up would outlive a new password.
MFA_ALLOW_UNVERIFIED_EMAIL = False
#: The address of the first operator, whom the first start makes.
OPERATOR_EMAIL = env("LORIKEET_OPERATOR_EMAIL", "operator@localhost")
#: Operators need a second factor for /admin and /ops/v1. Switch it off only for a local demo.
OPERATORS_NEED_SECOND_FACTOR = env_bool("LORIKEET_OPERATOR_SECOND_FACTOR", True)
MFA_FORMS = {
    "authenticate": "controlplane.console.signin.forms.AuthenticateForm",
    "add_webauthn": "controlplane.console.signin.forms.AddPasskeyForm",
}
#: An OpenID Connect issuer that people may sign in with; empty: none.
OIDC_ISSUER = env("LORIKEET_OIDC_ISSUER", "")
OIDC_NAME = env("LORIKEET_OIDC_NAME", "SSO")
SOCIALACCOUNT_ADAPTER = "controlplane.console.signin.adapters.SocialAdapter"
SOCIALACCOUNT_EMAIL_AUTHENTICATION_AUTO_CONNECT = True
SOCIALACCOUNT_PROVIDERS = {"oidc": {"APPS": [], "OAUTH_PKCE_ENABLED": True}}
if OIDC_ISSUER:
    SOCIALACCOUNT_PROVIDERS["oidc"]["APPS"] = [
        {
            # This and their `sub` identify people: another issuer has other people.
            "provider_id": OIDC_ISSUER,
            "name": OIDC_NAME,
            "client_id": env("LORIKEET_OIDC_CLIENT_ID"),
            "secret": env("LORIKEET_OIDC_CLIENT_SECRET"),
            "settings": {"server_url": OIDC_ISSUER.rstrip("/")},
        }
    ]

globals().update(email_settings(env("EMAIL_URL", "console:")))
EMAIL_TIMEOUT = 10
DEFAULT_FROM_EMAIL = env("LORIKEET_MAIL_FROM", "lorikeet@localhost")

SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = BASE_URL.startswith("https://")
SESSION_COOKIE_HTTPONLY = True
SECURE_CONTENT_TYPE_NOSNIFF = True
X_FRAME_OPTIONS = "DENY"

LANGUAGE_CODE = "en"
TIME_ZONE = "UTC"
USE_TZ = True

STATIC_URL = "/static/"
STATIC_ROOT = Path(env("LORIKEET_STATIC_ROOT", str(BASE_DIR / "staticfiles")))

#: The port of this process's /metrics, /healthz and /readyz; 0: none. They ask for no key.
METRICS_PORT = env_number("LORIKEET_METRICS_PORT", 0, 0, 65535)
METRICS_ADDRESS = env("LORIKEET_METRICS_ADDRESS", "127.0.0.1")
#: A file that is touched as long as this process's main loop runs; empty: none.
ALIVE_FILE = env("LORIKEET_ALIVE_PATH", "")
REDIS_URL = env("REDIS_URL")
CACHES = {
    "default": {
        "BACKEND": "controlplane.infra.cache.SharedCache",
        "LOCATION": REDIS_URL,
        "KEY_PREFIX": "cache",
        "OPTIONS": {"socket_timeout": 5, "socket_connect_timeout": 5},
    }
}
POOL = env("LORIKEET_POOL", "default")
#: A request that would wait longer than this for a worker is refused at once.
MAX_WAIT_S = env_number("LORIKEET_MAX_WAIT_S", 60.0)
#: Interval at which Redis's file is rewritten without ended requests.
REDIS_REWRITE_S = env_number("LORIKEET_REDIS_REWRITE_S", 300, 1)
#: Time for which a dead letter keeps its prompt, so that an operator can requeue it.
DEAD_LETTER_DAYS = env_number("LORIKEET_DEAD_LETTER_DAYS", 7.0)
#: Most bytes of a tenant's stored prompts and answers; the oldest are deleted first.
CONTENT_BYTES_PER_TENANT = env_number("LORIKEET_CONTENT_BYTES_PER_TENANT", 1024**3, 1)

#: Least time for which usage records are kept: a month is dropped when all of it is older.
USAGE_DAYS = env_number("LORIKEET_USAGE_DAYS", 400, 31)
#: Time in which a deleted tenant can be restored; then its data is deleted.
TENANT_DELETION_GRACE_DAYS = env_number("LORIKEET_TENANT_DELETION_GRACE_DAYS", 7)

#: Requests that one batch runner has in flight at a time, however large the pool is.
BATCH_MAX_IN_FLIGHT = env_number("LORIKEET_BATCH_MAX_IN_FLIGHT", 512, 1)
#: Default quotas; an operator may set others for a tenant: see
#: `controlplane.usage.limits.models.TenantQuota`.
TENANT_QUOTAS = {
    "storage_bytes": env_number("LORIKEET_TENANT_STORAGE_BYTES", 50 * 1024**3),
    "training_runs": env_number("LORIKEET_TENANT_TRAINING_RUNS", 20),
    "training_at_once": env_number("LORIKEET_TENANT_TRAINING_AT_ONCE", 1),
    "training_steps": env_number("LORIKEET_TENANT_TRAINING_STEPS", 20000),
    "training_tokens": env_number("LORIKEET_TENANT_TRAINING_TOKENS", 250000000),
    "training_device_seconds": env_number("LORIKEET_TENANT_TRAINING_DEVICE_SECONDS", 86400),
    "training_samples": env_number("LORIKEET_TENANT_TRAINING_SAMPLES", 200000),
    "grader_calls": env_number("LORIKEET_TENANT_GRADER_CALLS", 50000),
    "grading_seconds": env_number("LORIKEET_TENANT_GRADING_SECONDS", 3600),
    "adapter_checks": env_number("LORIKEET_TENANT_ADAPTER_CHECKS", 20),
}
#: Most bytes of a dataset, all its parts together, of any tenant.
MAX_DATASET_BYTES = env_number("LORIKEET_MAX_DATASET_BYTES", 2 * 1024**3, 1)
#: Time limit of a training run, and so the longest wait of another tenant's first run.
TRAINING_MAX_RUN_S = env_number("LORIKEET_TRAINING_MAX_RUN_S", 4 * 3600.0, 1, 11 * 3600)
#: Socket of a serving worker that trains batches over its base; "": a child trains them.
TRAINING_SOCKET = env("LORIKEET_TRAINING_SOCKET", "")
#: Number of queued runs of a base model that a trainer takes at once; 1: a child for each.
TRAIN_BATCH = env_number("LORIKEET_TRAIN_BATCH", 64 if TRAINING_SOCKET else 1, 1, 256)
if TRAINING_SOCKET and TRAIN_BATCH == 1:
    raise ImproperlyConfigured(
        "LORIKEET_TRAINING_SOCKET needs LORIKEET_TRAIN_BATCH above 1: set one, or leave it out"
    )
try:
    #: When training runs may begin; None: at any time.
    TRAINING_WINDOW = DailyWindow.parse(env("LORIKEET_TRAINING_WINDOW", ""))
    #: Bytes of GPU memory for a training run, if a worker has the same GPU.
    TRAINER_GPU_SHARE = trainer_gpu_share(
        env("LORIKEET_TRAINER_GPU_SHARE", ""),
        env("LORIKEET_GPU", ""),
        env("LORIKEET_TRAINER_GPU", ""),
    )
except ValueError as error:
    raise ImproperlyConfigured(str(error)) from error

#: The rule for versions without a probe: see `controlplane.adapters.probing`.
PROBE = env("LORIKEET_PROBE", "try")
if PROBE not in ("require", "try", "off"):
    raise ImproperlyConfigured("LORIKEET_PROBE must be require, try or off")
PROBE_WAIT_S = env_number("LORIKEET_PROBE_WAIT_S", 120.0)

#: KL in nats per token from the base before it was quantised, above which the doctor warns.
PRECISION_MAX_KL = env_number("LORIKEET_PRECISION_MAX_KL", 0.1)
#: Nats by which an adapter's copy in FP8 may be further from PEFT than its original, on average
#: over the tokens of the probe's prompts; beyond that the original answers. The demo's adapters are
#: at 0.004 (`bench.quality`).
COPY_MAX_NATS = env_number("LORIKEET_COPY_MAX_NATS", 0.05)

#: Seconds in which new workers should finish the waiting requests; lower: more workers.
TARGET_WAIT_S = env_number("LORIKEET_TARGET_WAIT_S", 10.0, 0.01)
#: Seconds for which a promotion waits until all workers have loaded the version; at most 10.
PREFETCH_WAIT_S = min(10.0, env_number("LORIKEET_PREFETCH_WAIT_S", 5.0))
#: Interval at which workers are asked for the adapters kept warm; a pin lasts for six of them, and
#: workers end it after ten minutes.
WARMTH_TURN_S = min(100.0, max(1.0, env_number("LORIKEET_WARMTH_TURN_S", 20.0)))

CELERY_BROKER_URL = env("CELERY_BROKER_URL", REDIS_URL)
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_REJECT_ON_WORKER_LOST = True
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_TASK_DEFAULT_QUEUE = "ops"
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_TASK_ROUTES = {
    "controlplane.adapters.tasks.*": {"queue": "ingest"},
    "controlplane.training.tasks.training_run_execute": {"queue": "train"},
    "controlplane.training.primitives.tasks.clients_train": {"queue": "train"},
    "controlplane.training.tasks.dataset_report": {"queue": "inspect"},
    "controlplane.training.tasks.dataset_pulls_run": {"queue": "ingest"},
    "controlplane.evaluations.inspections.tasks.adapter_inspect": {"queue": "inspect"},
    "controlplane.evaluations.tasks.evaluation_run": {"queue": "inspect"},
}
CELERY_BROKER_TRANSPORT_OPTIONS = {
    # Longer than any training run: after this time Redis redelivers an unacknowledged task.
    "visibility_timeout": 12 * 3600,
    # Without timeouts callers that queue a task, also beat, wait for a hung Redis without end.
    "socket_timeout": 5,
    "socket_connect_timeout": 5,
    "socket_keepalive": True,
}
CELERY_BEAT_SCHEDULE = beat_schedule(
    schedule_tick_s=env_number("LORIKEET_SCHEDULE_TICK_S", 20.0, 0.01),
    files_sweep_s=env_number("LORIKEET_FILES_SWEEP_S", 300.0, 0.01),
    warmth_turn_s=WARMTH_TURN_S,
)

S3_ENDPOINT_URL = env("S3_ENDPOINT_URL")
#: Address at which clients reach S3: presigned URLs carry this host.
S3_PUBLIC_ENDPOINT_URL = env("S3_PUBLIC_ENDPOINT_URL", S3_ENDPOINT_URL)
S3_ACCESS_KEY_ID = env("S3_ACCESS_KEY_ID")
S3_SECRET_ACCESS_KEY = env("S3_SECRET_ACCESS_KEY")
S3_BUCKET = env("S3_BUCKET", "lorikeet")
S3_REGION = env("S3_REGION", "us-east-1")

#: Rules for addresses that tenants name: `infra.outbound`.
OUTBOUND = outbound_policy(
    env("LORIKEET_OUTBOUND_HOSTS", ""),
    env("LORIKEET_OUTBOUND_ALLOWED_NETWORKS", ""),
    env("LORIKEET_OUTBOUND_DENIED_NETWORKS", ""),
    env("LORIKEET_OUTBOUND_CA_PATH", ""),
    BASE_URL,
    S3_ENDPOINT_URL,
    S3_PUBLIC_ENDPOINT_URL,
    REDIS_URL,
    CELERY_BROKER_URL,
    env("DATABASE_URL"),
    env("DATABASE_OWNER_URL", ""),
)

#: The Hub that adapters are imported from; empty: none.
HUB_ENDPOINT = hub_endpoint(OUTBOUND, os.environ.get("LORIKEET_HUB_ENDPOINT"))

#: A training child's environment: it has none of the variables above.
TRAINER_ENVIRONMENT = child_environment(os.environ)

#: The base model's folder, and the parent of further ones; only training tasks use them.
BASE_MODEL = env("LORIKEET_BASE_MODEL", "")
BASE_MODEL_NAME = env("LORIKEET_BASE_MODEL_NAME", "")
BASE_MODEL_REPOSITORY = env("LORIKEET_BASE_MODEL_REPOSITORY", "")
# The download of a repository records its commit; the setting may be a branch.
BASE_MODEL_REVISION = "" if BASE_MODEL_REPOSITORY else env("LORIKEET_BASE_MODEL_REVISION", "")
#: BASE_MODEL's path outside the container; its last part is the model's default name.
BASE_MODEL_ORIGIN = env("LORIKEET_BASE_MODEL_FOLDER", "")
BASE_MODEL_DIR = Path(env("LORIKEET_BASE_MODEL_DIR", str(BASE_DIR / ".cache" / "base")))
WORK_DIR = Path(env("LORIKEET_WORK_DIR", str(BASE_DIR / ".cache" / "work")))

UNFOLD = {
    "SITE_TITLE": "Lorikeet",
    "SITE_HEADER": "Lorikeet operator",
    "SITE_URL": "/console/",
    "SITE_ICON": "controlplane.operator.site.logo",
    "SITE_FAVICONS": [
        {"rel": "icon", "type": "image/svg+xml", "href": "controlplane.operator.site.logo"}
    ],
    "COLORS": {
        "primary": {
            "50": "oklch(97% .02 160)",
            "100": "oklch(94% .04 160)",
            "200": "oklch(88% .07 160)",
            "300": "oklch(80% .1 160)",
            "400": "oklch(70% .12 160)",
            "500": "oklch(64% .12 160)",  # links on dark pages have it, so at least 4.5:1
            "600": "oklch(48% .1 160)",
            "700": "oklch(42% .09 160)",
            "800": "oklch(36% .07 160)",
            "900": "oklch(31% .06 160)",
            "950": "oklch(22% .04 160)",
        },
    },
    "STYLES": ["controlplane.operator.site.style"],
    "SCRIPTS": ["controlplane.operator.site.script"],
    "SIDEBAR": {"navigation": "controlplane.operator.site.navigation"},
}

try:
    LOGGING = logging_config(
        env("LORIKEET_LOG_FORMAT", "console"), env("LORIKEET_LOG_LEVEL", "INFO"), add_tenant
    )
except WrongSetting as error:
    raise ImproperlyConfigured(str(error)) from error
logging.captureWarnings(True)  # warnings are lines, too
log_uncaught()
