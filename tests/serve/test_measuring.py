"""What `colossax bench serve` says of a server is what the server did."""

import asyncio
import json

import pytest

from colossax.cli import main
from colossax.errors import InputError
from colossax.serve.measuring import Asked, Bounds, Load, measured, requests_of, summary
from tests.serve.fake import FakeEngine
from tests.serve.site import running

TOKENS = list(range(20, 60))


def test_arrivals_are_poisson_and_lengths_those_asked_for(tmp_path):
    found = requests_of(Load(requests=4000, rate=5.0, seed=1), TOKENS)
    gaps = [b.at_s - a.at_s for a, b in zip(found, found[1:], strict=False)]
    assert abs(sum(gaps) / len(gaps) - 0.2) < 0.01
    assert abs(sum(gap > 0.2 for gap in gaps) / len(gaps) - 0.3679) < 0.02
    assert requests_of(Load(requests=4000, rate=5.0, seed=1), TOKENS) == found
    middle = sorted(len(one.prompt) for one in found)[2000]
    assert 110 < middle < 130 and max(one.said for one in found) == 512
    path = tmp_path / "lengths"
    path.write_text('{"prompt": 3, "said": 5}\n{"prompt": 7, "said": 2}\n')
    found = requests_of(Load(requests=3, lengths=path), TOKENS)
    assert [(len(one.prompt), one.said) for one in found] == [(3, 5), (7, 2), (3, 5)]


@pytest.mark.catches("goodput-of-all")
def test_good_is_what_kept_both_bounds():
    def one(first_s, last_s, **more):
        times = {"first_s": first_s, "last_s": last_s, "tokens": 11, "pieces": 11, "status": 200}
        return Asked(**{"at_s": 0.0, "prompt": [1], "said": 11, **times, **more})

    asked = [one(0.5, 1.0), one(2.0, 2.5), one(0.5, 4.0), one(0.5, 1.0, gives_up=5), one(0.0, 0.0)]
    asked[-1].status, asked[-1].tokens = 429, 0
    found = summary(asked, Bounds(first_s=1.0, between_s=0.1))
    assert found["heard"] == 4 and found["failed"] == {"429": 1} and found["given_up"] == 1
    assert found["good_share"] == 1 / 3 and found["goodput_per_s"] == 1 / 4.0
    assert found["said_tokens_per_s"] == 44 / 4.0
    assert found["first_token_s"]["p50"] == 0.5


def test_a_server_is_measured():
    """Tokens are those that the engine said, and who gives up is heard to."""
    engine = FakeEngine(step_s=0.001)
    load = Load(requests=30, rate=200.0, longest=40, cancelled=0.3)
    with running(engine) as server:
        found = asyncio.run(measured(f"http://127.0.0.1:{server.port}", load))
    told = summary(found, Bounds())
    assert told["failed"] == {} and told["heard"] == 30
    assert 0 < told["given_up"] < 20
    assert all(one.pieces <= one.tokens or one.gives_up for one in found)
    assert told["first_token_s"]["p50"] > 0


def test_a_server_that_answers_nobody(capsys, monkeypatch):
    """Is told as such, in JSON that others read."""
    engine = FakeEngine(hold=True)
    monkeypatch.setattr("colossax.serve.measuring.TIMEOUT_S", 0.5)
    with running(engine) as server:
        url = f"http://127.0.0.1:{server.port}"
        words = ["bench", "serve", url, "--requests=2", "--rate=100"]
        assert main([*words, "--json"]) == 1
        told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
        assert told["heard"] == 0 and told["wall_s"] is None and told["failed"] == {"0": 2}
        assert main(words) == 1
        assert "failed: 2 (the connection broke)" in capsys.readouterr().out


def test_from_the_command_line(capsys, tmp_path):
    with running(FakeEngine()) as server:
        url = f"http://127.0.0.1:{server.port}"
        words = ["--requests=5", "--rate=100", "--longest=20"]
        assert main(["bench", "serve", url, *words, "--json", f"--out={tmp_path / 'x'}"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["heard"] == 5 and told == json.loads((tmp_path / "x").read_text())
        assert main(["bench", "serve", f"{url}/v1/", *words]) == 0
        assert "5 of 5 requests heard" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "URL: it is missing; give that of a server"),
        (["http://127.0.0.1:9"], "URL: no server of `colossax serve` answers at"),
        (["what"], "URL: no server of `colossax serve` answers at what"),
        (["http://127.0.0.1:9", "--plan.mesh=fsdp=2"], "bench serve has no recipe and no plan"),
    ],
)
def test_refusals(words, message, capsys):
    assert main(["bench", "serve", *words]) == 2
    assert message in capsys.readouterr().err


def test_lengths_that_are_none(tmp_path):
    path = tmp_path / "lengths"
    path.write_text('{"prompt": 3}\n')
    with pytest.raises(InputError, match="--lengths: .* give lines as"):
        requests_of(Load(lengths=path), TOKENS)
