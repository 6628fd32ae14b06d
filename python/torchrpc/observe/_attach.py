"""`attach`: inspect a running group, from one of its workers, from another process on a worker's machine, or from any
machine that can reach the group's store. Any thread may use a `Group`.
"""

import concurrent.futures
import contextlib
import dataclasses
import datetime
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch.distributed as dist

from torchrpc import _C
from torchrpc._untrusted import printable_data, read_file, read_key_file

from ._fields import fitted
from ._reports import rows

Report = dict[str, Any]

_MOST_QUESTIONS = 32  # workers that are asked at the same time
_MOST_CARD_BYTES = 1 << 16
_STORE_TIMEOUT = datetime.timedelta(seconds=10)


@dataclasses.dataclass(frozen=True)
class Member:
    """A worker of the group: its name, its id (rank), the number of its start, the address on which it listens, and
    whether the group takes it for alive."""

    name: str
    id: int
    incarnation: int
    address: str
    is_living: bool = True


class _Way(Protocol):
    """A way to ask workers for reports."""

    def ask(self, address: str, name: str, stacks: bool, rrefs: bool, timeout: float) -> Report: ...
    def close(self) -> None: ...


class _AsMember:
    """Asks over the connections of this process's own worker."""

    def ask(self, address: str, name: str, stacks: bool, rrefs: bool, timeout: float) -> Report:
        return _C._inspect(name, stacks, rrefs, timeout)

    def close(self) -> None:
        pass


class Group:
    """A running group under inspection, as `attach` returns it.

    Attributes:
        members (list[Member]): the workers, according to the first worker that answered.
    """

    def __init__(self, way: _Way, members: list[Member]) -> None:
        self._way = way
        self.members = members

    def report(self, name: str, stacks: bool = False, rrefs: bool = False, timeout: float = 2.0) -> Report:
        """Return the report of a worker about itself: a dict of plain data, see docs/observe.md.

        Args:
            name (str): the name of the worker.
            stacks (bool): whether the report contains the lines of code where the threads are.
            rrefs (bool): whether the report contains each RRef, not only their number.
            timeout (float): seconds.

        Raises:
            ValueError: the group has no worker of that name.
            RpcTimeoutError, WorkerLostError: the worker does not answer.
            NotAllowedError: the worker does not let this process inspect it.
        """
        member = next((each for each in self.members if each.name == name), None)
        if member is None:
            names = ", ".join(each.name for each in self.members)
            raise ValueError(f"the group has no worker {name!r}, but {names}")
        return self._ask(member, stacks, rrefs, timeout)

    def reports(self, stacks: bool = False, rrefs: bool = False, timeout: float = 2.0) -> dict[str, Report | Exception]:
        """Ask all workers at once. Return {name: report}, with the exception instead of a report that failed."""
        with concurrent.futures.ThreadPoolExecutor(min(_MOST_QUESTIONS, max(1, len(self.members)))) as pool:
            answers = {each.name: pool.submit(self._ask, each, stacks, rrefs, timeout) for each in self.members}
        found: dict[str, Report | Exception] = {}
        for name, answer in answers.items():
            error = answer.exception()
            if error is not None and not isinstance(error, Exception):
                raise error
            found[name] = error if error is not None else answer.result()
        return found

    def close(self) -> None:
        self._way.close()

    def __enter__(self) -> "Group":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, member: Member, stacks: bool, rrefs: bool, timeout: float) -> Report:
        return _ask(self._way, member.address, member.name, timeout, stacks, rrefs)


def _ask(way: _Way, address: str, name: str, timeout: float, stacks: bool = False, rrefs: bool = False) -> Report:
    """Return what can be read of the report of a worker, which may have written anything."""
    return fitted(printable_data(way.ask(address, name, stacks, rrefs, timeout)))


def _members_in(report: Report) -> list[Member]:
    fields = [field.name for field in dataclasses.fields(Member)]
    known = [row for row in rows(report, "members") if all(row.get(name) is not None for name in fields)]
    return [Member(**{name: row[name] for name in fields}) for row in known]


def _group(way: _Way, address: str, name: str, timeout: float) -> Group:
    try:
        return Group(way, _members_in(_ask(way, address, name, timeout)))
    except BaseException:
        way.close()
        raise


def _card(pid: int) -> Mapping[str, str]:
    """Return the worker card of a process: a memfd in which the worker publishes data for tools of its user."""
    folder = Path(f"/proc/{pid}/fd")
    try:
        entries = list(folder.iterdir())
    except FileNotFoundError:
        raise ValueError(f"there is no process {pid}") from None
    except PermissionError:
        raise PermissionError(f"process {pid} belongs to another user: run this as that user or as root") from None
    for entry in entries:
        with contextlib.suppress(OSError, ValueError):  # it has been closed meanwhile, or another program has made it
            if os.readlink(entry).startswith(f"/memfd:{_C._WORKER_CARD}"):
                text = read_file(entry, _MOST_CARD_BYTES, {_user_of(pid)}).decode()
                card = printable_data(dict(line.split(" ", 1) for line in text.splitlines()))
                bytes.fromhex(card["secret"])
                if card.keys() >= _PARTS_OF_CARD:
                    return card
    raise ValueError(f"process {pid} is no worker: it has not called torchrpc's init_rpc, or has shut RPC down")


_PARTS_OF_CARD = {"name", "address", "transport", "encryption", "needs_secret", "secret"}


def _user_of(pid: int) -> int:
    """Return the id of the user as whom the process runs, and who owns the files that it makes."""
    lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    return int(next(line for line in lines if line.startswith("Uid:")).split()[4])


def _attach_to_process(pid: int, secret: str, identity: str, timeout: float) -> Group:
    card = _card(pid)
    if card["needs_secret"] == "1" and not (secret or identity or _has_given_secret()):
        raise ValueError(
            f"the group of {card['name']} was given a secret or identities: pass secret_file or identity, or set "
            "TORCHRPC_SECRET_FILE or TORCHRPC_IDENTITY_FILE, as for its workers"
        )
    way = _C._Observer(card["transport"], card["encryption"], bytes.fromhex(card["secret"]), secret, identity)
    return _group(way, card["address"], card["name"], timeout)


def _has_given_secret() -> bool:
    names = ("TORCHRPC_SECRET", "TORCHRPC_SECRET_FILE", "TORCHRPC_IDENTITY_FILE", "TORCHRPC_TLS_CERTIFICATE")
    return any(os.environ.get(name) for name in names)


def _secret_in(path: str) -> str:
    try:
        return read_key_file(path).rstrip("\n")
    except ValueError as why:
        raise ValueError(f"{path} cannot be the file of the secret: it {why}") from None


def _attach_to_store(place: str, secret: str, identity: str, timeout: float) -> Group:
    host, _, port = place.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal():
        raise ValueError(f"not an address: {place!r}. Give host:port, the MASTER_ADDR and MASTER_PORT of the group")
    if why := _C._wait_for_store(host, int(port), timeout):
        raise ValueError(f"no store answers at {place}: {why}. Give the group's MASTER_ADDR and MASTER_PORT, or pid")
    store = dist.TCPStore(host, int(port), None, False, _STORE_TIMEOUT, wait_for_workers=False)
    workers, group_secret, transport = _C._find_group(store, host, secret, identity)
    if not workers:
        raise ValueError(f"no group has formed at {place} yet")
    way = _C._Observer(transport, "", group_secret, secret, identity)
    failures = []
    for name, address in workers:  # some of them may be lost
        try:
            return Group(way, _members_in(_ask(way, address, name, timeout)))
        except Exception as failure:
            failures.append(failure)
    way.close()
    raise failures[0]


def attach(
    address: str | None = None,
    *,
    pid: int | None = None,
    secret_file: str | None = None,
    identity: str | None = None,
    timeout: float = 5.0,
) -> Group:
    """Attach to a running group, to inspect it. The group needs no preparation.

    Args:
        address (str): "host:port" of the group's store, its MASTER_ADDR and MASTER_PORT.
        pid (int): the id of a worker process of this user on this machine. Without `address` and `pid`, the group is
            that of this process's own worker.
        secret_file (str): the file with the group's secret; default: from the environment, as for workers.
        identity (str): the identity file of an observer or a member, if the group's workers have identities.
        timeout (float): seconds for the first worker to answer.

    Raises:
        ValueError: there is no such process, or no group there; both `address` and `pid` are given, or the address is
            not "host:port".
        PermissionError: the process belongs to another user.
        NotAllowedError: the identity has neither the role member nor observer.
        RpcTimeoutError, WorkerLostError: no worker answers, or the secret is wrong.
    """
    if address is not None and pid is not None:
        raise ValueError("give an address or pid, not both")
    secret = _secret_in(secret_file) if secret_file else ""
    if pid is not None:
        return _attach_to_process(pid, secret, identity or "", timeout)
    if address is not None:
        return _attach_to_store(address, secret, identity or "", timeout)
    from torchrpc.rpc import get_worker_info

    return _group(_AsMember(), "", get_worker_info().name, timeout)
