"""Decisions, pure: the same input gives the same plan on every rank. No I/O, no clock, no torch."""
