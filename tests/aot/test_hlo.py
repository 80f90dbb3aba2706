"""The reader of compiled text: instructions, shapes, what they call, where they come from."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossax.aot.hlo import elements, matching, parse_module, shape_bytes, split_top

TEXT = r"""HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

FileNames
1 "/src/model.py"
2 "/src/loss.py"

FunctionNames
1 "layer"

FileLocations
1 {file_name_id=1 function_name_id=1 line=72 end_line=75 column=15 end_column=16}
2 {file_name_id=2 function_name_id=1 line=9 end_line=9 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
7 {file_location_id=2 parent_frame_id=1}


%fused (p0: f32[8]) -> f32[8] {
  %p0 = f32[8]{0} parameter(0)
  ROOT %neg.1 = f32[8]{0} negate(%p0), metadata={op_name="jit(step)/neg" stack_frame_id=7}
}, execution_thread="main"

%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {
  %state = (s32[], f32[8]{0}) parameter(0)
  ROOT %out = (s32[], f32[8]{0}) tuple(%state, /*index=1*/%state)
}

condition.2 {
  %state.1 = (s32[], f32[8]{0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main.4_spmd (x: f32[8], y: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0), sharding={devices=[8]<=[8]}, metadata={op_name="state[\'w\"q\"\']"}
  y = f32[8]{0:S(5)} parameter(1)
  %many = (f32[], bf16[2]{0}, pred[3]{0}, s32[], f32[4]{0}, /*index=5*/f32[8]{0}) custom-call(f32[8]{0} %x, y), custom_call_target="a(b", backend_config="{\"calls=%nowhere, body=%none\"}"
  %fusion.1 = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/neg" source_file="/src/old.py" source_line=12}
  %loop = (s32[], f32[8]{0}) while(%many), condition=%condition.2, body=%body, metadata={stack_frame_id=1}, backend_config={"known_trip_count":{"n":"32"},"known_init_step":{"init":"0","step":"1"}}
  ROOT %end = f32[8]{0} get-tuple-element(%loop), index=1
}
"""  # noqa: E501


@pytest.fixture(scope="module")
def module():
    return parse_module(TEXT)


def test_computations_and_their_instructions(module):
    assert module.entry == "main.4_spmd"
    assert list(module.computations) == ["fused", "body", "condition.2", "main.4_spmd"]
    names = [one.name for one in module.computations["main.4_spmd"]]
    assert names == ["x", "y", "many", "fusion.1", "loop", "end"]


def test_instruction_has_shape_opcode_operands_and_line(module):
    many = module.by_name["many"]
    assert many.opcode == "custom-call"
    assert many.operand_names == ("x", "y")
    assert "index=5" not in many.shape
    assert TEXT.splitlines()[many.line - 1].lstrip().startswith("%many")
    assert module.by_name["out"].operand_names == ("state", "state")


@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("fusion.1", (("calls", "fused"),)),
        ("loop", (("condition", "condition.2"), ("body", "body"))),
        ("many", ()),  # what is quoted names nothing
        ("x", ()),
    ],
)
def test_called_computations(module, name, called):
    assert module.by_name[name].called == called


@pytest.mark.parametrize(
    ("attributes", "called"),
    [
        ("branch_computations={%a, %b.1}", (("branch", "a"), ("branch", "b.1"))),
        (
            "true_computation=%a, false_computation=%b",
            (("true_computation", "a"), ("false_computation", "b")),
        ),
        ("called_computations={%a}", (("calls", "a"),)),
        ("calls={%a, %b}", (("calls", "a"), ("calls", "b"))),
        ("to_apply=add.2", (("to_apply", "add.2"),)),
    ],
)
def test_forms_of_called_computations(attributes, called):
    text = f"ENTRY %e (p: f32[]) -> f32[] {{\n  %c = f32[] call(%p), {attributes}\n}}\n"
    assert parse_module(text).by_name["c"].called == called


def test_trip_count_where_it_is_known(module):
    assert module.by_name["loop"].trip_count == 32
    assert module.by_name["fusion.1"].trip_count is None


def test_source_from_the_tables_and_from_the_line_itself(module):
    assert module.source(module.by_name["neg.1"]) == "/src/loss.py:9"
    assert module.source(module.by_name["loop"]) == "/src/model.py:72"
    assert module.source(module.by_name["fusion.1"]) == "/src/old.py:12"
    assert module.source(module.by_name["y"]) == ""


def test_path_in_the_traced_program(module):
    assert module.by_name["neg.1"].op_name == "jit(step)/neg"
    assert module.by_name["x"].op_name == r"state[\'w\"q\"\']"
    assert module.by_name["y"].op_name == ""


def test_host_memory_is_seen(module):
    assert module.by_name["y"].in_host_memory
    assert not module.by_name["x"].in_host_memory


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[]", 4),
        ("f32[8,4]{1,0}", 128),
        ("bf16[3]{0}", 6),
        ("pred[5]", 5),
        ("f8e4m3fn[7]{0}", 7),
        ("f8e5m2[2,2]{1,0:T(8,128)S(5)}", 4),
        ("s4[5]{0:E(4)}", 3),
        ("u1[9]{0}", 2),
        ("c128[2]", 32),
        ("f32[0,4]{1,0}", 0),
        ("s32[<=16]{0}", 64),
        ("token[]", 0),
        ("(f32[2]{0}, (bf16[2]{0}, u32[]), token[])", 16),
        ("(f32[1], f32[1], f32[1], f32[1], f32[1], /*index=5*/f32[2])", 28),
        ("()", 0),
    ],
)
def test_bytes_of_shapes(shape, size):
    assert shape_bytes(shape) == size


@pytest.mark.parametrize("shape", ["f6e2m3[4]", "(f32[2], zz9[1])"])
def test_unknown_element_type_is_refused(shape):
    with pytest.raises(ValueError, match="the size of '(f6e2m3|zz9)'"):
        shape_bytes(shape)


@pytest.mark.parametrize("shape", ["f32[?,4]", "f32", "F32[2]"])
def test_unknown_form_of_shape_is_refused(shape):
    with pytest.raises(ValueError, match="a shape in an unknown form"):
        shape_bytes(shape)


def test_elements_of_a_tuple():
    assert elements("((f32[2]{0}, s32[]), f32[4,2]{1,0}, u32[])") == [
        "(f32[2]{0}, s32[])",
        "f32[4,2]{1,0}",
        "u32[]",
    ]
    assert elements("f32[4,2]{1,0}") == ["f32[4,2]{1,0}"]


def test_brackets_within_quotes_do_not_count():
    text = r'(a, "b)\")", {c})d'
    assert text[matching(text, 0) + 1 :] == "d"
    with pytest.raises(ValueError, match="nothing closes"):
        matching("(a, {b)", 0)


@given(st.lists(st.sampled_from(["a", "(b, c)", "{1,0}", "[2,2]<=[4]", "%x.1"])))
def test_split_top_undoes_join(parts):
    assert split_top(", ".join(parts)) == parts


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("  what is this", r"HLO line 2: no instruction: '  what is this'"),
        ("  %a = f32[2]{0} nothing", "HLO line 2: no operation"),
        ("  %a = f32[2]{0}", "HLO line 2: no operation"),
        ("  %a = f32[2]{0} add(%b, %c", "nothing closes the bracket"),
    ],
)
def test_lines_that_cannot_be_read_are_refused(line, message):
    with pytest.raises(ValueError, match=message):
        parse_module(f"ENTRY %e (p: f32[]) -> f32[] {{\n{line}\n}}\n")


def test_text_without_entry_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        parse_module("HloModule empty\n")


def test_name_given_twice_is_refused():
    text = TEXT.replace("%neg.1 =", "%x =")
    with pytest.raises(ValueError, match="both name 'x'"):
        _ = parse_module(text).by_name
