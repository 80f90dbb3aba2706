"""Copies and kernels are told apart in traces of both forms; nothing is made of a trace without."""

import gzip
import json

import pytest
from jax.profiler import ProfileData


@pytest.fixture
def trace(script):
    return script("device_trace")


UP = "kind_src:pinned kind_dst:device size:1024 dest:0 async:1"
DOWN = "kind_src:device kind_dst:pinned size:512 dest:0 async:1"
EVENTS = [
    ("MemcpyH2D", 5.0, UP),
    ("MemcpyH2D", 3.0, UP),
    ("MemcpyD2H", 2.0, DOWN),
    ("MemcpyOther", 1.0, DOWN),
    ("MemcpyD2D", 1.0, "kind_src:device kind_dst:device size:8 dest:0 async:1"),
    ("Memset", 1.0, ""),
    ("loop_add_fusion", 4.0, ""),
]
"""Names, microseconds, details."""


def as_xplane(folder, plane="/device:GPU:0", line="Stream #15(MemcpyH2D)"):
    names = "".join(
        f'event_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}\n'
        for i, (name, _, _) in enumerate(EVENTS)
    )
    events = "".join(
        f"events {{ metadata_id: {i} offset_ps: {i}000 duration_ps: {int(us * 1e6)}"
        f' stats {{ metadata_id: 1 str_value: "{details}" }} }}\n'
        for i, (_, us, details) in enumerate(EVENTS)
    )
    stats = 'stat_metadata { key: 1 value { id: 1 name: "memcpy_details" } }\n'
    lines = f'lines {{ name: "{line}" {events} }}\nlines {{ name: "XLA Ops" {events} }}\n'
    text = f'planes {{ name: "{plane}"\n{stats}{names}{lines} }}'
    (folder / "a.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace(text))


def as_json(folder):
    named = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}},
        {"ph": "M", "pid": 1, "tid": 2, "name": "thread_name", "args": {"name": "Stream #15"}},
        {"ph": "M", "pid": 1, "tid": 3, "name": "thread_name", "args": {"name": "XLA Ops"}},
        {"ph": "M", "pid": 7, "name": "process_name", "args": {"name": "/host:CPU"}},
        {"ph": "M", "pid": 7, "tid": 2, "name": "thread_name", "args": {"name": "Stream #1"}},
    ]
    events = [
        {"ph": "X", "pid": p, "tid": t, "name": n, "dur": us, "args": {"memcpy_details": details}}
        for p, t in ((1, 2), (1, 3), (7, 2))
        for n, us, details in EVENTS
    ]
    text = json.dumps({"traceEvents": [*named, *events, {}]}).encode()
    (folder / "a.trace.json.gz").write_bytes(gzip.compress(text))


@pytest.mark.parametrize("write", [as_xplane, as_json])
def test_copies_and_kernels_are_counted_once(trace, tmp_path, write):
    write(tmp_path)
    found = trace.summary(tmp_path)
    kinds = found["kinds"]
    assert {name: row["count"] for name, row in kinds.items()} == {
        "h2d": 2,
        "d2h": 2,
        "d2d": 1,
        "kernel": 1,
    }
    assert (kinds["h2d"]["bytes"], kinds["d2h"]["bytes"]) == (2048, 1024)
    assert kinds["h2d"]["seconds"] == pytest.approx(8e-6)
    (longest,) = found["longest_kernels"]
    assert longest == {"name": "loop_add_fusion", "seconds": pytest.approx(4e-6)}


def test_the_whole_is_carried_or_it_is_not(trace, tmp_path):
    as_xplane(tmp_path)
    found = trace.summary(tmp_path)
    assert trace.carried(found, to_device=2048, to_host=1024) is True
    assert trace.carried(found, to_device=4096, to_host=1024) is False
    assert trace.carried(found, to_device=2048, to_host=2048) is False


def test_copies_without_a_size_prove_nothing(trace):
    found = trace.totals([trace.Event("MemcpyH2D", 1.0, "")])
    assert found["kinds"]["h2d"]["without_size"] == 1
    assert trace.carried(found, to_device=0, to_host=0) is None


@pytest.mark.parametrize("change", [{"plane": "/host:CPU"}, {"line": "XLA Modules"}])
def test_a_trace_without_streams_says_so(trace, tmp_path, change):
    as_xplane(tmp_path, **change)
    found = trace.summary(tmp_path)
    assert found == {"failed": "a.xplane.pb: no GPU's stream in it"}
    assert trace.carried(found, to_device=0, to_host=0) is None


def test_a_damaged_trace_gives_way_to_the_other_form(trace, tmp_path):
    as_json(tmp_path)
    (tmp_path / "a.xplane.pb").write_bytes(b"no proto")
    assert trace.summary(tmp_path)["source"] == "a.trace.json.gz"
    assert trace.summary(tmp_path / "none") == {"failed": "the profiler wrote no trace"}
