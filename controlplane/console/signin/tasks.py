"""Celery's entry points of this app."""

from allauth.usersessions.models import UserSession
from celery import shared_task
from django.contrib.sessions.models import Session
from django.utils import timezone


@shared_task
def sessions_forget() -> None:
    """Delete expired sessions and their records."""
    Session.objects.filter(expire_date__lt=timezone.now()).delete()
    UserSession.objects.exclude(session_key__in=Session.objects.values("session_key")).delete()
