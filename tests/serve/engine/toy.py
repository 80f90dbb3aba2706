"""An engine's process that says what a hash tells it to: no JAX, and faults when asked for them."""

import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from colossax.errors import InputError
from colossax.scheduling import Emitted, Scheduler
from colossax.serve.engine.child import alone, run
from colossax.serve.engine.wire import Wire
from tests.serve.fake import CHATML, END, GRAMMARS, TOKENIZER, VOCAB, next_token

SLOTS, SEATS = 256, 4


class ToyEngine:
    """Requests by the real scheduler; each token is a hash of those before it."""

    def __init__(self, fault, step_s):
        self.sizes = SimpleNamespace(pages=64)
        self._scheduler = Scheduler(seats=SEATS, pages=64, pages_a_seat=16, mixed=32)
        self._said, self._told = {}, []
        self._fault, self._step_s, self._steps = fault, step_s, 0
        self.began = lambda numbers: None

    @property
    def busy(self):
        return self._scheduler.busy or bool(self._told)

    @property
    def stats(self):
        return SimpleNamespace(scheduler=self._scheduler.stats, host_bytes=0, each=())

    def add(self, request, constraint):
        if constraint is not None:
            constraint.mask()
        if 7 in request.prompt:
            raise InputError("prompt: seven is refused here; leave it out")
        number = self._scheduler.add(request)
        self._said[number] = (request, [*request.prompt, *request.generated])
        return number

    def cancel(self, number):
        self._scheduler.cancel(number)
        self._hear()

    def _hear(self):
        for one in self._scheduler.gone():
            del self._said[one.request]
            self._told.append(Emitted(one.request, ended=one.reason))

    def step(self):
        time.sleep(self._step_s)
        self._steps += 1
        if self._fault == "hang once" and self._steps == 5 and first_time():
            time.sleep(1000)
        plan = self._scheduler.next(time.monotonic())
        self._hear()
        told, self._told = self._told, []
        if plan is None:
            return told
        if plan.fresh:
            seats = {seat for seat, _ in plan.fresh}
            self.began([piece.request for piece in plan.pieces if piece.seat in seats])
        if self._fault == "poison":
            for piece in plan.pieces:
                if 9 in self._said[piece.request][0].prompt:
                    os.kill(os.getpid(), signal.SIGKILL)
        emitting = [piece.request for piece in plan.pieces if piece.emits]
        tokens = []
        for number in emitting:
            request, ids = self._said[number]
            ids.append(next_token(ids, request.sampling.seed))
            tokens.append(ids[-1])
        ended = {one.request: one.reason for one in self._scheduler.took(plan, tokens)}
        for number, token in zip(emitting, tokens, strict=True):
            told.append(Emitted(number, token=token, ended=ended.get(number)))
        for number in ended:
            del self._said[number]
        return told


def constraint(grammar):
    """That of the real library; one that is compiled slowly."""
    if grammar == "poison":
        os.kill(os.getpid(), signal.SIGKILL)
    if grammar == "slow":
        time.sleep(3.0)
        raise InputError("grammar: it is too slow; give another")
    return GRAMMARS.constraint(grammar)


def first_time():
    """Whether no process before this one was here."""
    mark = Path(sys.argv[3])
    if mark.exists():
        return False
    mark.touch()
    return True


def main():
    fault, step_s = sys.argv[1], float(sys.argv[2])
    alone()
    wire = Wire(socket.socket(fileno=int(sys.argv[-1])))
    if fault == "refuse":
        wire.send({"say": "refused", "refused": "plan.mesh: there are too few devices; use fewer"})
        return 2
    if fault == "mute":
        return 1
    tokenizer = {"definition": TOKENIZER.definition, "end": TOKENIZER.end}
    facts = {"model": "toy", "tokenizer": tokenizer, "vocab": VOCAB, "slots": SLOTS, "seats": SEATS}
    more = {"ends": [TOKENIZER.eos], "adapters": [], "chat_template": CHATML, "eos": END}
    wire.send({"say": "facts", "facts": facts | more})
    if fault == "dying":
        wire.send({"say": "dying", "words": "MemoryError: no room"})
        return 1
    run(wire, ToyEngine(fault, step_s), constraint)
    return 0


if __name__ == "__main__":
    sys.exit(main())
