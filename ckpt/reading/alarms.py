"""The alarms of a committed step."""

from __future__ import annotations

from ckpt.errors import DamagedError
from ckpt.format.alarms import ALARMS, Alarm, decode_alarms
from ckpt.format.commit import Attempt, Commit
from ckpt.run import Run


def step_alarms(run: Run, attempt: Attempt, commit: Commit) -> tuple[Alarm, ...]:
    """What looked wrong when the step was saved, over all ranks. DamagedError for a record that is not what it was."""
    ref = next((file for file in commit.files if file.name == ALARMS), None)
    if ref is None:
        return ()
    where = f"{run.url}/{run.key(attempt, ALARMS)}"
    found = decode_alarms(run.pinned_file(attempt, ref.name, ref.nbytes, ref.digest), where)
    if (found.step, found.attempt, found.world) != (commit.step, commit.attempt, commit.world):
        raise DamagedError(
            f"{where}: is of step {found.step} {found.attempt} of {found.world} ranks, "
            f"COMMIT says {commit.step} {commit.attempt} of {commit.world}"
        )
    return found.alarms
