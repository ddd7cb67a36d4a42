"""Schedules: their rules, slots, and history."""
