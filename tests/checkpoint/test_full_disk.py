"""A disk that fills up at any moment of a save: the save has failed, the earlier step is whole."""

import os
import subprocess

import pytest
from jax.sharding import PartitionSpec as P

from colossax.checkpoint import Checkpointer
from colossax.errors import CheckpointError
from tests.checkpoint.support import assert_restored, mesh_of, plain, put, wants

OFFSETS = 50
SOME = (0, 1, 12, 25, 37, 49)
EACH = [pytest.param(at, marks=() if at in SOME else pytest.mark.sweep) for at in range(OFFSETS)]
DISK_BYTES = 4 << 20
PAGE = 4096
SPECS = [P("data"), P()]


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """A file system of a fixed size."""
    folder = tmp_path_factory.mktemp("disk")
    size = f"size={DISK_BYTES}"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def arrays():
    """96 kB in two records, sharded and not."""
    slots = [plain(f"model/params/{name}", (rows, 100)) for name, rows in (("a", 160), ("b", 80))]
    return put(slots, mesh_of(data=2), SPECS)


def free_bytes(folder):
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def fill(folder, left):
    """Take all room but so many bytes."""
    ballast = folder / "ballast"
    ballast.write_bytes(bytes(free_bytes(folder) - left))
    return ballast


@pytest.fixture(scope="module")
def need(disk):
    """What a save takes of the disk at most: as little room as it succeeds in, by pages."""
    pairs, least, most = arrays(), 0, free_bytes(disk) // PAGE
    while most - least > 1:
        middle = (least + most) // 2
        ballast = fill(disk, middle * PAGE)
        if saved(disk / "trial", 1, pairs) is None:
            most = middle
        else:
            least = middle
        ballast.unlink()
        remove(disk / "trial")
    return most * PAGE


def remove(folder):
    subprocess.run(["rm", "-rf", folder], check=True)


def saved(folder, step, pairs):
    """Save a step; the failure, or None."""
    try:
        with Checkpointer(folder, keep=None) as checkpointer:
            checkpointer.save(step, pairs, {"position": step})
    except CheckpointError as problem:
        return str(problem)
    return None


@pytest.mark.catches("full-disk-untold")
@pytest.mark.parametrize("at", EACH)
def test_a_disk_that_fills_up_leaves_the_earlier_step(devices, disk, need, at):
    folder, pairs = disk / f"run{at}", arrays()
    assert saved(folder, 1, pairs) is None
    ballast = fill(disk, need * at // OFFSETS // PAGE * PAGE)
    problem = saved(folder, 2, pairs)
    ballast.unlink()
    assert problem is not None and "No space left on device" in problem
    assert Checkpointer(folder).steps() == [1]
    asked = wants([slot for slot, _ in pairs], mesh_of(data=2), SPECS)
    assert_restored(Checkpointer(folder).restore(1, asked), asked)
    assert saved(folder, 2, pairs) is None and Checkpointer(folder).steps() == [1, 2]
    remove(folder)
