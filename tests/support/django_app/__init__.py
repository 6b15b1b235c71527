"""An installed app of the Django project that the tests have in their own process (support/django_project.py)."""
