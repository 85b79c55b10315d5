"""Trials as numbers that can be trusted: estimates with intervals, comparisons, refusals."""
