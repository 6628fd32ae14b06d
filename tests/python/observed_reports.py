"""Reports of workers as `Group.reports` returns them, written by hand for the tests of the commands."""


def frame(function, line=1, file="/home/me/train.py"):
    return {"file": file, "line": line, "function": function}


def thread(tid, *, python=(), waits=None, lock=None, serves=(), state="S", name="torchrpc-pool", cpu_s=0.0):
    return {
        "tid": tid, "name": name, "ident": 0, "state": state, "cpu_s": cpu_s, "serves": [list(each) for each in serves],
        "waits": waits, "python": list(python), "lock": lock,
    }  # fmt: skip


def waits(call, to, text="", age_s=3.0, kind="reply"):
    return {"kind": kind, "call": call, "to": to, "text": text, "age_s": age_s}


def call_out(call, to, *, tid=0, age_s=3.0, left_s=None, state="sent"):
    return {
        "call": call,
        "to": to,
        "kind": "PYTHON_CALL",
        "age_s": age_s,
        "left_s": left_s,
        "bytes": 120,
        "state": state,
        "tid": tid,
    }


def call_in(call, sender, function="train.step", *, tid=0, age_s=3.0, state="running"):
    return {
        "call": call,
        "from": sender,
        "kind": "PYTHON_CALL",
        "function": function,
        "age_s": age_s,
        "state": state,
        "tid": tid,
        "bytes": 120,
    }


def member(name, is_living=True):
    return {"name": name, "id": int(name[1:]), "incarnation": 1, "is_member": True, "is_living": is_living}


def report(name, *, threads=(), out=(), into=(), members=("w0", "w1", "w2"), lost=(), uptime_s=12.5, **more):
    """A report of worker `name`, whose process id is 1000 + 100 times the number in its name."""
    number = int(name[1:])
    made = {
        "version": 1,
        "worker": {
            "name": name, "id": number, "incarnation": 1, "pid": 1000 + 100 * number, "host": "node1",
            "uptime_s": uptime_s, "torchrpc": "0.9.0", "is_python": True, "rss_bytes": 200 << 20, "cpu_s": 3.2,
            "world_size": len(members),
        },
        "members": [member(each, each not in lost) for each in members if each != name],
        "calls_out": list(out),
        "calls_in": list(into),
        "threads": list(threads),
        "gil": {"is_free": True, "waited_s": 0.001, "holder": 0},
        "pool": {"threads": 5, "idle": 3, "blocked": 1, "queued": 0, "size": 16, "max": 1024, "strand_queued": 0},
        "connections": [],
        "rrefs": {"owned": 0, "held": 0, "forks": 0, "list": []},
        "autograd": {"contexts": 0, "oldest_s": 0.0},
        "metrics": {},
        "functions": [],
        "log": [],
    }  # fmt: skip
    return made | more


def circle(left_s=None):
    """Three workers whose pool threads call each other: w0 -> w1 -> w2 -> w0."""
    reports = {}
    for i in range(3):
        name, callee, caller = f"w{i}", f"w{(i + 1) % 3}", f"w{(i + 2) % 3}"
        own, served = 10 + i, 10 + (i + 2) % 3
        tid = 1001 + 100 * i
        reports[name] = report(
            name,
            threads=[
                thread(1000 + 100 * i, name="python", python=[frame("main", 90)]),
                thread(
                    tid, python=[frame("rpc_sync", 9, "/venv/torchrpc/rpc/_calls/sending.py"), frame("pull", 17 + i)],
                    waits=waits(own, callee), serves=[(caller, served)],
                ),
            ],
            out=[call_out(own, callee, tid=tid, left_s=left_s)],
            into=[call_in(served, caller, "train.pull", tid=tid)],
        )  # fmt: skip
    return reports
