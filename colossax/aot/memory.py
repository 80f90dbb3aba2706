"""Device memory of a compiled program, by what it holds when most of it is in use."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from colossax.aot.assignment import (
    Allocation,
    Assigned,
    Peak,
    find_peak,
    parse_assignment,
    parse_live_ranges,
)
from colossax.aot.compile import Program
from colossax.aot.saved import Stack
from colossax.aot.terms import (
    GRADIENTS,
    NEW_STATE,
    SAVED,
    UNREDUCED,
    WEIGHT_COPIES,
    Terms,
    argument_term,
    plain,
)

OUTPUT, UNATTRIBUTED = "output", "unattributed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
    """One temporary array that is live at the peak.

    Attributes:
        bytes: Of it that no larger array shares.
        shape: As the compiler writes it, without layout.
        op_name: Path in the traced program of the operation that fills it, or empty.
        stack: Source positions of that operation, `file.py:line`, innermost first.
        term: Where the report counts it.
    """

    bytes: int
    shape: str
    op_name: str
    stack: Stack
    term: str

    @property
    def source(self) -> str:
        """Innermost source position, or empty."""
        return self.stack[0] if self.stack else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Bytes of one device that a program needs.

    Attributes:
        total_bytes: argument + output - alias + temp.
        argument_bytes: Arguments.
        temp_bytes: Temporaries.
        host_bytes: Host memory, the total of the same four.
        terms: Device bytes by what they hold; they sum to `total_bytes`. Arguments are
            `parameters optimizer input state`; `output` is results that take no argument's
            memory. Temporaries count at the instant when most storage is in use:
            `gradients` as the optimizer reads them; `unreduced gradients`, before they are
            summed over devices or each device picks its part; `saved:NAME`, what the forward
            pass leaves for the backward pass, by checkpoint name, or `saved:input` (what a
            repeated layer gets from the one before) or `saved:other`; `weight copies`,
            parameters gathered, cast or laid out anew; `new state`, updated parameters and
            optimizer state that are not yet where the old ones lie; `working set`, all else.
            `unattributed` is the temporaries' memory that holds nothing then.
        largest: The largest temporaries live then.
    """

    total_bytes: int
    argument_bytes: int
    temp_bytes: int
    host_bytes: int
    terms: Mapping[str, int]
    largest: tuple[Buffer, ...]


def memory_report(
    program: Program,
    *,
    term_of: Callable[[str], str] = argument_term,
    names: Mapping[Stack, str] | None = None,
    largest: int = 3,
) -> MemoryReport:
    """Device bytes by term, from what the compiler dumps.

    Args:
        program: What was compiled.
        term_of: Term of an argument, by its path: `state['params']['norm']['scale']`.
        names: From `checkpoint_stacks`; without them named activations are `saved:other`.
        largest: How many temporaries to name.

    Raises:
        ValueError: A line of the compiler's text cannot be read, or its texts contradict each
            other or its statistics.
    """
    stats = program.stats
    classes = Terms(program.hlo, term_of=term_of, names=names)
    allocations = parse_assignment(program.assignment)
    terms = _argument_terms(allocations, classes.arguments, stats.argument_size_in_bytes)
    _add(terms, OUTPUT, stats.output_size_in_bytes - stats.alias_size_in_bytes)
    peaks = _temp_peaks(allocations, program.live_ranges, stats.temp_size_in_bytes)
    buffers = [buffer for peak in peaks for buffer in _buffers(peak, classes)]
    for buffer in buffers:
        _add(terms, buffer.term, buffer.bytes)
    terms[UNATTRIBUTED] = stats.temp_size_in_bytes - sum(peak.bytes for peak in peaks)
    assert sum(terms.values()) == program.device_bytes
    return MemoryReport(
        total_bytes=program.device_bytes,
        argument_bytes=stats.argument_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
        host_bytes=program.host_bytes,
        terms=terms,
        largest=tuple(sorted(buffers, key=lambda b: -b.bytes)[:largest]),
    )


def _argument_terms(
    allocations: Iterable[Allocation], kinds: Mapping[int, str], stated: int
) -> dict[str, int]:
    terms: dict[str, int] = {}
    for allocation in allocations:
        if allocation.parameter is not None and not allocation.host:
            _add(terms, kinds[allocation.parameter], allocation.bytes)
    _require_equal("arguments", sum(terms.values()), stated)
    return terms


def _temp_peaks(allocations: Iterable[Allocation], live_ranges: str, stated: int) -> list[Peak]:
    temps = [a for a in allocations if a.kind == "temp" and not a.host]
    _require_equal("temporaries", sum(a.bytes for a in temps), stated)
    ranges = parse_live_ranges(live_ranges)
    return [find_peak(a.values, ranges) for a in temps]


def _require_equal(what: str, assigned: int, stated: int) -> None:
    if assigned != stated:
        raise ValueError(
            f"buffer assignment: {what} take {assigned} bytes, memory_analysis() says {stated}"
        )


def _add(terms: dict[str, int], term: str, count: int) -> None:
    if count:
        terms[term] = terms.get(term, 0) + count


def _buffers(peak: Peak, classes: Terms) -> Iterator[Buffer]:
    """Live arrays, each byte once: of the largest array there, if equal of the clearest term."""
    classified = [(live, classes.term(live.value)) for live in peak.live]
    taken: list[tuple[int, int]] = []
    for live, term in sorted(classified, key=lambda f: (-f[0].bytes, _clarity(f[1]))):
        free = _free_bytes(live, taken)
        if free:
            taken.append((live.offset, live.offset + live.bytes))
            made = classes.maker(live.value)
            yield Buffer(
                bytes=free,
                shape=re.sub(r"\{[^}]*\}", "", live.shape),
                op_name=plain(made.op_name),
                stack=classes.stack(made),
                term=term,
            )


def _clarity(term: str) -> int:
    order = (GRADIENTS, UNREDUCED, SAVED, WEIGHT_COPIES, NEW_STATE)
    return next((i for i, known in enumerate(order) if term.startswith(known)), len(order))


def _free_bytes(live: Assigned, taken: Iterable[tuple[int, int]]) -> int:
    """Bytes of an array outside of the spans (start, end)."""
    free, at, end = 0, live.offset, live.offset + live.bytes
    for start, stop in sorted(taken):
        if at < stop and start < end:
            free += max(0, start - at)
            at = max(at, stop)
    return free + max(0, end - at)
