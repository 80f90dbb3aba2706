"""An embedder's process whose vectors are hashes of texts: no JAX, and faults when asked for."""

import itertools
import os
import signal
import socket
import sys
import time
from types import SimpleNamespace

from colossax.errors import InputError
from colossax.scheduling.texts import TextQueue
from colossax.serve.engine import Wire, alone, run_embedder
from tests.serve.fake import END, TOKENIZER, VOCAB, next_token

WIDTH, SLOTS = 4, 64


def vector(text):
    """What the toy makes of a text; numbers that float32 has."""
    return [float(next_token(text, i)) for i in range(WIDTH)]


class ToyEmbedder:
    """Texts by the real queue."""

    def __init__(self, fault, step_s):
        self._queue = TextQueue(sizes=(16, SLOTS), usual=SLOTS, most=(4, 16))
        self._texts, self._numbers = {}, itertools.count()
        self._fault, self._step_s = fault, step_s
        self.began = lambda numbers: None

    @property
    def busy(self):
        return len(self._queue) > 0

    @property
    def stats(self):
        return SimpleNamespace(reading=0, waiting=len(self._queue))

    def add(self, text):
        if 7 in text:
            raise InputError("text: seven is refused here; leave it out")
        number = next(self._numbers)
        self._texts[number] = text
        self._queue.add(number, len(text))
        return number

    def cancel(self, number):
        self._queue.cancel(number)

    def step(self):
        time.sleep(self._step_s)
        plan = self._queue.next()
        self.began(plan.numbers)
        if self._fault == "poison" and any(9 in self._texts[one] for one in plan.numbers):
            os.kill(os.getpid(), signal.SIGKILL)
        return [self._told(number) for number in plan.numbers]

    def _told(self, number):
        text = self._texts.pop(number)
        if 8 in text:
            return SimpleNamespace(number=number, vector=None, message="it gave none")
        return SimpleNamespace(number=number, vector=vector(text), message="")


def main():
    fault, step_s = sys.argv[1], float(sys.argv[2])
    alone()
    wire = Wire(socket.socket(fileno=int(sys.argv[-1])))
    tokenizer = {"definition": TOKENIZER.definition, "end": TOKENIZER.end}
    facts = {"model": "toy", "tokenizer": tokenizer, "vocab": VOCAB, "slots": SLOTS, "seats": 64}
    more = {"ends": [], "adapters": [], "eos": END, "embeds": True, "speaks": False, "width": 4}
    wire.send({"say": "facts", "facts": facts | more})
    run_embedder(wire, ToyEmbedder(fault, step_s))
    return 0


if __name__ == "__main__":
    sys.exit(main())
