"""The live view of `torchrpc top`, with textual (the extra `torchrpc[top]`).

A worker thread of textual asks the workers of the group, so the keys work while a worker is slow to answer. Only the
thread of the event loop changes what is shown.
"""

from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Static

from torchrpc._untrusted import printable
from torchrpc.observe import _threads, _top


class StackScreen(Screen[None]):
    """The stacks of one worker."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "app.pop_screen", "Back"),
        Binding("r", "load", "Look again"),
        Binding("q", "app.quit", "Quit"),
    ]

    def __init__(self, group: Any, worker: str, timeout: float) -> None:
        super().__init__()
        self._group, self._worker, self._timeout_s = group, worker, timeout
        self.shown = ""

    def compose(self) -> ComposeResult:
        yield VerticalScroll(Static(f"Asking {self._worker} ...", id="stacks", markup=False))
        yield Footer()

    def on_mount(self) -> None:
        self.action_load()

    @work(thread=True, exclusive=True)
    def action_load(self) -> None:
        try:
            report: Any = self._group.report(self._worker, stacks=True, timeout=self._timeout_s)
        except Exception as error:  # shown instead of the stacks
            report = error
        self.app.call_from_thread(self._show, _threads.text({self._worker: report}))

    def _show(self, text: str) -> None:
        self.shown = text
        self.query_one("#stacks", Static).update(text)


class TopApp(App[None]):
    """The workers, functions and oldest calls of a group."""

    TITLE = "torchrpc top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #summary { height: 1; background: $primary; color: $text; text-style: bold; padding: 0 1; }
    #workers { height: 2fr; }
    #functions { height: 1fr; max-height: 12; }
    #calls { height: 1fr; max-height: 13; }
    #metrics { height: 1; color: $text-muted; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort", "Sort"),
        Binding("enter", "stacks", "Stacks of the worker", priority=True),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, group: Any, every_s: float, timeout_s: float, by: str = "worker") -> None:
        super().__init__()
        self._group, self._every_s, self._timeout_s = group, every_s, timeout_s
        self._earlier: Any = None
        self.by = by
        self.shown: dict[str, Any] | None = None
        self.failure = ""
        self._is_looking = False

    def compose(self) -> ComposeResult:
        yield Static("Asking the workers ...", id="summary", markup=False)
        yield DataTable[Text](id="workers", cursor_type="row")
        yield Static(_top.METRICS, id="metrics", markup=False)
        yield DataTable[Text](id="functions", cursor_type="none")
        yield DataTable[Text](id="calls", cursor_type="none")
        yield Footer()

    def on_mount(self) -> None:
        self._main = self.screen  # the screen of the tables, below StackScreen
        for name, columns, left in (("#workers", _top.WORKER_COLUMNS, 2), ("#functions", _top.FUNCTION_COLUMNS, 1)):
            titles = [Text(each, justify="left" if column < left else "right") for column, each in enumerate(columns)]
            self._main.query_one(name, DataTable).add_columns(*titles)
        self._main.query_one("#calls", DataTable).add_columns(*_top.CALL_COLUMNS)
        self.look()
        self.set_interval(self._every_s, self.look)

    @work(thread=True, group="look")
    def look(self) -> None:
        """Ask all workers and show their reports. A timer calls it; does nothing while the last call still waits."""
        if self._is_looking:
            return
        self._is_looking = True
        try:
            reports = self._group.reports(timeout=self._timeout_s)
            shown = _top.snapshot(reports, self._earlier, [member.name for member in self._group.members])
            self._earlier = reports
        except Exception as error:  # shown above the last tables
            self.call_from_thread(self._show_failure, printable(str(error)))
        else:
            self.call_from_thread(self._show, shown)
        finally:
            self._is_looking = False

    def _show_failure(self, text: str) -> None:
        if not self._main.query("#summary"):
            return
        self.failure = text
        self._main.query_one("#summary", Static).update(f"The last look failed: {text}")

    def _show(self, shown: dict[str, Any]) -> None:
        if not self._main.query("#summary"):
            return  # The app is closing.
        self.shown = shown
        sort = "" if self.by == "worker" else f", sorted by {self.by}"
        self._main.query_one("#summary", Static).update(_top.summary(shown) + sort)
        self._main.query_one("#metrics").display = not shown["functions"]
        self._main.query_one("#functions").display = bool(shown["functions"])
        self._main.query_one("#calls").display = bool(shown["calls"])
        workers = _top.sorted_workers(shown, self.by)
        self._fill("#workers", [_top.worker_cells(row) for row in workers], 2, [row["worker"] for row in workers])
        self._fill("#functions", [_top.function_cells(row) for row in shown["functions"][:20]], 1)
        self._fill("#calls", [_top.call_cells(row) for row in shown["calls"]], len(_top.CALL_COLUMNS))

    def _fill(self, name: str, lines: list[list[str]], left: int, keys: "list[str] | None" = None) -> None:
        """Replace a table's rows; the cursor stays on its row's key. Columns after the first `left` are numbers."""
        table = self._main.query_one(name, DataTable)
        selected = self._selected(table)
        place = table.scroll_offset
        table.clear()
        for index, line in enumerate(lines):
            cells = [Text(cell, justify="left" if column < left else "right") for column, cell in enumerate(line)]
            table.add_row(*cells, key=keys[index] if keys else None)
        if keys and selected in keys:
            table.move_cursor(row=keys.index(selected), scroll=False)
        table.scroll_to(place.x, place.y, animate=False)

    @staticmethod
    def _selected(table: "DataTable[Any]") -> "str | None":
        if not table.row_count or table.cursor_row >= table.row_count:
            return None
        return table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value

    def action_sort(self) -> None:
        self.by = _top.SORTS[(_top.SORTS.index(self.by) + 1) % len(_top.SORTS)]
        if self.shown is not None:
            self._show(self.shown)

    def action_stacks(self) -> None:
        if isinstance(self.screen, StackScreen):
            return
        worker = self._selected(self._main.query_one("#workers", DataTable))
        if worker is not None:
            self.push_screen(StackScreen(self._group, worker, self._timeout_s))


def run(group: Any, every_s: float, timeout_s: float, by: str) -> int:
    """Show the group until q is pressed."""
    app = TopApp(group, every_s, timeout_s, by)
    app.run()
    return app.return_code or 0
