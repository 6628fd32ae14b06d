"""The cases of tests/chaos.py."""
