"""An engine that says what a hash tells it to, and remembers all that it was asked."""

import asyncio
import hashlib
import itertools

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from colossax.data import Tokenizer
from colossax.scheduling import Emitted
from colossax.serve import Facts, Grammars, Started, Stats

END = "<|endoftext|>"
SPECIALS = (END, "<|im_start|>", "<|im_end|>")
VOCAB = 272
"""More than the tokenizer has, as models do."""

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer():
    """All bytes, and three special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([END, *letters, *SPECIALS[1:]])}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIALS))
    return Tokenizer(definition=backend.to_str(), end=END)


TOKENIZER = byte_tokenizer()
GRAMMARS = Grammars(TOKENIZER, VOCAB, (TOKENIZER.eos,))


def next_token(tokens, seed=0):
    """The toy model: any byte, and now and then the end."""
    digest = hashlib.blake2b(repr((tuple(tokens), seed)).encode(), digest_size=4).digest()
    drawn = int.from_bytes(digest, "little")
    return 0 if drawn % 41 == 0 else 1 + drawn % 256


def alone(request, script=None):
    """All tokens that a request gets, the end among them, and how it ends."""
    said = []
    while len(said) < request.max_tokens:
        if script is not None:
            token = script[len(said)] if len(said) < len(script) else 0
        else:
            token = next_token((*request.prompt, *said), request.sampling.seed)
        said.append(token)
        if token in request.ends:
            return said, "stop"
    return said, "length"


class FakeEngine:
    """A backend in the server's own loop.

    Args:
        script: Tokens that every request gets in place of the toy model's.
        step_s: Seconds between two tokens.
        hold: Say nothing before `go` is set.
        ends_with: How requests end in place of their own end.
    """

    def __init__(self, script=None, *, step_s=0.0, hold=False, ends_with=None, **facts):
        given = {
            "chat_template": CHATML,
            "seats": 4,
            "slots": 512,
            "adapters": ("tuned",),
            "width": 4,
        }
        self._facts = Facts(
            model="toy",
            tokenizer=TOKENIZER,
            vocab=VOCAB,
            ends=(TOKENIZER.eos,),
            eos=END,
            **(given | facts),
        )
        self._script, self._step_s, self._ends_with = script, step_s, ends_with
        self._numbers = itertools.count(1)
        self._tasks = {}
        self.asked, self.cancelled, self.life = [], [], []
        self.now, self.is_ready, self.refuses = Stats(), True, None
        self.most_running = self.finished = 0
        self.go = asyncio.Event()
        if not hold:
            self.go.set()

    @property
    def facts(self):
        return self._facts

    async def start(self):
        self.life.append("start")
        self.loop = asyncio.get_running_loop()

    async def close(self):
        self.life.append("close")
        for task in self._tasks.values():
            task.cancel()

    async def submit(self, request):
        if self.refuses is not None:
            raise self.refuses
        assert request.waits == (request.grammar is not None)
        number, queue = next(self._numbers), asyncio.Queue()
        self.asked.append(request)
        self._tasks[number] = asyncio.create_task(self._say(number, request, queue))
        self.most_running = max(self.most_running, len(self._tasks))
        return Started(number=number, said=self._heard(queue))

    def cancel(self, number):
        if (task := self._tasks.pop(number, None)) is not None:
            task.cancel()
            self.cancelled.append(number)

    async def embed(self, prompts):
        if self.refuses is not None:
            raise self.refuses
        return [[float(next_token(prompt, i)) for i in range(4)] for prompt in prompts]

    def stats(self):
        return self.now

    def ready(self):
        return self.is_ready

    @property
    def running(self):
        """Requests that have not ended."""
        return len(self._tasks)

    async def _heard(self, queue):
        while True:
            emitted = await queue.get()
            yield emitted
            if emitted.ended:
                return

    async def _say(self, number, request, queue):
        await self.go.wait()
        tokens, ended = self._continued(request)
        for i, token in enumerate(tokens):
            await asyncio.sleep(self._step_s)
            last = i == len(tokens) - 1
            if last and self._ends_with:
                break
            if last:
                self._done(number)
            one = said(number, request, token, ended if last else None)
            await queue.put(one if i else one._replace(scores=scores(request)))
        if self._ends_with:
            self._done(number)
            await queue.put(Emitted(request=number, ended=self._ends_with, message="it broke"))

    def _done(self, number):
        self.finished += 1
        self._tasks.pop(number, None)

    def _continued(self, request):
        if request.grammar is None:
            return alone(request, self._script)
        held, found = GRAMMARS.constraint(request.grammar), []
        while len(found) < request.max_tokens:
            mask = held.mask()
            allowed = [t for t in range(VOCAB) if mask[t // 32] >> (t % 32) & 1]
            visible = [t for t in allowed if TOKENIZER.token_bytes(t) not in b" \t\n\r"]
            token = (visible or allowed)[next_token(found) % len(visible or allowed)]
            found.append(token)
            if token in request.ends:
                return found, "stop"
            held.took(token)
        return found, "length"


def scores(request):
    """Of its prompt, where they are asked for: by place."""
    if request.score_from is None:
        return ()
    most = request.sampling.logprobs
    return tuple(
        (-i / 8, ((request.prompt[i], -i / 8), ((request.prompt[i] + 1) % VOCAB, -9.0))[:most])
        for i in range(request.score_from, len(request.prompt))
    )


def said(number, request, token, ended):
    """A token with the log-probabilities that were asked for."""
    told = request.sampling.logprobs
    values = [-0.5, -1.5, *[float("-inf")] * 18]
    top = tuple(((token + i) % VOCAB, values[i]) for i in range(told or 0))
    logprob = None if told is None else -0.5
    return Emitted(request=number, token=token, logprob=logprob, top=top, ended=ended)
