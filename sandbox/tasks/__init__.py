"""The shipped tasks: a generator of terminal tasks in Harbor's format."""
