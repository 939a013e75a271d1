"""The contract between operator and trainer: types, run directory, exit codes, names, the store.

Imports nothing of the other two packages; see the import contracts in pyproject.toml.
"""
