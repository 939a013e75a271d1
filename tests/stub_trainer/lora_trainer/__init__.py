"""Stands in for the real trainer where a test puts its parent folder on PYTHONPATH."""
