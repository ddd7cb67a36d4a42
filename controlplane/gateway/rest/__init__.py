"""Base of all APIs that serve rows by Django REST framework: views, pages, fields."""
