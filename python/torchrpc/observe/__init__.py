"""Look into running groups: which worker waits for whom, in which line, and who holds what."""

from ._attach import Group, Member, attach

__all__ = ["Group", "Member", "attach"]
