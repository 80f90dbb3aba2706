"""Memory by term of a hand-written training step: two layers, one head, two devices."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from colossax.aot.compile import Program
from colossax.aot.memory import memory_report
from colossax.aot.saved import Stack, checkpoint_stacks, compiled_stacks, name_of

HLO = """HloModule step, is_scheduled=true

FileNames
1 "train.py"
2 "layer.py"

FunctionNames
1 "step"
2 "layer"

FileLocations
1 {file_name_id=1 function_name_id=1 line=10 end_line=10 column=1 end_column=9}
2 {file_name_id=2 function_name_id=2 line=5 end_line=5 column=1 end_column=9}
3 {file_name_id=2 function_name_id=2 line=7 end_line=7 column=1 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=2}

%write (a: f32[2,16], b: f32[16], c: s32[]) -> f32[2,16] {
  %a = f32[2,16]{1,0} parameter(0)
  %b = f32[16]{0} parameter(1)
  %flat = f32[1,16]{1,0} bitcast(%b)
  %c = s32[] parameter(2)
  %nil = s32[] constant(0)
  ROOT %put = f32[2,16]{1,0} dynamic-update-slice(%a, %flat, %c, %nil), \
metadata={op_name="jit(step)/jvp()/while/body/dynamic_update_slice" stack_frame_id=1}
}

%scatter (d: f32[16]) -> f32[8] {
  %d = f32[16]{0} parameter(0)
  ROOT %rs = f32[8]{0} reduce-scatter(%d), replica_groups={{0,1}}, dimensions={0}, to_apply=%sum
}

%scatter.2 (e: f32[16]) -> f32[8] {
  %e = f32[16]{0} parameter(0)
  ROOT %rs.2 = f32[8]{0} reduce-scatter(%e), replica_groups={{0,1}}, dimensions={0}, to_apply=%sum
}

%forward_body (fa: (s32[], f32[16], f32[2,16], f32[2,8])) -> (s32[], f32[16], f32[2,16], \
f32[2,8]) {
  %fa = (s32[], f32[16]{0}, /*index=2*/f32[2,16]{1,0}, f32[2,8]{1,0}) parameter(0)
  %fi = s32[] get-tuple-element(%fa), index=0
  %fx = f32[16]{0} get-tuple-element(%fa), index=1
  %fs = f32[2,16]{1,0} get-tuple-element(%fa), index=2
  %fp = f32[2,8]{1,0} get-tuple-element(%fa), index=3
  %fzero = s32[] constant(0)
  %fw = f32[1,8]{1,0} dynamic-slice(%fp, %fi, %fzero), dynamic_slice_sizes={1,8}, \
metadata={op_name="jit(step)/jvp()/while/body/dynamic_slice"}
  %fb = f32[8]{0} bitcast(%fw)
  %fg = f32[16]{0} all-gather(%fb), replica_groups={{0,1}}, dimensions={0}
  %hidden = f32[16]{0} multiply(%fx, %fg), \
metadata={op_name="jit(step)/jvp()/while/body/mul" stack_frame_id=2}
  %fput = f32[2,16]{1,0} fusion(%fs, %hidden, %fi), kind=kLoop, calls=%write, \
metadata={op_name="jit(step)/jvp()/while/body/dynamic_update_slice" stack_frame_id=1}
  %fy = f32[16]{0} sine(%hidden), \
metadata={op_name="jit(step)/jvp()/while/body/sin" stack_frame_id=3}
  ROOT %fr = (s32[], f32[16]{0}, f32[2,16]{1,0}, f32[2,8]{1,0}) tuple(%fi, %fy, %fput, %fp)
}

%some (ca: (s32[], f32[16], f32[2,16], f32[2,8])) -> pred[] {
  %ca = (s32[], f32[16]{0}, f32[2,16]{1,0}, f32[2,8]{1,0}) parameter(0)
  ROOT %cp = pred[] constant(true)
}

%put_gradient (pa: f32[2,8], pb: f32[8], pc: s32[]) -> f32[2,8] {
  %pa = f32[2,8]{1,0} parameter(0)
  %pb = f32[8]{0} parameter(1)
  %pflat = f32[1,8]{1,0} bitcast(%pb)
  %pc = s32[] parameter(2)
  %pnil = s32[] constant(0)
  ROOT %pput = f32[2,8]{1,0} dynamic-update-slice(%pa, %pflat, %pc, %pnil), \
metadata={op_name="jit(step)/transpose(jvp())/while/body/dynamic_update_slice"}
}

%backward_body (ba: (s32[], f32[16], f32[2,16], f32[2,8])) -> (s32[], f32[16], f32[2,16], \
f32[2,8]) {
  %ba = (s32[], f32[16]{0}, f32[2,16]{1,0}, f32[2,8]{1,0}) parameter(0)
  %bi = s32[] get-tuple-element(%ba), index=0
  %bx = f32[16]{0} get-tuple-element(%ba), index=1
  %bs = f32[2,16]{1,0} get-tuple-element(%ba), index=2
  %bg = f32[2,8]{1,0} get-tuple-element(%ba), index=3
  %bzero = s32[] constant(0)
  %bread = f32[1,16]{1,0} dynamic-slice(%bs, %bi, %bzero), dynamic_slice_sizes={1,16}, \
metadata={op_name="jit(step)/transpose(jvp())/while/body/dynamic_slice"}
  %bflat = f32[16]{0} bitcast(%bread)
  %bd = f32[16]{0} multiply(%bflat, %bx), \
metadata={op_name="jit(step)/transpose(jvp())/while/body/mul" stack_frame_id=3}
  %bstart = ((f32[16]{0}), f32[8]{0}) async-start(%bd), calls=%scatter
  %bdone = f32[8]{0} async-done(%bstart)
  %bput = f32[2,8]{1,0} fusion(%bg, %bdone, %bi), kind=kLoop, calls=%put_gradient
  ROOT %br = (s32[], f32[16]{0}, f32[2,16]{1,0}, f32[2,8]{1,0}) tuple(%bi, %bd, %bs, %bput)
}

%update (ua: f32[2,8], ub: f32[2,8], uc: f32[2,8]) -> (f32[2,8], f32[2,8]) {
  %ua = f32[2,8]{1,0} parameter(0)
  %ub = f32[2,8]{1,0} parameter(1)
  %uc = f32[2,8]{1,0} parameter(2)
  %um = f32[2,8]{1,0} add(%ub, %uc), metadata={op_name="jit(step)/add"}
  %up = f32[2,8]{1,0} subtract(%ua, %um), metadata={op_name="jit(step)/sub"}
  ROOT %ur = (f32[2,8]{1,0}, f32[2,8]{1,0}) tuple(%up, %um)
}

ENTRY %main (p: f32[2,8], m: f32[2,8], x: f32[16], q: f32[8]) -> (f32[2,8], f32[2,8], f32[8]) {
  %p = f32[2,8]{1,0} parameter(0), metadata={op_name="state[\\'params\\'][\\'w\\']"}
  %m = f32[2,8]{1,0} parameter(1), metadata={op_name="state[\\'opt_state\\'][\\'w\\']"}
  %x = f32[16]{0} parameter(2), metadata={op_name="batch[\\'x\\']"}
  %q = f32[8]{0} parameter(3), metadata={op_name="state[\\'params\\'][\\'head\\']"}
  %zero = s32[] constant(0)
  %none = f32[] constant(0)
  %saves0 = f32[2,16]{1,0} broadcast(%none), dimensions={}
  %init = (s32[], f32[16]{0}, f32[2,16]{1,0}, f32[2,8]{1,0}) tuple(%zero, %x, %saves0, %p)
  %forward = (s32[], f32[16]{0}, f32[2,16]{1,0}, f32[2,8]{1,0}) while(%init), condition=%some, \
body=%forward_body, metadata={op_name="jit(step)/jvp()/while" stack_frame_id=1}
  %out = f32[16]{0} get-tuple-element(%forward), index=1
  %saves = f32[2,16]{1,0} get-tuple-element(%forward), index=2
  %head = f32[16]{0} multiply(%out, %x), metadata={op_name="jit(step)/jvp()/mul"}
  %grads0 = f32[2,8]{1,0} broadcast(%none), dimensions={}
  %binit = (s32[], f32[16]{0}, f32[2,16]{1,0}, f32[2,8]{1,0}) tuple(%zero, %out, %saves, %grads0)
  %backward = (s32[], f32[16]{0}, f32[2,16]{1,0}, f32[2,8]{1,0}) while(%binit), condition=%some, \
body=%backward_body, metadata={op_name="jit(step)/transpose(jvp())/while" stack_frame_id=1}
  %grads = f32[2,8]{1,0} get-tuple-element(%backward), index=3
  %hstart = ((f32[16]{0}), f32[8]{0}) async-start(%head), calls=%scatter.2
  %hdone = f32[8]{0} async-done(%hstart)
  %newq = f32[8]{0} subtract(%q, %hdone), metadata={op_name="jit(step)/sub"}
  %new = (f32[2,8]{1,0}, f32[2,8]{1,0}) fusion(%p, %m, %grads), kind=kLoop, calls=%update
  %newp = f32[2,8]{1,0} get-tuple-element(%new), index=0
  %newm = f32[2,8]{1,0} get-tuple-element(%new), index=1
  ROOT %results = (f32[2,8]{1,0}, f32[2,8]{1,0}, f32[8]{0}) tuple(%newp, %newm, %newq)
}
"""

ASSIGNMENT = """BufferAssignment:
allocation 0: size 64, parameter 0, shape |f32[2,8]| at ShapeIndex {}, maybe-live-out:
 value: <0 p @0> (size=64,offset=0): f32[2,8]{1,0}
allocation 1: size 64, parameter 1, shape |f32[2,8]| at ShapeIndex {}, maybe-live-out:
 value: <1 m @0> (size=64,offset=0): f32[2,8]{1,0}
allocation 2: size 64, parameter 2, shape |f32[16]| at ShapeIndex {}:
 value: <2 x @0> (size=64,offset=0): f32[16]{0}
allocation 3: size 32, parameter 3, shape |f32[8]| at ShapeIndex {}, maybe-live-out:
 value: <3 q @0> (size=32,offset=0): f32[8]{0}
allocation 4: size 24, output shape is |(f32[2,8], f32[2,8], f32[8])|, maybe-live-out:
 value: <4 results{} @0> (size=24,offset=0): (f32[2,8]{1,0}, f32[2,8]{1,0}, f32[8]{0})
allocation 5: size 640, preallocated-temp:
 value: <5 saves0 @0> (size=128,offset=0): f32[2,16]{1,0}
 value: <6 fa{2} (phi) @0> (size=128,offset=0): f32[2,16]{1,0}
 value: <7 fput @0> (size=128,offset=0): f32[2,16]{1,0}
 value: <8 forward{2} (phi) @0> (size=128,offset=0): f32[2,16]{1,0}
 value: <9 forward{1} (phi) @0> (size=64,offset=128): f32[16]{0}
 value: <10 head @0> (size=64,offset=192): f32[16]{0}
 value: <11 grads0 @0> (size=64,offset=256): f32[2,8]{1,0}
 value: <12 ba{3} (phi) @0> (size=64,offset=256): f32[2,8]{1,0}
 value: <13 bput @0> (size=64,offset=256): f32[2,8]{1,0}
 value: <14 backward{3} (phi) @0> (size=64,offset=256): f32[2,8]{1,0}
 value: <15 ba{1} (phi) @0> (size=64,offset=320): f32[16]{0}
 value: <16 bd @0> (size=64,offset=384): f32[16]{0}
 value: <17 rs @0> (size=32,offset=448): f32[8]{0}
 value: <18 fg @0> (size=64,offset=256): f32[16]{0}
 value: <19 new{0} @0> (size=64,offset=0): f32[2,8]{1,0}
"""

LIVE = """HloLiveRange (max 60):
  InstructionSequence:
    0:p
  BufferLiveRange:
    saves0{}:6-8
    fa{2}:9-18
    fg{}:15-16
    fput{}:17-20
    forward{2}:20-40
    forward{1}:20-25
    head{}:23-42
    grads0{}:24-26
    ba{3}:26-35
    ba{1}:26-33
    bd{}:32-36
    rs{}:33-35
    bput{}:35-40
    backward{3}:40-48
    new{0}:48-52
"""

STATS = types.SimpleNamespace(
    argument_size_in_bytes=224,
    output_size_in_bytes=184,
    alias_size_in_bytes=160,
    temp_size_in_bytes=640,
    host_argument_size_in_bytes=48,
    host_output_size_in_bytes=24,
    host_alias_size_in_bytes=16,
    host_temp_size_in_bytes=8,
    peak_memory_in_bytes=-1,
)

STEP = Program(
    hlo=HLO, assignment=ASSIGNMENT, live_ranges=LIVE, stats=STATS, messages="", compile_s=1.0
)
NAMES: dict[Stack, str] = {("layer.py:5", "train.py:10", "main.py:3"): "hidden"}


def _replaced(**texts: tuple[str, str]) -> Program:
    changed = {}
    for field, (old, new) in texts.items():
        assert old in getattr(STEP, field)
        changed[field] = getattr(STEP, field).replace(old, new)
    return dataclasses.replace(STEP, **changed)


def test_every_byte_has_its_term():
    report = memory_report(STEP, names=NAMES)
    assert report.terms == {
        "parameters": 64 + 32,
        "optimizer": 64,
        "input": 64,
        "output": 24,
        "saved:hidden": 128,
        "unreduced gradients": 64,
        "gradients": 64,
        "working set": 64 + 64 + 32,
        "unattributed": 640 - 416,
    }
    assert sum(report.terms.values()) == report.total_bytes == 224 + 184 - 160 + 640
    assert (report.argument_bytes, report.temp_bytes, report.host_bytes) == (224, 640, 64)


def test_the_largest_arrays_name_what_fills_them():
    first, *_ = memory_report(STEP, names=NAMES, largest=1).largest
    assert (first.bytes, first.shape, first.term) == (128, "f32[2,16]", "saved:hidden")
    assert first.op_name == "jit(step)/jvp()/while/body/mul"
    assert first.stack == ("layer.py:5", "train.py:10")
    assert first.source == "layer.py:5"


def test_a_save_without_a_name_is_other():
    terms = memory_report(STEP).terms
    assert (terms["saved:other"], "saved:hidden" in terms) == (128, False)


def test_what_a_layer_gets_from_the_one_before_is_its_input():
    terms = memory_report(
        _replaced(hlo=("fusion(%fs, %hidden, %fi)", "fusion(%fs, %fx, %fi)"))
    ).terms
    assert terms["saved:input"] == 128


def test_what_the_backward_pass_does_not_read_is_not_saved():
    backward = 'transpose(jvp())/while/body/dynamic_slice"'
    terms = memory_report(_replaced(hlo=(backward, 'jvp()/while/body/dynamic_slice"'))).terms
    assert "saved:other" not in terms
    assert terms["working set"] == 160 + 128


def test_what_the_update_does_not_read_is_no_gradient():
    other = memory_report(_replaced(hlo=("add(%ub, %uc)", "add(%ub, %ub)"))).terms
    assert "gradients" not in other
    assert other["unreduced gradients"] == 64


def test_a_gradient_that_is_not_scattered_is_whole():
    program = _replaced(
        hlo=("async-start(%head), calls=%scatter.2", "async-start(%x), calls=%scatter.2")
    )
    assert "unreduced gradients" not in memory_report(program).terms


def test_gathered_parameters_are_weight_copies():
    later = _replaced(
        live_ranges=("fg{}:15-16", "fg{}:15-16\n    late{}:20-60"),
        assignment=(
            " value: <19 new",
            " value: <20 late @0> (size=64,offset=512): f32[16]{0}\n value: <19 new",
        ),
        hlo=("  %newp =", "  %late = f32[16]{0} all-gather(%q), dimensions={0}\n  %newp ="),
    )
    assert memory_report(later).terms["weight copies"] == 64


def test_updated_state_beside_the_old_is_new_state():
    program = _replaced(
        live_ranges=("new{0}:48-52", "new{0}:33-52"),
        assignment=("new{0} @0> (size=64,offset=0)", "new{0} @0> (size=64,offset=512)"),
    )
    assert memory_report(program).terms["new state"] == 64


def test_other_arguments_get_their_terms_from_the_caller():
    report = memory_report(STEP, term_of=lambda path: "state" if "head" in path else "input")
    assert report.terms["state"] == 32
    assert report.terms["input"] == 192


def test_elements_of_tuples_are_read_in_the_short_form_of_newer_versions():
    short = _replaced(hlo=("%p, %m, %grads)", "%p, %m, %backward#3)"))
    assert memory_report(short, names=NAMES) == memory_report(STEP, names=NAMES)


def test_texts_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="arguments take 192 bytes, memory_analysis.. says 224"):
        memory_report(_replaced(assignment=("size 64, parameter 0", "size 32, parameter 0")))
    with pytest.raises(ValueError, match="no instruction is called 'gone'"):
        memory_report(
            _replaced(assignment=(" bd @0>", " gone @0>"), live_ranges=("bd{}", "gone{}"))
        )


def test_stacks_of_versions_that_count_parents_from_one_are_the_same():
    plain = HLO.replace("parent_frame_id=1}", "parent_frame_id=0}")
    plain = plain.replace("parent_frame_id=2}", "parent_frame_id=1}")
    assert compiled_stacks(plain) == compiled_stacks(HLO)
    assert compiled_stacks(HLO)[3] == ("layer.py:7", "train.py:10")


def test_a_table_that_cannot_be_read_is_refused():
    with pytest.raises(ValueError, match="no line in"):
        compiled_stacks(HLO.replace("line=5", "row=5").replace("end_row=5", ""))


def _named(x):
    return checkpoint_name(jnp.tanh(x) * 2, "twice")


def _loss(x):
    policy = jax.checkpoint_policies.save_only_these_names("twice")
    body = jax.checkpoint(lambda c, _: (jnp.sin(_named(c)), None), policy=policy)
    return jax.lax.scan(body, x, None, length=3)[0].sum()


def test_names_are_found_again_in_a_compiled_program():
    traced = jax.jit(jax.grad(_loss)).trace(jnp.ones(8))
    names = checkpoint_stacks(traced.jaxpr)
    assert set(names.values()) == {"twice"}
    stacks = compiled_stacks(traced.lower().compile().as_text()).values()
    files = frozenset(place.rpartition(":")[0] for stack in stacks for place in stack)
    line = _named.__code__.co_firstlineno + 1
    hits = {stack[0] for stack in stacks if name_of([stack], names, files)}
    assert {place.rpartition(":")[2] for place in hits} == {str(line)}
