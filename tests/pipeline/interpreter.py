"""The slow truth about a table: it is run, on one number a position, and gives gradients."""

import math

from colossax.pipeline import Kind, Table


class CannotRunError(Exception):
    """The table reads what is not there, or does something twice."""


_TURNS = ((Kind.FORWARD,), (Kind.BACKWARD, Kind.INPUT), (Kind.WEIGHT,))


class Interpreter:
    """Stages with a store each; what is sent to another arrives when the tick is over."""

    def __init__(self, table: Table, inputs, weights):
        self.table, self.inputs, self.weights = table, inputs, weights
        self.stores = [{} for _ in range(table.stages)]
        self.gradients = [0] * len(weights)
        self.finished = set()

    def run(self):
        """Gradients of the weights; the loss is the halved squares of what leaves, summed."""
        for cells in self.table.ticks:
            under_way = []
            for stage, cell in enumerate(cells):
                if len({op.kind for op in cell}) < len(cell):
                    raise CannotRunError("two of one kind")
                for kinds in _TURNS:
                    ops = [op for op in cell if op.kind in kinds]
                    results = [one for op in ops for one in self.do(stage, op)]
                    for to, key, value in results:
                        if to == stage:
                            self.stores[to][key] = value
                        else:
                            under_way.append((to, key, value))
            for to, key, value in under_way:
                self.stores[to][key] = value
        return self.gradients

    def do(self, stage, op):
        """Run one operation; yields what it writes, with the stage and key it goes to."""
        position = self.table.layout.index((stage, op.chunk))
        at = (position, op.microbatch)
        kinds = next(kinds for kinds in _TURNS if op.kind in kinds)
        if (kinds, at) in self.finished:
            raise CannotRunError("twice")
        self.finished.add((kinds, at))
        if op.kind is Kind.FORWARD:
            return self.forward(stage, *at)
        if op.kind is Kind.WEIGHT:
            self.gradients[position] += self.take(stage, "left", *at)
            return []
        return self.backward(stage, op.kind, *at)

    def forward(self, stage, position, microbatch):
        x = (
            self.inputs[microbatch]
            if position == 0
            else self.take(stage, "x", position, microbatch)
        )
        y = self.weights[position] * x
        kept = (stage, ("kept", position, microbatch), x)
        if position + 1 == len(self.weights):
            return [kept, (stage, ("dy", position, microbatch), y)]
        to = self.table.layout[position + 1][0]
        return [kept, (to, ("x", position + 1, microbatch), y)]

    def backward(self, stage, kind, position, microbatch):
        dy, x = (self.take(stage, name, position, microbatch) for name in ("dy", "kept"))
        results = []
        if kind is Kind.BACKWARD:
            self.gradients[position] += dy * x
        else:
            results.append((stage, ("left", position, microbatch), dy * x))
        if position:
            to, dx = self.table.layout[position - 1][0], dy * self.weights[position]
            results.append((to, ("dy", position - 1, microbatch), dx))
        return results

    def take(self, stage, *key):
        if key not in self.stores[stage]:
            raise CannotRunError(f"nobody has written {key}")
        return self.stores[stage].pop(key)


def runs(table: Table) -> bool:
    """Whether a table gives the gradients that one device does."""
    inputs = [3 + 2 * m for m in range(table.microbatches)]
    weights = [2 + p % 3 for p in range(table.stages * table.chunks)]
    product = math.prod(weights)
    squares = sum(x * x for x in inputs)
    right = [product * product * squares // weight for weight in weights]
    try:
        return Interpreter(table, inputs, weights).run() == right
    except (CannotRunError, ValueError, IndexError):
        return False
