"""`observe._stacks`: which thread holds the lock for which another waits, without running code of the program."""

import contextlib
import sys
import threading
import time
import types

import pytest
from waiting import eventually

from torchrpc.observe import _stacks, _static_values

some_lock = threading.Lock()
some_table = {"a": [threading.Lock()], "b": threading.Lock()}
some_locks = [threading.Lock(), threading.Lock()]


def line_of(function, text):
    """The number of the line of a function's source that has this text."""
    with open(__file__) as file:
        lines = file.read().split("\n")
    first = function.__code__.co_firstlineno
    return next(n for n in range(first, len(lines) + 1) if text in lines[n - 1])


class Threads:
    """Threads that are stopped and joined at the end of a test."""

    def __init__(self):
        self.end = threading.Event()
        self.started = []

    def start(self, function, *args):
        """Run `function(*args)` in a thread; return the thread when it has reached a wait."""
        thread = threading.Thread(target=function, args=args, name=function.__name__, daemon=True)
        thread.start()
        self.started.append(thread)
        return thread

    def rest(self):
        self.end.wait(60)


@pytest.fixture
def threads():
    made = Threads()
    yield made
    made.end.set()
    for thread in made.started:
        thread.join(30)
    assert not any(thread.is_alive() for thread in made.started)


def row_of(thread):
    return next((row for row in _stacks.collect() if row["ident"] == thread.ident), None)


def lock_of(thread, has=lambda lock: True):
    """What `collect` says about the lock for which a thread waits, when it says something that `has` accepts."""

    def lock():
        row = row_of(thread)
        return row and row["lock"] and has(row["lock"]) and row["lock"]

    return eventually(lock)


def resting(thread):
    """Wait until a thread waits in `Threads.rest`."""

    def rests():
        row = row_of(thread)
        is_in_rest = row and any(frame["function"].endswith("rest") for frame in row["python"])
        return is_in_rest and row["lock"] and row["lock"]["kind"] == "event"

    eventually(rests)
    return thread


class Model:
    def __init__(self, lock):
        self.lock = lock
        self.__hidden = lock
        self.condition = threading.Condition()
        self.locks = {"weights": [lock]}

    def hold(self, threads):
        with self.lock:
            threads.rest()

    def hold_hidden(self, threads):
        with self.__hidden:
            threads.rest()

    def hold_item(self, threads):
        with self.locks["weights"][0]:
            threads.rest()

    def hold_acquired(self, threads):
        self.lock.acquire()
        try:
            threads.rest()
        finally:
            self.lock.release()

    def hold_later_item(self, threads, other):
        with self.lock, other:
            pass

    def want(self):
        with self.lock:
            pass

    def want_acquired(self):
        if self.lock.acquire(timeout=60):
            self.lock.release()


@pytest.mark.parametrize("hold", ["hold", "hold_hidden", "hold_item", "hold_acquired"])
@pytest.mark.parametrize("want", ["want", "want_acquired"])
@pytest.mark.parametrize("make", [threading.Lock, threading.RLock])
def test_the_holder_of_a_lock_is_named(threads, make, hold, want):
    model = Model(make())
    holder = resting(threads.start(getattr(model, hold), threads))
    lock = lock_of(threads.start(getattr(model, want)))
    assert (lock["text"], lock["kind"]) == ("self.lock", "lock")
    assert lock["holders"] == [holder.native_id] and lock["holder_idents"] == [holder.ident]
    text = "self.lock.acquire()" if hold == "hold_acquired" else "with self."
    if hold != "hold_acquired" or make is threading.Lock:
        assert lock["taken_at"] == [f"{__file__}:{line_of(getattr(Model, hold), text)}"]


def test_two_threads_that_wait_for_each_other(threads):
    first, second = threading.Lock(), threading.Lock()
    barrier = threading.Barrier(2)
    cycle = threading.Event()

    def take(a, b):
        with a:
            barrier.wait()
            while not cycle.is_set():
                if b.acquire(timeout=1):
                    b.release()

    one, two = threads.start(take, first, second), threads.start(take, second, first)
    for thread, other in ((one, two), (two, one)):
        assert lock_of(thread, lambda lock: lock["kind"] == "lock")["holder_idents"] == [other.ident]
    cycle.set()


def test_a_thread_that_takes_a_lock_twice_waits_for_itself(threads):
    lock = threading.Lock()

    def twice():
        with contextlib.suppress(RuntimeError), lock, lock:
            pass

    thread = threads.start(twice)
    assert lock_of(thread)["holder_idents"] == [thread.ident]
    lock.release()  # the inner block goes on, and the outer one cannot release it
    thread.join(30)


def test_the_first_item_of_a_with_statement_is_held_while_the_second_is_awaited(threads):
    model, other = Model(threading.Lock()), threading.Lock()

    def hold_other():
        with other:
            threads.rest()

    last = resting(threads.start(hold_other))
    middle = threads.start(model.hold_later_item, threads, other)
    lock = lock_of(middle)
    assert (lock["text"], lock["holder_idents"]) == ("other", [last.ident])
    assert lock_of(threads.start(model.want))["holder_idents"] == [middle.ident]


def test_a_with_statement_over_several_lines(threads):
    def want():
        with (
            some_locks[0],
            some_locks[1],
        ):
            pass

    def hold():
        with some_locks[1]:
            threads.rest()

    holder = resting(threads.start(hold))
    lock = lock_of(threads.start(want))
    assert (lock["text"], lock["holder_idents"]) == ("some_locks[1]", [holder.ident])


def test_names_of_the_module_and_items_of_its_tables(threads):
    def hold(which):
        with some_table["a"][0], some_table[which]:
            threads.rest()

    def want():
        some_table["b"].acquire(True)
        some_table["b"].release()

    holder = resting(threads.start(hold, "b"))
    lock = lock_of(threads.start(want))
    assert (lock["text"], lock["holder_idents"]) == ("some_table['b']", [holder.ident])


def test_a_thread_that_waits_for_a_notification_does_not_hold_the_condition(threads):
    condition = threading.Condition(threading.Lock())

    def await_notification():
        with condition:
            condition.wait(60)

    def hold():
        with condition:
            threads.rest()

    def want():
        with condition:
            pass

    waiter = threads.start(await_notification)
    lock = lock_of(waiter)
    assert (lock["text"], lock["kind"], lock["holders"]) == ("condition", "condition", [])
    holder = resting(threads.start(hold))
    lock = lock_of(threads.start(want))
    assert (lock["text"], lock["kind"], lock["holder_idents"]) == ("condition", "lock", [holder.ident])
    condition._waiters[0].release()  # as notify() does: now it waits for the lock
    assert lock_of(waiter, lambda lock: lock["kind"] == "lock")["holder_idents"] == [holder.ident]


def test_all_holders_of_a_semaphore_are_named(threads):
    semaphore = threading.Semaphore(2)

    def hold_in_block():
        with semaphore:
            threads.rest()

    def want():
        with semaphore:
            pass

    holders = {resting(threads.start(hold_in_block)).ident, resting(threads.start(hold_in_block)).ident}
    lock = lock_of(threads.start(want))
    assert (lock["text"], lock["kind"], set(lock["holder_idents"])) == ("semaphore", "semaphore", holders)


def test_the_thread_that_is_joined_is_named(threads):
    child = threads.start(threads.rest)
    lock = lock_of(threads.start(child.join))
    assert (lock["kind"], lock["text"], lock["holder_idents"]) == (
        "thread",
        "the end of the thread rest",
        [child.ident],
    )


def test_an_event_has_no_holder(threads):
    event = threading.Event()

    def want():
        event.wait(60)

    lock = lock_of(threads.start(want))
    assert (lock["kind"], lock["text"], lock["holders"]) == ("event", "event", [])
    event.set()


class Wrapper:
    """A lock of the program's own."""

    def __init__(self):
        self._lock = threading.Lock()

    def __enter__(self):
        self._lock.acquire()

    def __exit__(self, *args):
        self._lock.release()


def test_the_holder_of_a_lock_in_a_class_of_the_program_is_named(threads):
    wrapper = Wrapper()

    def hold():
        with wrapper:
            threads.rest()

    def want():
        with wrapper:
            pass

    holder = resting(threads.start(hold))
    lock = lock_of(threads.start(want))
    assert (lock["text"], lock["holder_idents"]) == ("wrapper", [holder.ident])


def test_a_module_that_another_thread_imports(threads, tmp_path, monkeypatch):
    (tmp_path / "slow_module.py").write_text("import builtins\nbuiltins.rest_of_slow_module()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("builtins.rest_of_slow_module", threads.rest, raising=False)

    def load():
        import slow_module  # noqa: F401

    try:
        holder = resting(threads.start(load))
        lock = lock_of(threads.start(load))
        assert (lock["kind"], lock["text"]) == ("import", "the import of slow_module")
        assert lock["holder_idents"] == [holder.ident]
    finally:
        threads.end.set()
        for thread in threads.started:
            thread.join(30)
        sys.modules.pop("slow_module", None)


def test_nothing_is_said_about_a_lock_that_is_not_awaited(threads):
    lock = threading.Lock()

    def hold_in_one_line():
        with lock: threads.rest()  # noqa: E701  # fmt: skip

    def released():
        with lock:
            pass
        threads.rest()

    assert lock_of(resting(threads.start(released)))["kind"] == "event"  # what rest() waits for
    assert lock_of(resting(threads.start(hold_in_one_line)))["kind"] == "event"


def test_no_holder_is_named_where_the_source_does_not_tell(threads):
    lock = threading.Lock()
    released, taken = threading.Event(), threading.Event()

    def take_and_return():
        take = lock.acquire
        take()
        taken.set()

    def may_have_failed():
        if not lock.acquire(timeout=0.001):
            threads.rest()

    def released_in_block():
        with contextlib.suppress(RuntimeError), lock:
            lock.release()
            released.set()
            taken.wait(60)
            threads.rest()

    def want():
        with lock:
            pass

    releasing = threads.start(released_in_block)
    assert released.wait(30)
    threads.start(take_and_return)
    resting(releasing)
    resting(threads.start(may_have_failed))
    assert lock_of(threads.start(want))["holders"] == []
    lock.release()


def test_no_code_of_the_program_runs(threads):
    ran = []

    class Prying:
        def __init__(self):
            object.__setattr__(self, "real", threading.Lock())

        @property
        def lock(self):
            if threading.current_thread() is threading.main_thread():
                ran.append("property")
            return self.real

        def __getattr__(self, name):
            if threading.current_thread() is threading.main_thread():
                ran.append("__getattr__")
            return self.real

    class Hiding(Prying):
        def __getattribute__(self, name):
            if threading.current_thread() is threading.main_thread():
                ran.append("__getattribute__")
            return object.__getattribute__(self, "real")

    class Keyed(dict):
        def __missing__(self, key):
            if threading.current_thread() is threading.main_thread():
                ran.append("__missing__")
            return some_lock

    class Code:
        __slots__ = ("lock",)

    class Posing(types.ModuleType):
        @property
        def lock(self):
            ran.append("module property")

    prying, hiding, keyed, slotted = Prying(), Hiding(), Keyed(), Code()
    slotted.lock = some_lock

    def hold():
        with prying.real, some_lock, object.__getattribute__(hiding, "real"):
            threads.rest()

    def want_property():
        with prying.lock:
            pass

    def want_computed():
        with prying.anything:
            pass

    def want_hidden():
        with hiding.real:
            pass

    def want_missing():
        with keyed["x"]:
            pass

    def want_slot():
        with slotted.lock:
            pass

    holder = resting(threads.start(hold))
    waiting = [threads.start(each) for each in (want_property, want_computed, want_hidden, want_missing)]
    assert lock_of(threads.start(want_slot))["holder_idents"] == [holder.ident]
    for thread in waiting:
        eventually(lambda thread=thread: row_of(thread)["python"][0]["function"].rpartition(".")[2] == thread.name)
    assert [row_of(thread)["lock"] for thread in waiting] == [None] * 4
    assert _static_values.static_attribute(Posing("m"), "lock") is _static_values.MISSING
    assert not ran


def test_a_stack_begins_at_the_innermost_frame(threads):
    thread = resting(threads.start(threads.rest))
    row = row_of(thread)
    functions = [frame["function"].rpartition(".")[2] for frame in row["python"]]
    assert functions[functions.index("rest") - 1] == "wait" and functions[-1] == "_bootstrap"
    rest = next(frame for frame in row["python"] if frame["function"].endswith("rest"))
    assert rest["file"] == __file__ and rest["line"] == line_of(Threads.rest, "self.end.wait")
    assert (row["name"], row["native_id"]) == ("rest", thread.native_id)


def test_the_caller_sees_its_own_stack_without_collect():
    row = next(row for row in _stacks.collect() if row["ident"] == threading.get_ident())
    assert row["python"][0]["function"] == "test_the_caller_sees_its_own_stack_without_collect"
    assert row["lock"] is None


def test_a_deep_stack_is_cut(threads):
    def deep(n):
        if n:
            deep(n - 1)
        else:
            threads.rest()

    row = row_of(resting(threads.start(deep, 200)))
    assert len(row["python"]) == _stacks.MAX_FRAMES


def test_looking_does_not_keep_what_a_function_deletes(threads):
    class Large:
        pass

    gone, go_on, lock = threading.Event(), threading.Event(), threading.Lock()
    import weakref

    def hold():
        with lock:
            go_on.wait(60)

    def work():
        large = Large()
        weakref.finalize(large, gone.set)
        with lock:
            pass
        del large
        threads.rest()

    holder = threads.start(hold)
    eventually(lock.locked)
    worker = threads.start(work)
    assert lock_of(worker)["holder_idents"] == [holder.ident]
    go_on.set()
    assert gone.wait(30)


def test_locals_survive_a_look_while_a_profile_function_runs(threads):
    lock, inside, go_on = threading.Lock(), threading.Event(), threading.Event()
    results = []

    def callback(frame, event, argument):
        if event == "call" and frame.f_code.co_name == "called":
            sys.setprofile(None)
            inside.set()
            go_on.wait(60)

    def called():
        pass

    def hold():
        value = 17
        with lock:
            sys.setprofile(callback)
            called()
            results.append(value)

    def want():
        with lock:
            pass

    holder = threads.start(hold)
    assert inside.wait(30)
    assert lock_of(threads.start(want))["holder_idents"] == [holder.ident]
    go_on.set()
    holder.join(30)
    assert results == [17]


def test_collect_under_load_never_fails_and_never_lies(threads):
    """Threads that take locks in one order cannot wait in a cycle, whatever the moment of a look."""
    first, second = threading.Lock(), threading.RLock()

    def work():
        while not threads.end.is_set():
            with first, second:
                time.sleep(0)  # another thread may run while this one has the locks
            second.acquire()
            second.release()

    idents = {threads.start(work).ident for _ in range(4)}
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        waits = {row["ident"]: row["lock"]["holder_idents"] for row in _stacks.collect() if row["lock"]}
        for ident in idents:
            chain = [ident]
            while len(holders := waits.get(chain[-1], [])) == 1:
                assert holders[0] not in chain, "these threads cannot wait in a circle"
                chain += holders


def test_a_thread_that_has_been_round_its_loop_does_not_count_as_waiting(threads, monkeypatch):
    """It stands at the same instruction again, but has run meanwhile: what was seen of others is not of one moment."""
    lock, rounds, find = threading.Lock(), [0], _stacks._find_holders

    def work():
        while not threads.end.is_set():
            with lock:
                rounds[0] += 1

    def is_waiting():
        frame = sys._current_frames()[worker.ident]
        return frame.f_code is work.__code__ and _stacks._site(frame) is not None

    def let_it_go_round(*args):
        before = rounds[0]
        lock.release()
        eventually(lambda: rounds[0] > before)
        lock.acquire()
        eventually(is_waiting)
        return find(*args)

    lock.acquire()
    worker = threads.start(work)
    try:
        assert lock_of(worker)["text"] == "lock"
        monkeypatch.setattr(_stacks, "_find_holders", let_it_go_round)
        assert row_of(worker)["lock"] is None
        monkeypatch.setattr(_stacks, "_find_holders", find)
        assert lock_of(worker)["text"] == "lock"
    finally:
        lock.release()


def test_a_thread_of_cpp_has_no_native_id():
    import ctypes

    rows = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    def in_thread(_):
        rows.extend(_stacks.collect())
        return 0

    libc = ctypes.CDLL(None)
    handle = ctypes.c_ulong()
    assert libc.pthread_create(ctypes.byref(handle), None, in_thread, None) == 0
    libc.pthread_join(handle, None)
    row = next(row for row in rows if row["ident"] == handle.value)
    assert row["native_id"] == 0 and row["python"][0]["function"].endswith("in_thread")
