"""All outputs of a lake, and the thread that brings them forward beside the rounds of a sync.

Rounds do not wait for outputs, and an output that fails does not stop them: it stays behind, the reason is
logged, and it is tried again. Only the process that holds the lake writes to its outputs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from upper.apps.lake.derived import DerivedOutput, bring_forward
from upper.apps.lake.lake import Lake
from upper.apps.lake.latest import RefreshPolicy
from upper.apps.lake.position import LakePosition
from upper.apps.lake.tables import LakeTable
from upper.errors import UpperError
from upper.pipeline.stopping import WorkStopped
from upper.pipeline.target import Runner

log = logging.getLogger(__name__)

LOOK_EVERY = 5.0  # seconds between two looks for outputs that were created or dropped
SHARE = 4  # the pause after a step, as a multiple of its time: outputs use at most a fifth of a worker
REST = 60.0  # seconds of a pause, at most
RETRY = 5.0  # seconds after which an output that failed is tried again


class OutputKind(Protocol):
    """The outputs of one kind: a module."""

    def outputs(self, lake: Lake, /) -> Mapping[str, Callable[[], DerivedOutput[Any]]]: ...
    def tables(self, lake: Lake, /) -> Sequence[LakeTable]: ...
    def remove_orphans(self, lake: Lake, /) -> None: ...


def _kinds() -> tuple[OutputKind, ...]:
    from upper.apps.index import output as index  # imported here, because they import this module
    from upper.apps.typed import outputs as typed
    from upper.apps.views import materialize

    return materialize, index, typed


def known_outputs(lake: Lake) -> dict[str, Callable[[], DerivedOutput[Any]]]:
    """How each output of a lake is opened, by a text that changes whenever its definition does."""
    return {key: opening for kind in _kinds() for key, opening in kind.outputs(lake).items()}


def open_outputs(lake: Lake) -> list[DerivedOutput[Any]]:
    """All outputs. The lake must be held: those that are missing are made."""
    return [opening() for opening in known_outputs(lake).values()]


def derived_tables(lake: Lake) -> list[LakeTable]:
    """The Delta tables among the outputs."""
    return [table for kind in _kinds() for table in kind.tables(lake)]


def refresh_outputs(lake: Lake, runner: Runner) -> int:
    """Bring all outputs to the position of `changes`; how many there are."""
    found = open_outputs(lake)
    for output in found:
        bring_forward(lake, output, runner)
    return len(found)


def history_positions(lake: Lake) -> list[LakePosition]:
    """The positions of outputs that need every row of `changes`."""
    from upper.apps.typed.outputs import history_positions as found

    return found(lake)


def rejected_rows(lake: Lake) -> int:
    """How many live values do not fit a typed table."""
    from upper.apps.typed.outputs import rejected_rows as counted

    return counted(lake)


class OutputFollower:
    """Brings the outputs of one lake forward after its commits."""

    def __init__(self, lake: Lake, runner: Runner, policy: RefreshPolicy | None) -> None:
        self._lake, self._runner, self._policy = lake, runner, policy
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._open: dict[str, DerivedOutput[Any]] = {}
        self._troubles: dict[str, str] = {}
        self._looked = float("-inf")
        self._unopened = False  # an output could not be opened
        self.rejected = 0  # live values that did not fit a typed table, after the last step
        self._thread = threading.Thread(target=self._run, name="lake-outputs", daemon=True)

    def go_back(self) -> None:
        """Before the first round: roll outputs back that are ahead, because another program restored
        `changes`. Later, when the lake has as many commits again, this could not be detected."""
        batch = self._lake.changes.lake_position.batch
        self._look_again()
        if any(output.snapshot()[0].batch > batch for output in self._open.values()):
            self.step()

    def start(self) -> None:
        self._wake.set()
        self._thread.start()

    def committed(self) -> None:
        """A round committed."""
        self._wake.set()

    def stop(self, within: float) -> bool:
        """End after the step under way; False if that takes longer."""
        self._stopping.set()
        self._wake.set()
        self._thread.join(within)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait(LOOK_EVERY)
            self._wake.clear()
            began = time.monotonic()
            failed = not self.step()
            took = time.monotonic() - began
            self._stopping.wait(max(RETRY if failed else 0.0, min(REST, SHARE * took)))

    def step(self) -> bool:
        """Bring each output forward as far as it is due; False if one failed."""
        good = self._look_again() and not self._unopened
        for key, output in list(self._open.items()):
            if self._stopping.is_set():
                break
            try:
                bring_forward(
                    self._lake,
                    output,
                    self._runner,
                    policy=self._policy,
                    now=time.time(),
                    stopping=self._stopping.is_set,
                )
                if self._troubles.pop(key, None):
                    log.warning("%s follows the lake again", output.name)
            except WorkStopped:
                return False
            except Exception as error:  # noqa: BLE001 (an output never stops the sync)
                good = False
                if not self._stopping.is_set():
                    self._failed(key, error, output.name)
        self.rejected = rejected_rows(self._lake)
        return good

    def _look_again(self) -> bool:
        try:
            self._look()
            return True
        except UpperError as error:
            self._failed("outputs", error)
            return False

    def _failed(self, key: str, error: Exception, name: str = "outputs") -> None:
        if self._troubles.get(key) != str(error):
            log.warning("%s: %s; it stays behind, and is tried again", name, error)
        self._troubles[key] = str(error)
        self._open.pop(key, None)  # opened again by the next step
        self._looked = float("-inf")

    def _look(self) -> None:
        """Open outputs that were created meanwhile, and forget those that were dropped."""
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY:
            return
        known = known_outputs(self._lake)
        dropped = self._open.keys() - known.keys()
        for key in dropped:
            del self._open[key]
        if dropped or self._looked == float("-inf"):
            remove_orphans(self._lake)
        self._unopened = False
        self._looked = now
        for key, opening in known.items():
            if key not in self._open:
                try:
                    self._open[key] = opening()
                except UpperError as error:
                    self._unopened = True
                    self._failed(key, error, key.rpartition(" ")[0])


def remove_orphans(lake: Lake) -> None:
    """Remove what dropped outputs left. The lake must be held."""
    for kind in _kinds():
        kind.remove_orphans(lake)
