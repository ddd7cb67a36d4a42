"""Sets Django up: conftest.py here imports models, and pytest reads it before pytest-django
begins when this folder is named on the command line."""

import os

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
django.setup()
