"""How large rooms and files may be, so that one can walk through them."""

from pathlib import Path

import colossax

ROOMS = [path for path in Path(colossax.__file__).parent.iterdir() if path.is_dir()]
KERNELS = {"mosaic_gpu", "mosaic_gpu.py"}
"""The honest exception."""


def lines(file):
    return len(file.read_text(encoding="utf-8").splitlines())


def test_no_large_room_lies_flat():
    for room in ROOMS:
        if sum(map(lines, room.rglob("*.py"))) > 5000:
            assert len(list(room.glob("*.py"))) <= 15, room.name


def test_no_file_is_long():
    long = [
        f"{file.name}: {count} lines"
        for room in ROOMS
        for file in room.rglob("*.py")
        if (count := lines(file)) > 400 and KERNELS.isdisjoint(file.parts)
    ]
    assert not long
