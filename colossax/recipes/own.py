"""Recipes of one's own: `package.module:function`, and files of a configuration."""

import dataclasses
import importlib
import sys
import tomllib
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colossax.config import nearest, user_path
from colossax.documents import parse_json, read_small
from colossax.errors import InputError
from colossax.recipes.registry import RECIPES, recipe
from colossax.tasks import TrainConfig, train_config_from_json
from colossax.tasks.config import train_config_to_json

if TYPE_CHECKING:
    from colossax.run import RunConfig
    from colossax.tasks import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnTask:
    """A task that a recipe of one's own gave.

    Attributes:
        name: As it was asked for.
        task: What it gave.
        config: How it is run, where the recipe says so: `(Task, RunConfig)`.
    """

    name: str
    task: "Task"
    config: "RunConfig | None"


def any_recipe(name: str) -> TrainConfig | OwnTask:
    """What a recipe gives: one of the library by its name, or `package.module:function`.

    Modules are found as Python finds them, and after that in the working folder. The function takes
    nothing and gives a `TrainConfig`, a `Task`, or a pair `(Task, RunConfig)`.

    Raises:
        InputError: There is no such recipe, or it fails, with what and where.
    """
    if ":" not in name:
        return recipe(name)
    from colossax.run import RunConfig  # both need JAX, which names of the library do without
    from colossax.tasks import Task

    given = _called(name, _attribute(name))
    pair = given if isinstance(given, tuple) else (given, None)
    if isinstance(given, TrainConfig):
        return given
    if len(pair) == 2 and isinstance(pair[0], Task) and isinstance(pair[1], RunConfig | None):
        return OwnTask(name=name, task=pair[0], config=pair[1])
    raise InputError(
        f"recipe {name}: gives a {type(given).__name__}; return a colossax.tasks.TrainConfig, a"
        " colossax.tasks.Task, or (Task, colossax.run.RunConfig)"
    )


def _attribute(name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute.isidentifier():
        raise InputError(f"recipe {name}: write it package.module:function")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as problem:
        if problem.name is None or not f"{module_name}.".startswith(f"{problem.name}."):
            raise _failed(name, problem) from problem
        if module_name.endswith(".py"):
            meant = ".".join(Path(module_name).with_suffix("").parts)
            raise InputError(
                f"recipe {name}: name a module, not its file; did you mean '{meant}:{attribute}'?"
            ) from None
        raise InputError(
            f"recipe {name}: there is no module '{problem.name}' on Python's path or in {here};"
            " name one that can be imported from there"
        ) from None
    except Exception as problem:  # noqa: BLE001 (any that the user's module raises)
        raise _failed(name, problem) from problem
    if not hasattr(module, attribute):
        there = [one for one, value in vars(module).items() if callable(value)]
        raise InputError(
            f"recipe {name}: {module_name} has no '{attribute}'{nearest(attribute, there)}"
        )
    return getattr(module, attribute)


def _called(name: str, function: Any) -> Any:
    if not callable(function):
        return function
    try:
        return function()
    except InputError:
        raise
    except Exception as problem:  # noqa: BLE001 (any that the user's function raises)
        raise _failed(name, problem) from problem


def _failed(name: str, problem: BaseException) -> InputError:
    where = traceback.extract_tb(problem.__traceback__)[-1]
    file, line, said = where.filename, where.lineno, str(problem)
    if isinstance(problem, SyntaxError):
        file, line, said = problem.filename, problem.lineno, problem.msg
    return InputError(
        f"recipe {name}: fails at {file}:{line} with {type(problem).__name__}:"
        f" {' '.join(said.split())}"
    )


def recipe_from_file(path: str) -> TrainConfig:
    """The configuration in a JSON or TOML file.

    It is whole, as a run's `run.json` is, or names a `recipe` and holds what differs from it:
    `{"recipe": "llama_tiny", "steps": 20, "data": {"seq_len": 64}, "plan": {"mesh": {"fsdp": 8}}}`.

    Raises:
        InputError: The file cannot be read, or a name or value does not fit.
    """
    data = _read(path)
    if isinstance(data.get("config"), Mapping):  # a run's own
        data = data["config"]
    model = data.get("model")
    if not isinstance(model, Mapping) or "family" not in model:
        if not isinstance(data.get("recipe"), str):
            raise InputError(
                f"--config {path}: has neither a whole model nor a recipe; name the recipe that it"
                ' starts from, as in {"recipe": "llama_tiny", "steps": 20}'
            )
        base = any_recipe(data["recipe"])
        if not isinstance(base, TrainConfig):
            raise InputError(
                f"--config {path}: {data['recipe']} gives a task, which has no values to change;"
                " train it by its name"
            )
        data = _merged(base, train_config_to_json(base), data, path)
    try:
        return train_config_from_json(dict(data))
    except InputError as problem:
        raise InputError(f"--config {path}: {problem}") from None


def _read(path: str) -> Mapping[str, Any]:
    kinds = {".json": parse_json, ".toml": _toml}
    file = user_path(path, "--config", utf8=False)
    suffix = file.suffix
    if suffix not in kinds:
        raise InputError(f"--config {path}: is neither .json nor .toml; give one of them")
    try:
        return kinds[suffix](read_small(file))
    except OSError as problem:
        raise InputError(f"--config {path}: cannot be read ({problem.strerror})") from None
    except ValueError as problem:
        raise InputError(f"--config {path}: {problem}; correct the file") from None


def _toml(content: bytes) -> dict[str, Any]:
    try:
        return tomllib.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except ValueError as problem:
        raise ValueError(f"it is no TOML: {problem}") from None


def _merged(config: Any, base: Mapping[str, Any], data: Any, where: str) -> Any:
    """`base`, the JSON of a configuration, with the fields of `data` in it, at any depth."""
    if not isinstance(data, Mapping):
        raise InputError(f"--config {where}: expected an object of fields, found {data!r}")
    merged = dict(base)
    for name, value in data.items():
        if name not in base:
            raise InputError(f"--config {where}: unknown field '{name}'{nearest(name, base)}")
        below = getattr(config, name, None)
        nested = dataclasses.is_dataclass(below) and isinstance(base[name], Mapping)
        merged[name] = _merged(below, base[name], value, f"{where}: {name}") if nested else value
    return merged


def described() -> dict[str, str]:
    """First line of what each recipe of the library says of itself, by name."""
    return {name: (make.__doc__ or "").splitlines()[0] for name, make in RECIPES.items()}
