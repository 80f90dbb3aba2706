"""The maker of `.venv`: which JAX it picks, what it refuses, when it has nothing to do."""

import sys

import pytest

from ci import environment


@pytest.mark.parametrize(
    ("driver", "extra", "says"),
    [
        (None, None, "nvidia-smi does not answer: JAX for CPU"),
        ("580.65.06", "cuda13", "NVIDIA driver 580.65.06: JAX for CUDA 13"),
        ("579.99", "cuda12", "NVIDIA driver 579.99: JAX for CUDA 12"),
        ("525.60.13", "cuda12", "NVIDIA driver 525.60.13: JAX for CUDA 12"),
        ("470.82.01", None, "NVIDIA driver 470.82.01 is older than 525: JAX for CPU"),
    ],
)
def test_the_driver_decides_the_build(driver, extra, says):
    assert environment.choose_build(driver) == (extra, says)


def test_an_old_python_is_refused():
    message = "old is Python 3.10.13, but 3.11 or later is needed; name another, as in `make train"
    with pytest.raises(environment.Refusal, match=message):
        environment.check_python((3, 10, 13, "final", 0), "old")


def test_a_python_that_cannot_make_environments_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(environment.Refusal, match="py lacks the module 'ensurepip' that makes"):
        environment.check_python((3, 11, 2, "final", 0), "py")


@pytest.fixture
def commands(monkeypatch, tmp_path):
    """Commands the environment would run, in an empty project."""
    made = []

    def run_logged(command, log):
        made.append(command[1:])
        if "venv" in command:
            (tmp_path / "env").mkdir(exist_ok=True)

    (tmp_path / "pyproject.toml").write_text("[project]")
    monkeypatch.setattr(environment, "run_logged", run_logged)
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    return made


def test_work_is_done_once_and_extras_add_up(commands, tmp_path, monkeypatch):
    folder, root = str(tmp_path / "env"), str(tmp_path)

    def installed(*extras):
        commands.clear()
        environment.ensure(folder, list(extras), [], root, "why")
        return [command[-1] for command in commands]

    assert installed() == [folder, root]
    assert installed() == []
    assert installed("dev") == [f"{root}[dev]"]
    assert installed() == installed("dev") == []
    (tmp_path / "pyproject.toml").write_text("[project] changed")
    assert installed() == [folder, root]
    (tmp_path / "lowest.txt").write_text("jax==0")
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "lowest.txt"))
    assert installed("dev") == [folder, f"{root}[dev]"]


def test_only_an_environment_of_ours_is_emptied(commands, tmp_path):
    (tmp_path / "env").mkdir()
    environment.ensure(str(tmp_path / "env"), [], [], str(tmp_path), "why")
    assert "--clear" not in commands[0]
    (tmp_path / "pyproject.toml").write_text("[project] changed")
    commands.clear()
    environment.ensure(str(tmp_path / "env"), [], [], str(tmp_path), "why")
    assert "--clear" in commands[0]


def test_a_failing_command_shows_its_end(tmp_path, capsys):
    log = tmp_path / "log"
    command = [sys.executable, "-c", "print('no such package'); raise SystemExit(3)"]
    with pytest.raises(environment.Refusal, match=r"failed with exit status 3; all it said is in"):
        environment.run_logged(command, str(log))
    assert "no such package" in capsys.readouterr().err
