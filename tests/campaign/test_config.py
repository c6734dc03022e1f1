"""Recipes: inheritance, mandatory values, interpolation, overrides, and errors of one line that name the key."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from workbench.campaign.machines import derived
from workbench.config import allowed_in_words, describe, load_recipe, resolve_recipe
from workbench.errors import RecipeError
from workbench.places import shipped
from workbench.recipe_schema import Recipe
from workbench.train.buffer import ReplayBuffer

MINIMAL = "name: mine\nmodel: {path: tiny}\nenvironment: {name: add_up}\n"


def write(directory: Path, name: str, text: str) -> Path:
    path = directory / name
    path.write_text(text)
    return path


def refusal(path: Path | str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_code == 2
    return message


@pytest.mark.parametrize("path", sorted(shipped("recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_recipe_is_valid_and_named_after_its_file(path):
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    assert load_recipe(path.stem) == recipe
    assert recipe.token_capture.enabled


def test_the_default_recipe_is_a_real_campaign():
    recipe = load_recipe("cpu_smollm2")
    assert recipe.model.path == "smollm2-135m"
    assert recipe.train.steps >= 6
    assert recipe.train.groups_per_step >= 4
    assert recipe.train.rollouts_per_group >= 4


def test_capture_is_off_unless_a_recipe_turns_it_on(tmp_path):
    assert load_recipe(write(tmp_path, "r.yaml", MINIMAL)).token_capture.enabled is False


def test_defaults_inherit_to_any_depth_and_the_child_wins(tmp_path):
    write(tmp_path, "a.yaml", MINIMAL + "train: {steps: 3, learning_rate: 2.0e-5}\n")
    write(tmp_path, "b.yaml", "defaults: a.yaml\nname: b\ntrain: {steps: 4}\n")
    recipe = load_recipe(write(tmp_path, "c.yaml", "defaults: b.yaml\ntrain: {weight_decay: 0.1}\n"))
    assert (recipe.name, recipe.train.steps, recipe.train.learning_rate) == ("b", 4, 2e-5)
    assert recipe.train.weight_decay == 0.1


def test_defaults_may_be_a_list_and_name_shipped_recipes(tmp_path):
    write(tmp_path, "more.yaml", "train: {steps: 9}\n")
    recipe = load_recipe(write(tmp_path, "r.yaml", "defaults: [cpu_smoke.yaml, more.yaml]\nname: r\n"))
    assert (recipe.train.steps, recipe.model.path) == (9, "tiny")
    assert load_recipe(write(tmp_path, "s.yaml", "defaults: cpu_smoke\nname: s\n")).model.path == "tiny"


def test_a_mandatory_mark_never_hides_a_value_and_is_required_only_of_the_final_recipe(tmp_path):
    write(tmp_path, "base.yaml", MINIMAL.replace("tiny", '"???"') + "train: {steps: 3}\n")
    child = write(tmp_path, "child.yaml", 'defaults: base.yaml\nmodel: {path: tiny}\ntrain: {steps: "???"}\n')
    recipe = load_recipe(child)
    assert (recipe.model.path, recipe.train.steps) == ("tiny", 3)
    message = refusal(tmp_path / "base.yaml")
    assert "no value for model.path" in message
    assert "model.path=" in message
    assert load_recipe(tmp_path / "base.yaml", ["model.path=tiny"]).model.path == "tiny"


def test_interpolation_sees_the_final_values(tmp_path):
    text = MINIMAL + "rollouts: {max_inflight_groups: '${train.groups_per_step}'}\n"
    recipe = load_recipe(write(tmp_path, "r.yaml", text), ["train.groups_per_step=7"])
    assert recipe.rollouts.max_inflight_groups == 7
    assert "rollouts.max_inflight_groups" in refusal(tmp_path / "r.yaml", "rollouts.max_inflight_groups=${no.such}")


def test_another_environment_drops_the_options_of_the_one_before(tmp_path):
    assert load_recipe("cpu_smollm2").environment.options == {"turns": 3}
    assert load_recipe("cpu_smollm2", ["environment.name=add_up"]).environment.options == {}
    child = write(tmp_path, "c.yaml", "defaults: cpu_smollm2.yaml\nenvironment: {name: add_up, options: {high: 5}}\n")
    assert load_recipe(child).environment.options == {"high": 5}
    kept = load_recipe("cpu_smollm2", ["environment.name=guess_number", "train.advantage.name=rloo"])
    assert kept.environment.options == {"turns": 3}
    assert kept.train.advantage.options == {}


def test_origins_say_where_each_value_came_from(tmp_path):
    write(tmp_path, "base.yaml", MINIMAL + "train: {steps: 3}\n")
    child = write(tmp_path, "child.yaml", "defaults: base.yaml\nname: child\n")
    origins = resolve_recipe(child, ["seed=5"]).origins
    assert origins["name"].endswith("child.yaml")
    assert origins["train.steps"].endswith("base.yaml")
    assert origins["seed"] == "command line"
    assert origins["proof.max_mean_abs_delta"] == "schema default"
    text = describe(child, ["seed=5"])
    assert any(line.startswith("seed: 5 ") and line.endswith("# command line") for line in text.splitlines())


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.stps=3", "unknown key train.stps, did you mean train.steps?"),
        ("learning_rate=1", "unknown key learning_rate, did you mean train.learning_rate?"),
        ("lr=1e-5", "unknown key lr, did you mean train.learning_rate?"),
        ("train.lr=1e-5", "unknown key train.lr, did you mean train.learning_rate?"),
        ("environment.options={turns:3}", "environment.options.turns: a blank is missing after the colon: {turns: 3}"),
        ("train={steps:3}", "train.steps: a blank is missing after the colon: {steps: 3}"),
        ("environment.misbehave.rety=0.1", "did you mean environment.misbehave.retry?"),
        ("train.steps=many", "train.steps: expected a whole number ≥ 1, got 'many'"),
        ("train.steps=0", "train.steps: expected a whole number ≥ 1, got 0"),
        ("train.steps=true", "train.steps: expected a whole number ≥ 1, got True"),
        ("train.steps=", "train.steps: expected a whole number ≥ 1, got nothing"),
        ("train=", "train: expected a section with"),
        ('train.steps="3"', "train.steps: expected a whole number ≥ 1, got '3'"),
        ("train.learning_rate=.inf", "train.learning_rate: expected a number > 0.0"),
        ("train.loss.tis_cap=abc", "train.loss.tis_cap: expected a number > 0.0 or null, got 'abc'"),
        ("train.buffer_groups=0", "train.buffer_groups: expected a whole number ≥ 1 or null, got 0"),
        ("model.dtype=fp8", "model.dtype: expected one of 'bfloat16', 'float32', got 'fp8'"),
        ("train=3", "train: expected a section with steps"),
        ("name=a/b", "name: expected a text matching"),
        ("train.steps=${no.such}", "train.steps: Interpolation key 'no.such' not found"),
        ("reports.dir=${oc.env:MY_API_KEY}", "reports.dir: $MY_API_KEY looks like a secret"),
        ("model.path=${oc.env:HF_TOKEN,none}", "model.path: $HF_TOKEN looks like a secret"),
        ("steps", "expected key=value"),
        ("train.steps=[", "cannot be read"),
        ("ray.num_cpus=2", "ray.num_cpus: expected at least 3 logical CPUs"),
        ("train.router_replay.mode=direct", "train.router_replay.mode: expected none, because token_capture.routes"),
        ("token_capture={enabled: false, routes: true}", "token_capture.routes: expected false, because routes are"),
        ("sampling.max_tokens=1024", "sampling.max_tokens: expected less than model.max_model_len (1024)"),
        ("environment.misbehave.retry=1.5", "environment.misbehave.retry: expected a number ≥ 0.0 and ≤ 1.0"),
        ("environment.misbehave={retry: 0.6, edit: 0.6}", "retry + branch + overflow + edit to be at most 1, got 1.2"),
    ],
)
def test_a_wrong_override_is_refused_in_one_line(override, expected):
    message = refusal("cpu_smollm2", override)
    assert expected in message
    assert "command line" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("trian: {steps: 3}\n", "r.yaml: unknown key trian, did you mean train?"),
        (MINIMAL + "train: {steps: x}\n", "r.yaml: train.steps: expected a whole number"),
        ("- a\n", "r.yaml: expected a mapping of sections, got a list"),
        ("root:x:0:0:root\nbin:x:2:2:bin\n", "r.yaml: expected a mapping of sections, got plain text"),
        ("train: {\n", "r.yaml: cannot be read as YAML"),
        ("seed: 1\nseed: 2\n", "r.yaml: cannot be read as YAML"),
        ("defaults: nowhere.yaml\n", "no file 'nowhere.yaml'"),
        ("defaults: cpu_smok\n", "did you mean cpu_smoke?"),
        ("a: &a [*a]\n", "r.yaml: expected values in a few levels, got an alias (*) inside of what it names"),
        ("defaults: cpu_smoke\n1: 2\n", "r.yaml: unknown key 1. Allowed here: name"),
        (
            "defaults: cpu_smoke\nenvironment: {options: {1: 2}}\n",
            "environment.options: expected names that are texts, got 1",
        ),
        ("defaults: [3]\n", "expected a file name or a list of them"),
        ("defaults: r.yaml\n", "r.yaml → r.yaml"),
    ],
)
def test_a_wrong_file_is_refused_by_its_name(tmp_path, text, expected):
    assert expected in refusal(write(tmp_path, "r.yaml", text))


def test_a_file_that_is_no_recipe_is_not_quoted(tmp_path):
    assert "x:0:0" not in refusal(write(tmp_path, "passwd", "root:x:0:0:root\nbin:x:2:2:bin\n"))


def test_what_a_key_takes_is_said_of_the_whole_field_and_of_nothing_unknown():
    assert allowed_in_words(("train", "steps", 0)) == allowed_in_words(("train", "steps")) == "a whole number ≥ 1"
    assert allowed_in_words(("nowhere",)) == "another value"


def test_an_unknown_recipe_names_the_nearest_and_all_others():
    message = refusal("cpu_smok")
    assert "did you mean cpu_smoke?" in message
    assert "cpu_smollm2" in message


def test_a_scripted_engine_needs_its_script():
    assert refusal("cpu_smoke", "engine.kind=scripted").startswith("engine.script_path: expected a JSONL file")


@pytest.mark.parametrize(("key", "value"), [("top_p", "0.9"), ("top_k", "20"), ("min_p", "0.05")])
def test_sampling_from_a_truncated_set_is_refused_because_the_trainer_cannot_score_it(key, value):
    with pytest.raises(RecipeError, match=rf"sampling\.{key}: expected .* got {value}"):
        load_recipe("cpu_smoke", [f"sampling.{key}={value}"])


def test_calls_of_the_echo_arm_cannot_straddle_a_weight_sync():
    refused = refusal("cpu_smoke", "train.live_calls=straddle", "token_capture.enabled=false")
    assert "train.live_calls: expected 'finish', because without token capture nobody knows" in refused
    assert load_recipe("cpu_smoke", ["train.live_calls=straddle"]).train.live_calls == "straddle"


def test_a_joined_cluster_brings_its_own_cpus():
    assert load_recipe("cpu_smoke", ["ray.address=auto", "ray.num_cpus=1"]).ray.num_cpus == 1


def test_a_recipe_is_frozen_and_survives_a_round_trip():
    recipe = load_recipe("cpu_misbehave")
    with pytest.raises(ValueError, match="frozen"):
        recipe.train.steps = 3
    assert Recipe.model_validate(recipe.model_dump()) == recipe


def test_every_field_is_documented():
    def undocumented(schema: type[BaseModel]) -> list[str]:
        missing = []
        for name, field in schema.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                missing += undocumented(field.annotation)
            elif not field.description:
                missing.append(f"{schema.__name__}.{name}")
        return missing

    assert undocumented(Recipe) == []


def test_a_value_may_come_from_the_environment_unless_it_looks_like_a_secret(monkeypatch):
    monkeypatch.setenv("MY_MODELS", "/models")
    assert load_recipe("cpu_smoke", ["model.path=${oc.env:MY_MODELS}/tiny"]).model.path == "/models/tiny"


def test_what_is_left_open_is_derived_as_the_parts_derive_it_and_secrets_are_only_named():
    recipe = load_recipe("cpu_smoke")
    values = {each.key: each.value for each in derived.derived(recipe)}
    assert values["train.buffer_groups"] == ReplayBuffer.of(recipe.train).capacity == 6
    assert values["rollouts.max_inflight_rollouts"] == 8
    assert values["train.loss.constant_tokens"] == 1024
    assert values["train.off_policy.max_lag"] == 1
    assert values["control token"] == "$WORKBENCH_CONTROL_TOKEN"
    given = load_recipe("cpu_smoke", ["train.buffer_groups=5", "train.loss.constant_tokens=9", "engine.threads=1"])
    assert not {"train.buffer_groups", "train.loss.constant_tokens", "engine.threads"} & {
        each.key for each in derived.derived(given)
    }
