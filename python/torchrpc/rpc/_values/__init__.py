"""The forms in which values, functions and exceptions travel."""
