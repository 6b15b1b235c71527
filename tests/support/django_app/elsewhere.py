"""A task that is not where a worker looks."""

from support.django_project import task


@task
def lost() -> None:
    pass
