"""Who waits for whom in a group, from the reports of its workers: cycles, stragglers, and what else stands still.

The nodes of the graph are threads, calls, queues of pools, and workers. Most nodes wait for one other node. A thread at
a barrier waits for all members that have not arrived, a queue for any of the threads that may take the next call. A
node can never go on if it waits for nodes that cannot: `_Graph._find_stuck` finds the largest set of such nodes, and a
cycle in it is a deadlock. A node whose wait the reports do not show for certain counts as able to go on, so a slow call
is never reported as a deadlock.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from . import _reports as reading
from ._reports import Report, Reports, age, listed, number, plural, rows, table

MAX_CYCLES = 5  # cycles whose steps are shown
LONG_WAIT_S = 1.0  # shorter waits are not reported

Node = tuple[Any, ...]  # ("thread", worker, tid), ("call", caller, callee, id), ("queue", worker) or ("worker", name)


class Edge(NamedTuple):
    targets: "list[Node]"
    needs_all: bool
    is_certain: bool
    text: str  # what the node does, as the end of a sentence


def explain(reports: Reports, members: Sequence[str] = (), earlier: "Reports | None" = None) -> dict[str, Any]:
    """Return what stands still in a group, and why.

    Args:
        reports: the reports by worker, with stacks.
        members: the names of all workers that the group knows. Workers without a report become findings.
        earlier: slightly older reports. A cycle counts only if they contain it, too. The processor time that a thread
            has used since then shows whether it runs.

    Returns a dictionary: "has_cycle", "is_healthy" (only stragglers and long waits were found), "workers" (the number
    of reports), and "findings", the most severe first. A finding has "kind" ("deadlock", "gil", "silent", "lost",
    "full_pool", "straggler", "longest_wait"), "text" (one sentence or a few), "workers" (the workers concerned) and
    "steps": dictionaries with "worker", "tid", "thread", "function", "file", "line", "call" and "text".
    """
    graph = _Graph(reports, earlier)
    cycles = graph.cycles()
    if earlier is not None and cycles:
        before = {_identity(cycle) for cycle in _Graph(earlier).cycles()}
        cycles = [cycle for cycle in cycles if _identity(cycle) in before]
    in_cycles = {node for cycle in cycles for node in cycle}
    findings = [graph.deadlock(cycle, in_cycles) for cycle in cycles[:MAX_CYCLES]]
    if len(cycles) > MAX_CYCLES:
        findings.append(_finding("deadlock", f"There are {len(cycles) - MAX_CYCLES} more such circles.", [], []))
    findings += graph.kept_gils()
    findings += _silent(reports, members, graph.lost)
    findings += graph.lost_workers()
    findings += graph.full_pools()
    findings += graph.stragglers()
    if not cycles:
        findings += graph.longest_wait()
    calm = {"straggler", "longest_wait"}
    is_healthy = all(each["kind"] in calm for each in findings)
    return {"has_cycle": bool(cycles), "is_healthy": is_healthy, "workers": len(reports), "findings": findings}


def text(explanation: Mapping[str, Any]) -> str:
    """Return the explanation as text: first the sentences of all findings, then the steps of each."""
    findings = explanation["findings"]
    lines = [finding["text"] for finding in findings]
    if not findings:
        lines = [
            f"Nothing stands still: no call in {plural(explanation['workers'], 'worker')} waits longer than a second."
        ]
    elif explanation["is_healthy"]:
        lines.append("No deadlock, no lost worker, no full pool.")
    shown: list[Any] = []
    for finding in findings:
        new = [step for step in finding["steps"] if step not in shown]
        if new:  # else all steps have been shown above
            lines += ["", _heading(finding), *_lines_of_steps(finding["steps"])]
            shown += finding["steps"]
    return "\n".join(lines)


def _heading(finding: Mapping[str, Any]) -> str:
    kind, workers = finding["kind"], finding["workers"]
    if kind == "gil":
        return f"The thread that keeps the GIL of {workers[0]}"
    if kind == "straggler":
        return f"What {listed(workers)} {'does' if len(workers) == 1 else 'do'}"
    return {"deadlock": "The circle", "longest_wait": "The longest wait"}.get(kind, str(finding["text"]))


def _lines_of_steps(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    width = max(len(step["worker"]) for step in steps)
    return [f"  {step['worker']:{width}}  {step['text']}" for step in steps]


def exit_code(explanation: Mapping[str, Any]) -> int:
    """Return 1 for a deadlock, 3 for a silent or lost worker, a full pool or a kept GIL, and 0 otherwise."""
    return 1 if explanation["has_cycle"] else 0 if explanation["is_healthy"] else 3


class _Graph:
    def __init__(self, reports: Reports, earlier: "Reports | None" = None):
        self._reports = reading.answered(reports)
        self._earlier = reading.answered(earlier or {})
        self._threads = {name: reading.threads(report) for name, report in self._reports.items()}
        self._calls_in = {
            (str(row.get("from")), name, int(number(row, "call"))): row
            for name, report in self._reports.items()
            for row in rows(report, "calls_in")
        }
        self._calls_out = {
            (name, str(row.get("to")), int(number(row, "call"))): row
            for name, report in self._reports.items()
            for row in rows(report, "calls_out")
        }
        self._living = {
            str(row.get("name"))
            for report in self._reports.values()
            for row in rows(report, "members")
            if row.get("is_member", True) and row.get("is_living", True)
        }
        # Lost worker -> how many reports say so: workers notice a loss one after another.
        self.lost = Counter(
            str(row.get("name"))
            for report in self._reports.values()
            for row in rows(report, "members")
            if row.get("is_living") is False and row.get("name") not in self._reports
        )
        self._living -= self.lost.keys()
        # The threads that wait for other members, and for what: the name of a barrier.
        names = {str(row.get("name")) for report in self._reports.values() for row in rows(report, "members")}
        digest = reading.digest_of(names | self._reports.keys())
        self._barriers: dict[tuple[str, int], str] = {}
        self._arrived: dict[str, set[str]] = {}
        for name, threads in self._threads.items():
            for tid, thread in threads.items():
                waits = thread.get("waits")
                if reading.shutdown_of(thread):
                    barrier = "shutdown"
                elif isinstance(waits, Mapping) and waits.get("kind") == "barrier":
                    barrier = reading.wait_text(waits)
                    if barrier.startswith("_all_gather ") and barrier.split()[1].rpartition("-")[0] != digest:
                        continue  # Only some workers take part, and the reports do not say which.
                else:
                    continue
                self._barriers[name, tid] = barrier
                self._arrived.setdefault(barrier, set()).add(name)
        self.edges: dict[Node, Edge] = {}
        for name in self._reports:
            for tid in self._threads[name]:
                self._add(("thread", name, tid), self._edge_of_thread(name, tid))
        for key in self._calls_out.keys() | self._calls_in.keys():
            self._add(("call", *key), self._edge_of_call(*key))
        for name in self._reports:
            self._add(("queue", name), self._edge_of_queue(name))
        for node in [target for edge in self.edges.values() for target in edge.targets if target[0] == "worker"]:
            self._add(node, self._edge_of_straggler(node[1]))
        self._stuck = self._find_stuck()

    def _add(self, node: Node, edge: "Edge | None") -> None:
        if edge is not None:
            self.edges.setdefault(node, edge)

    # Who waits for whom.

    def _edge_of_thread(self, name: str, tid: int) -> "Edge | None":
        thread = self._threads[name][tid]
        barrier = self._barriers.get((name, tid))
        if barrier and (missing := self._missing(barrier)):
            return self._edge_of_barrier(barrier, missing, thread)
        lock = thread.get("lock")
        if isinstance(lock, Mapping) and (edge := self._edge_of_lock(name, lock)):
            return edge
        waits = thread.get("waits")
        if isinstance(waits, Mapping):
            return self._edge_of_wait(name, tid, waits)
        holder = self._gil_holder(name)
        if holder and tid != holder and rows(thread, "python") and thread.get("serves"):
            return Edge([("thread", name, holder)], True, False, "waits for the GIL")
        return None

    def _edge_of_lock(self, name: str, lock: Mapping[str, Any]) -> "Edge | None":
        holders = [each for each in reading.holders(self._reports[name], lock) if each in self._threads[name]]
        kind = str(lock.get("kind", "lock"))
        expression = reading.lock_text(lock)
        if not holders:
            return Edge([], True, False, f"waits for {expression}")
        at = [each for each in lock.get("taken_at") or [] if each]
        since = f", which thread {holders[0]} has taken at {at[0]}" if at else f", which thread {holders[0]} holds"
        others = f" and {plural(len(holders) - 1, 'other')}" if len(holders) > 1 else ""
        if kind in ("thread", "import"):
            since, others = "", ""
        # A semaphore is free when any of its holders releases it.
        targets: list[Node] = [("thread", name, holder) for holder in holders]
        return Edge(targets, kind != "semaphore", True, f"waits for {expression}{since}{others}")

    def _edge_of_wait(self, name: str, tid: int, waits: Mapping[str, Any]) -> Edge:
        kind, to, call = str(waits.get("kind", "")), str(waits.get("to", "")), int(number(waits, "call"))
        since = f" ({f'call {call}, ' if call else ''}{age(number(waits, 'age_s'))})"
        function = str(self._calls_in.get((name, to, call), {}).get("function") or "")
        what = f"waits for {reading.wait_text(waits, function)}{since}"
        if kind == "lock":
            return Edge([], True, False, what)
        if call and to and (name, to, call) not in self._calls_out:
            holder = self._gil_holder(name)
            targets: list[Node] = [("thread", name, holder)] if holder and holder != tid else []
            return Edge(targets, True, False, f"{what}, which has arrived{'; it waits for the GIL' if targets else ''}")
        if call and to:
            return Edge([("call", name, to, call)], True, True, what)
        if kind == "barrier":
            return Edge([], True, False, what)
        if to and to != name:
            return Edge([("worker", to)], True, False, what)
        own = [key for key, row in self._calls_out.items() if key[0] == name and row.get("tid") == tid and tid]
        return Edge([("call", *key) for key in own], True, False, what)

    def _edge_of_barrier(self, barrier: str, missing: list[str], thread: Mapping[str, Any]) -> Edge:
        waits = thread.get("waits")
        barrier = barrier.split()[0]
        since = f" ({age(number(waits, 'age_s'))})" if isinstance(waits, Mapping) else ""
        verb = "has" if len(missing) == 1 else "have"
        text = f"waits for all workers in {barrier}{since}; {listed(missing)} {verb} not arrived"
        return Edge([("worker", each) for each in missing], True, True, text)

    def _missing(self, barrier: str) -> list[str]:
        """Return the members that have not arrived at a barrier."""
        return sorted((self._living | self._reports.keys()) - self._arrived.get(barrier, set()))

    def _edge_of_call(self, caller: str, callee: str, call: int) -> "Edge | None":
        served = self._calls_in.get((caller, callee, call))
        if callee not in self._reports:
            return Edge([("worker", callee)], True, False, f"was sent to {callee}, which does not answer")
        if served is not None:
            tid = int(number(served, "tid")) or self._server_of(callee, caller, call)
            if tid and str(served.get("state", "running")) == "running":
                return Edge([("thread", callee, tid)], True, True, "is served")
            return Edge([], True, False, "has returned a future that is not complete")
        if caller in self._reports and reading.is_pool_full(self._reports[callee]):
            return Edge([("queue", callee)], True, True, f"waits in the queue of {callee}")
        if holder := self._gil_holder(callee):
            return Edge([("thread", callee, holder)], True, False, f"waits for the GIL of {callee}")
        return None

    def _server_of(self, worker: str, caller: str, call: int) -> int:
        for tid, thread in self._threads[worker].items():
            if any(list(each) == [caller, call] for each in thread.get("serves") or []):
                return tid
        return 0

    def _edge_of_queue(self, worker: str) -> "Edge | None":
        report = self._reports[worker]
        if not reading.is_pool_full(report):
            return None
        busy = [tid for tid, thread in self._threads[worker].items() if thread.get("serves")]
        pool = table(report, "pool")
        # Another thread of the pool may take the next call.
        is_certain = bool(busy) and len(busy) >= number(pool, "threads") - number(pool, "idle")
        return Edge([("thread", worker, tid) for tid in busy], False, is_certain, "waits for one of the busy threads")

    def _edge_of_straggler(self, worker: str) -> "Edge | None":
        """Return the edge from a worker that has not arrived at a barrier to its main thread; None if not known."""
        if worker not in self._reports:
            return None
        main = int(number(table(self._reports[worker], "worker"), "pid"))
        if main not in self._threads[worker]:
            return None
        others = [thread for tid, thread in self._threads[worker].items() if tid != main and not thread.get("serves")]
        # Another thread of the program, instead of the main thread, may arrive at the barrier.
        is_certain = not any(reading.is_in_program(thread) for thread in others)
        return Edge([("thread", worker, main)], True, is_certain, "")

    def _gil_holder(self, worker: str) -> int:
        holder = reading.gil_holder(self._reports[worker], self._earlier.get(worker))
        return holder if holder in self._threads[worker] else 0

    # What can never go on.

    def _find_stuck(self) -> set[Node]:
        """Return the largest set of nodes that certainly wait for nodes of the set and cannot go on without them."""
        stuck = {node for node, edge in self.edges.items() if edge.is_certain and edge.targets}
        while True:
            free = {node for node in stuck if not self._is_stuck(self.edges[node], stuck)}
            if not free:
                return stuck
            stuck -= free

    @staticmethod
    def _is_stuck(edge: Edge, stuck: set[Node]) -> bool:
        return (any if edge.needs_all else all)(target in stuck for target in edge.targets)

    def cycles(self) -> list[list[Node]]:
        """Return a short cycle of each strongly connected component: of nodes that all wait for each other."""
        stuck = self._stuck
        found: list[list[Node]] = []
        seen: set[Node] = set()
        for start in sorted(stuck, key=str):
            if start in seen:
                continue
            cycle = self._shortest_cycle(start, stuck)
            if cycle:
                found.append(_from_smallest(cycle))
                seen |= self._reachable(start, stuck) & self._waiters_of([start], stuck)
        return found

    def _shortest_cycle(self, start: Node, stuck: set[Node]) -> list[Node]:
        came_from: dict[Node, Node | None] = {start: None}
        todo = [start]
        for node in todo:
            for target in self.edges[node].targets:
                if target == start:
                    path: list[Node] = []
                    step: Node | None = node
                    while step is not None:
                        path.append(step)
                        step = came_from[step]
                    return path[::-1]
                if target in stuck and target not in came_from:
                    came_from[target] = node
                    todo.append(target)
        return []

    def _reachable(self, start: Node, among: set[Node]) -> set[Node]:
        found, todo = {start}, [start]
        for node in todo:
            for target in self.edges[node].targets:
                if target in among and target not in found:
                    found.add(target)
                    todo.append(target)
        return found

    # Findings.

    def deadlock(self, cycle: list[Node], in_cycles: Iterable[Node]) -> dict[str, Any]:
        workers = list(dict.fromkeys(node[1] for node in cycle if node[0] in ("thread", "worker")))
        threads = {node for node in cycle if node[0] == "thread"}
        if len(workers) == 1:
            what = f"{plural(len(threads), 'thread')} of {workers[0]} wait for each other"
            what = what if len(threads) > 1 else f"a thread of {workers[0]} waits for itself"
        else:
            what = f"{listed(workers)} wait for each other in a circle"
        steps = self.steps(cycle)
        outside = len(self._waiting_for(cycle, self._stuck - set(in_cycles)))
        also = f" {plural(outside, 'other thread')} {'waits' if outside == 1 else 'wait'} for them." if outside else ""
        left = [row["left_s"] for row in self._rows_of(cycle) if row.get("left_s") is not None]
        ends = f" The time-out of a call ends it in {age(min(left))}." if left else ""
        return _finding("deadlock", f"Deadlock: {what}.{also}{ends}", workers, steps)

    def _waiting_for(self, cycle: list[Node], among: set[Node]) -> set[Node]:
        """Return the threads of `among` that wait, directly or through other nodes, for a node of a cycle."""
        return {node for node in self._waiters_of(cycle, among) if node[0] == "thread"}

    def _waiters_of(self, nodes: list[Node], among: set[Node]) -> set[Node]:
        """Return the nodes of `among` that wait, directly or through other nodes, for one of these nodes."""
        waiters: dict[Node, list[Node]] = {}
        for node in among:
            for target in self.edges[node].targets:
                waiters.setdefault(target, []).append(node)
        found: set[Node] = set()
        todo = list(nodes)
        for node in todo:
            for waiter in waiters.get(node, []):
                if waiter not in found:
                    found.add(waiter)
                    todo.append(waiter)
        return found

    def _rows_of(self, nodes: Iterable[Node]) -> list[Mapping[str, Any]]:
        return [self._calls_out[node[1:]] for node in nodes if node[0] == "call" and node[1:] in self._calls_out]

    def steps(self, nodes: Sequence[Node]) -> list[dict[str, Any]]:
        """Return the steps of a chain, one for each thread. The step of a thread also describes its awaited call."""
        found = []
        for index, node in enumerate(nodes):
            if node[0] == "thread":
                found.append(self._step(node, nodes[index + 1 :]))
            elif node[0] == "worker" and node[1] not in self._reports:
                found.append(_step(node[1], "does not answer"))
            elif node[0] == "queue":
                report = self._reports[node[1]]
                busy = int(number(table(report, "pool"), "threads"))
                waiting = plural(reading.queued(report), "call")
                found.append(_step(node[1], f"{waiting} in the queue, because all {busy} threads of the pool are busy"))
        return found

    def _step(self, node: Node, later: Sequence[Node]) -> dict[str, Any]:
        _, worker, tid = node
        thread = self._threads[worker].get(tid)
        if thread is None:
            return _step(worker, f"thread {tid}, which has ended or is not in the report")
        frame = reading.program_frame(thread)
        edge = self.edges.get(node)
        if edge is not None:
            does = edge.text
            if later and later[0][0] == "call" and (follows := self._call_text(later[0])):
                does += f", {follows}"
        else:
            cores = reading.cores(self._earlier.get(worker), self._reports[worker], tid)
            does = reading.state(thread, cores)
        where = f" in {reading.place(frame)}" if frame else ""
        serves = thread.get("serves") or []
        serving = f", serving call {serves[-1][1]} of {serves[-1][0]}" if serves else ""
        name = thread.get("name") or "thread"
        step = _step(worker, f"thread {tid} ({name}){serving}:{where} {does}")
        step |= {"tid": tid, "thread": thread.get("name") or ""}
        if frame:
            step |= {"function": frame.get("function"), "file": frame.get("file"), "line": frame.get("line")}
        if edge is not None and edge.targets and edge.targets[0][0] == "call":
            step["call"] = edge.targets[0][3]
        return step

    def _call_text(self, call: Node) -> str:
        """Return the words for the state of a call that no thread serves; it may be empty."""
        edge = self.edges.get(call)
        if edge is None:
            state = self._calls_out.get(call[1:], {}).get("state")
            if state == "held":
                return f"which {call[1]} holds back because {call[2]} has too many bytes waiting"
            if state == "unsent":
                return "which is not sent yet"
            return f"which is on its way, or waits in a queue of {call[2]}" if call[2] in self._reports else ""
        return "" if edge.text == "is served" else f"which {edge.text}"

    def kept_gils(self) -> list[dict[str, Any]]:
        findings = []
        for name, report in self._reports.items():
            gil = table(report, "gil")
            if gil.get("is_free") is not False:
                continue
            holder = self._gil_holder(name)
            waited = age(max(0.3, number(gil, "waited_s")))
            thread = self._threads[name].get(holder, {})
            frame = reading.program_frame(thread)
            who = reading.place(frame) if frame else f"thread {holder}" if holder else "a function"
            callers = sorted({str(row.get("from")) for row in rows(report, "calls_in")})
            waiting = f" {listed(callers)} {'waits' if len(callers) == 1 else 'wait'} for it." if callers else ""
            text = f"{name}: {who} keeps the GIL (for {waited} at least): no other Python of {name} runs.{waiting}"
            steps = self.steps([("thread", name, holder)]) if holder else []
            findings.append(_finding("gil", text, [name, *callers], steps))
        return findings

    def lost_workers(self) -> list[dict[str, Any]]:
        findings = []
        for name, witnesses in sorted(self.lost.items()):
            calls = sum(callee == name for _, callee, _ in self._calls_out)
            waiting = f" {plural(calls, 'call')} to it {'is' if calls == 1 else 'are'} unanswered." if calls else ""
            text = f"{name} is lost, as {witnesses} of {plural(len(self._reports), 'worker')} say.{waiting}"
            findings.append(_finding("lost", text, [name], []))
        return findings

    def full_pools(self) -> list[dict[str, Any]]:
        findings = []
        for name, report in self._reports.items():
            before = self._earlier.get(name)
            if not reading.is_pool_full(report) or (before is not None and not reading.is_pool_full(before)):
                continue
            ages = [number(row, "age_s") for row in rows(report, "calls_in") if row.get("state") == "running"]
            if min(ages, default=0.0) < LONG_WAIT_S:
                continue  # The pool is busy, but its calls end.
            pool = table(report, "pool")
            places = Counter(
                reading.place(reading.program_frame(thread)) or "no Python"
                for thread in self._threads[name].values()
                if thread.get("serves")
            )
            where = f" Most of its threads are in {places.most_common(1)[0][0]}." if places else ""
            count, all_threads, blocked = (
                reading.queued(report),
                int(number(pool, "threads")),
                int(number(pool, "blocked")),
            )
            wait = f"{plural(count, 'call')} {'waits' if count == 1 else 'wait'}"
            text = (
                f"{name}: the pool is full. {wait} in the queue, because all {all_threads} threads are busy, "
                f"{blocked} of them waiting for calls of their own.{where}"
            )
            findings.append(_finding("full_pool", text, [name], []))
        return findings

    def stragglers(self) -> list[dict[str, Any]]:
        found: dict[tuple[str, tuple[str, ...]], dict[str, float]] = {}  # -> {worker that waits: seconds}
        for (name, tid), barrier in self._barriers.items():
            thread = self._threads[name][tid]
            waits = thread.get("waits")
            before = reading.threads(self._earlier.get(name, {})).get(tid, {})
            seconds = number(waits, "age_s") if isinstance(waits, Mapping) else 0.0
            # A wait for a Python event has no age: it is long if the earlier report has it, too.
            is_long = seconds >= LONG_WAIT_S or (seconds == 0.0 and reading.shutdown_of(before))
            if is_long and (missing := tuple(self._missing(barrier))):
                waiting = found.setdefault((barrier, missing), {})
                waiting[name] = max(seconds, waiting.get(name, 0.0))
        findings = []
        for (barrier, missing), waiting in found.items():
            barrier = barrier.split()[0]
            longest = max(waiting.values())
            since = f" ({age(longest)})" if longest else ""
            wait = "waits" if len(waiting) == 1 else "wait"
            text = (
                f"{listed(sorted(waiting))} {wait} for all workers in {barrier}{since}: "
                f"{listed(list(missing))} {'has' if len(missing) == 1 else 'have'} not arrived."
            )
            steps = [step for name in missing for step in self._steps_from(("worker", name))]
            findings.append(_finding("straggler", text, list(missing), steps))
        return findings

    def _steps_from(self, node: Node) -> list[dict[str, Any]]:
        return self.steps(self._chain(node)) or [_step(node[1], "its report does not tell what its main thread does")]

    def _chain(self, node: Node) -> list[Node]:
        """Follow the first target of each edge from a node on; end at a node without target, or before a repetition."""
        chain = [node]
        while (edge := self.edges.get(chain[-1])) and edge.targets and edge.targets[0] not in chain:
            chain.append(edge.targets[0])
        return chain

    def longest_wait(self) -> list[dict[str, Any]]:
        waits: list[tuple[float, int, Node]] = []
        for name, threads in self._threads.items():
            for tid, thread in threads.items():
                waiting = thread.get("waits")
                node: Node = ("thread", name, tid)
                if (name, tid) in self._barriers:
                    continue  # stragglers() reports it
                if isinstance(waiting, Mapping) and self.edges.get(node) and self.edges[node].targets:
                    waits.append((number(waiting, "age_s"), 1, node))
        waits += [(number(row, "age_s"), 0, ("call", *key)) for key, row in self._calls_out.items()]
        if not waits or max(waits, key=lambda wait: wait[:2])[0] < LONG_WAIT_S:
            return []
        seconds, _, node = max(waits, key=lambda wait: wait[:2])
        chain = self._chain(node)
        steps = self.steps(chain)
        end = self._end_of(chain)
        if node[0] == "call":
            caller, callee, call = node[1:]
            function = self._calls_in.get((caller, callee, call), {}).get("function")
            what = f"{function} on {callee}" if function else callee
            text = f"The oldest call is call {call} of {caller} to {what} ({age(seconds)}){end}"
        else:
            text = f"The longest wait is that of {node[1]} ({age(seconds)}){end}"
        return [_finding("longest_wait", text, list(dict.fromkeys(n[1] for n in chain)), steps)]

    def _end_of(self, chain: list[Node]) -> str:
        last = chain[-1]
        edge = self.edges.get(last)
        if last[0] == "thread" and last[2] in self._threads.get(last[1], {}):
            thread = self._threads[last[1]][last[2]]
            where = reading.place(reading.program_frame(thread))
            if edge is None:
                cores = reading.cores(self._earlier.get(last[1]), self._reports[last[1]], last[2])
                does, _, how_much = reading.state(thread, cores).partition(", ")
                where = f" in {where}" if where else ""
                return f". In the end it is {last[1]} that {does}{where}{f', {how_much}' if how_much else ''}."
            return f". In the end {last[1]} {edge.text}{f' in {where}' if where else ''}."
        if last[0] == "call":
            return f": the call {self._call_text(last).removeprefix('which ')}." if self._call_text(last) else "."
        if last[0] == "worker" and last[1] not in self._reports:
            return f". In the end it is {last[1]}, which does not answer."
        return "."


def _silent(reports: Reports, members: Sequence[str], lost: Iterable[str]) -> list[dict[str, Any]]:
    texts = {name: f"{name} does not answer: {reason}." for name, reason in reading.silent(reports).items()}
    for name in sorted(set(members) - set(reports)):
        texts[name] = f"{name} belongs to the group, but gave no report."
    return [_finding("silent", text, [name], []) for name, text in texts.items() if name not in lost]


def _finding(kind: str, text: str, workers: list[str], steps: list[dict[str, Any]]) -> dict[str, Any]:
    return {"kind": kind, "text": text, "workers": workers, "steps": steps}


def _step(worker: str, text: str) -> dict[str, Any]:
    return {
        "worker": worker, "tid": 0, "thread": "", "function": None, "file": None, "line": None, "call": 0, "text": text
    }  # fmt: skip


def _from_smallest(cycle: list[Node]) -> list[Node]:
    """Return the cycle, rotated to begin with the thread that is first in the order of workers' names."""
    starts = [index for index, node in enumerate(cycle) if node[0] == "thread"] or [0]
    first = min(starts, key=lambda index: str(cycle[index]))
    return [*cycle[first:], *cycle[:first]]


def _identity(cycle: list[Node]) -> frozenset[Node]:
    return frozenset(cycle)


__all__ = ["LONG_WAIT_S", "Report", "exit_code", "explain", "text"]
