"""How a call ends: for tests whose workers return it, and how an exception arrives."""

from torchrpc.rpc.internal import _describe_exception, _rebuild_exception


def outcome_of(function, *args):
    """Return what the function returns, or the type and the text of what it raises."""
    try:
        return function(*args)
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"


def travel(exc):
    """Describe an exception as its callee does, and rebuild it as its caller does; return its text and itself."""
    try:
        raise exc
    except BaseException as caught:
        text, detail = _describe_exception(caught)
    return text, _rebuild_exception(text, detail, "worker1")
