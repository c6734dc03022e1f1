"""An environment of one's own that does not fit is refused before anything starts, with its line and what to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.campaign.environments import make_environment, task_seed
from workbench.campaign.environments.base import Reward
from workbench.campaign.environments.components import components_needed
from workbench.campaign.environments.fit import parts_fault, task_of
from workbench.config import load_recipe
from workbench.errors import RecipeError

GOOD = """
from workbench.campaign.environments.base import AgentResult, Reward, Task

class Mine:
    name, min_calls = "mine", 1

    def __init__(self, options):
        self.options = options

    def task(self, seed):
        return Task(f"mine-{seed}", seed, {})

    async def run(self, client, model, task, rng):
        return AgentResult(None, [])

    def reward(self, task, result):
        return Reward(0.0)
"""
SEED = task_seed(load_recipe("cpu_smoke").seed, 0)


def made(path: Path, *overrides: str):
    return make_environment(load_recipe("cpu_smoke", [f"environment.name={path}:Mine", *overrides]))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_env.py"
    path.write_text(GOOD)
    return path


def change(file: Path, before: str, after: str) -> None:
    assert before in GOOD
    file.write_text(GOOD.replace(before, after))


def test_one_that_fits_is_made_and_a_fault_is_played_by_it_too(file):
    assert made(file).task(3).task_id == "mine-3"
    assert made(file, "environment.misbehave.retry=1.0").task(3).task_id == "mine-3"


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ('return Task(f"mine-{seed}", seed, {})', "return", "task() (my_env.py:10) returned, for seed SEED, None"),
        ('f"mine-{seed}", seed, {}', "seed, seed, {}", "a Task whose task_id is SEED (an int), expected a text"),
        ("return Task(", "return self.options['words'] + (", "task(SEED) raised KeyError: 'words' at my_env.py:11"),
        ("def task(self, seed)", "def task(self)", "task() (my_env.py:10) does not take what it is given"),
        ("def task(self, seed)", "async def task(self, seed)", "task() (my_env.py:10) is async, and nobody awaits it"),
        ("async def run", "def run", "run() (my_env.py:13) is not async, expected async def run(self, client, model"),
        ("return AgentResult(None, [])", "yield 1", "run() (my_env.py:13) yields, expected async def run("),
        ("client, model, task, rng", "client, task", "run() (my_env.py:13) does not take what it is given"),
        ("def reward(self", "async def reward(self", "reward() (my_env.py:16) is async, and nobody awaits it"),
        ("def reward(self, task, result)", "def reward(self, result)", "expected def reward(self, task, result)"),
        ('"mine", 1\n', '"mine", "one"\n', "min_calls is 'one' (a str), expected a whole number, 0 or more"),
        ('"mine", 1\n', "None, 1\n", "name is None, expected a text"),
        ("self.options = options", "1 / 0", "cannot be made from environment.options: ZeroDivisionError: "),
        ("self, options", "self", "(too many positional arguments), expected def __init__(self, options)"),
        ("class Mine", "exit(3)\nclass Mine", "cannot be imported (SystemExit: 3 at my_env.py:4)"),
        ("class Mine", "{}['x']\nclass Mine", "cannot be imported (KeyError: 'x' at my_env.py:4)"),
        ("class Mine", "class Mime", "has no 'Mine', did you mean Mime? It has Mime"),
        ("class Mine:", "class Mine", "cannot be imported (SyntaxError: "),
    ],
)  # fmt: skip
def test_one_that_does_not_fit_is_refused_in_a_sentence(file, before, after, says):
    change(file, before, after)
    with pytest.raises(RecipeError) as refused:
        made(file)
    assert says.replace("SEED", str(SEED)) in str(refused.value) and "\n" not in str(refused.value)
    assert str(refused.value).startswith("environment.name: ")


def test_an_agent_that_may_make_no_call_is_given_no_fault(file):
    change(file, '"mine", 1\n', '"mine", 0\n')
    assert made(file).min_calls == 0
    with pytest.raises(RecipeError, match=r"environment\.misbehave: mine may make no call"):
        made(file, "environment.misbehave.retry=0.5")


def test_a_decorator_around_a_method_is_looked_through(file):
    logged = """
import functools

def logged(function):
    @functools.wraps(function)
    def call(*given):
        return function(*given)
    return call

class Mine:"""
    file.write_text(GOOD.replace("class Mine:", logged).replace("    async def run", "    @logged\n    async def run"))
    assert made(file).name == "mine"


def test_a_task_that_fails_later_is_a_sentence_and_no_exception(file):
    change(file, "return Task(", f"{{{SEED}: 0}}[seed]; return Task(")
    assert task_of(made(file, "environment.misbehave.retry=1.0"), 5) == "task(5) raised KeyError: 5 at my_env.py:11"
    other = file.with_name("other_env.py")
    other.write_text(GOOD.replace("return Task(", f"exit(seed) if seed != {SEED} else None; return Task("))
    assert task_of(made(other), 5) == "task(5) raised SystemExit: 5 at other_env.py:11"


def test_a_first_task_that_never_comes_is_refused_after_the_time_of_a_rollout(file):
    change(file, "return Task(f", "import time; time.sleep(30); return Task(f")
    with pytest.raises(RecipeError, match=rf"Mine': task\({SEED}\) did not come within rollouts.timeout_s=0.5; see"):
        made(file, "rollouts.timeout_s=0.5")


GDPO = "train.advantage={name: gdpo, options: {}}"


def test_components_that_an_environment_names_are_held_against_every_reward(file):
    recipe = load_recipe("cpu_smoke", [f"environment.name={file}:Mine", GDPO])
    assert components_needed(recipe, make_environment(recipe)) == frozenset()  # it names none
    change(file, "name, min_calls = ", "components = ('form', 'near')\n    name, min_calls = ")
    other = file.rename(file.with_name("other_env.py"))
    recipe = load_recipe("cpu_smoke", [f"environment.name={other}:Mine", "environment.misbehave.retry=1.0", GDPO])
    environment = make_environment(recipe)
    needed = components_needed(recipe, environment)
    assert needed == {"form", "near"}
    assert parts_fault(environment, Reward(1.0, {"form": 1.0, "near": 0.0}), needed) is None
    fault = parts_fault(environment, Reward(1.0, {"form": 1.0}), needed)
    assert fault == (
        "reward() (other_env.py:17) returned a Reward without the component near, which the recipe's estimator "
        "needs of every one; it has form"
    )


def test_an_estimator_of_components_is_refused_for_an_environment_that_has_none(file):
    change(file, "name, min_calls = ", "components = ()\n    name, min_calls = ")
    recipe = load_recipe("cpu_smoke", [f"environment.name={file}:Mine", GDPO])
    with pytest.raises(RecipeError, match=r"train.advantage.name: gdpo needs the parts .* those of mine have none"):
        components_needed(recipe, make_environment(recipe))
