"""How a call ends, for tests whose workers return it."""


def outcome_of(function, *args):
    """Return what the function returns, or the type and the text of what it raises."""
    try:
        return function(*args)
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"
