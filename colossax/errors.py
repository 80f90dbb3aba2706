"""Errors that a user's input can cause.

Every message is one sentence that names the culprit, what was found and a remedy. The command
line prints it and exits 2; any other exception is a fault of this library and keeps its traceback.
"""


class InputError(ValueError):
    """The user's input cannot be honoured; the message says which, why and what would work."""


class PlanError(InputError):
    """A plan does not fit its model, its devices or itself."""


class PlanWarning(UserWarning):
    """A plan runs, but part of it does nothing; the message says which and what would help."""


class DataError(InputError):
    """A data source cannot be read or holds nothing usable."""


class CheckpointError(InputError):
    """A checkpoint is missing, damaged, or of another model, tokenizer or run."""


class DamagedCheckpointError(CheckpointError):
    """What a checkpoint holds is not what was written: bytes changed, or are gone."""


class CheckpointWarning(UserWarning):
    """A checkpoint is read, but not all that is checked today can be; the message says what."""


class WeightsError(InputError):
    """Foreign weights (safetensors) lack, exceed or contradict what the model declares."""


class OffloadError(InputError):
    """The host or the disk cannot hold, keep or move the state it was given."""


class DamagedStoreError(OffloadError):
    """What a disk store holds is not what was written; restore from the last checkpoint.

    Attributes:
        path: File of the store.
        record: Index of the damaged record, which is its layer; None where it is not one record.
        epoch: Epoch that the record should have been of; None where it is not one epoch.
    """

    def __init__(
        self, message: str, *, path: str, record: int | None = None, epoch: int | None = None
    ) -> None:
        super().__init__(message)
        self.path, self.record, self.epoch = path, record, epoch
