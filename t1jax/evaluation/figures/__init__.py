"""The figures of a report: each is a function of what a run's folder says.

A figure whose numbers are not there yet raises Absent with the reason, which the page says instead.
Every caption names the unit, what a band or bar is, and of how many. Knows nothing of pages.
"""
