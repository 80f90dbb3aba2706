"""States saved by a loop of one's own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from colossax.checkpoint import Checkpointer
from colossax.errors import CheckpointError, InputError
from colossax.step.saving.records import StateRecords
from colossax.typing import Params, TrainState


class Saving:
    """A state on its way to disk.

    Attributes:
        path: The folder that appears there, whole, when all is written.
    """

    def __init__(self, checkpointer: Checkpointer, path: Path):
        """Watch a save that has been started."""
        self._checkpointer = checkpointer
        self.path = path

    def wait(self) -> Path:
        """Wait until it is on disk, and return its folder.

        Raises:
            CheckpointError: It could not be written; what was saved before is still there.
        """
        self._checkpointer.close()
        return self.path


class OwnSaves:
    """Saves one state after another, and restores them."""

    def __init__(self, records: StateRecords, documents: Mapping[str, Any]):
        """Write nothing yet.

        Args:
            records: Of the state.
            documents: JSON values beside each.
        """
        self._records = records
        self._documents = documents
        self._last: Saving | None = None

    def save(
        self, folder: Path | str, state: TrainState, *, keep: int | None, wait: bool
    ) -> Saving:
        """See `Step.save`."""
        if keep is not None and keep < 1:
            raise InputError(f"step.save: keep is {keep}; give 1 or more, or None, which keeps all")
        self._settle()
        done = int(state["step"])
        beside = not wait and not self._records.on_host
        checkpointer = Checkpointer(folder, keep=keep, asynchronous=beside)
        path = checkpointer.directory / str(done)
        if done in checkpointer.steps():
            raise CheckpointError(
                f"checkpoint '{path}': a state after {done} steps is there already; delete it, or"
                " save to another folder"
            )
        checkpointer.save(done, self._records.pairs(state), self._documents)
        saving = Saving(checkpointer, path)
        if beside:
            self._last = saving
        else:
            saving.wait()
        return saving

    def restore(self, folder: Path | str, at: int | None, base: Params | None) -> TrainState:
        """See `Step.restore`."""
        self._settle()
        checkpointer = Checkpointer(folder)
        done = checkpointer.latest() if at is None else at
        return self._records.restored(checkpointer, done, base)

    def _settle(self) -> None:
        """Wait for the save under way, and hand out its failure."""
        last, self._last = self._last, None
        if last is not None:
            last.wait()
