"""Part logs: the end of what each part wrote outlives the directory of its Ray, without a secret of the run."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time

import pytest

from workbench import part_logs
from workbench.places import make_ray_directory

NAME = "worker-bbed80c2-01000000-17507"


@pytest.fixture
def ray_logs():
    directory = make_ray_directory()
    logs = directory / "session_2026" / "logs"
    logs.mkdir(parents=True)
    (directory / "session_latest").symlink_to(logs.parent)
    yield directory, logs
    shutil.rmtree(directory)


def test_what_an_actor_wrote_is_kept_under_its_name_and_what_says_nothing_is_not(ray_logs, tmp_path):
    directory, logs = ray_logs
    (logs / f"{NAME}.err").write_text(":job_id:01\n:actor_name:PolicyWorker\nEngineCore failed to start.\n")
    (logs / f"{NAME}.out").write_text(":job_id:01\n:actor_name:PolicyWorker\n")
    (logs / "worker-11ba40f1-ffffffff-17068.err").write_text("no actor's\n")
    (logs / "raylet.err").write_text("out of memory\n")
    (logs / "gcs_server.out").write_text("long, and about Ray alone\n")
    part_logs.keep(directory, tmp_path)
    kept = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert kept == {
        "PolicyWorker-17507.err": "EngineCore failed to start.\n",
        "worker-17068.err": "no actor's\n",
        "raylet.err": "out of memory\n",
    }
    began = time.time() + 1
    assert part_logs.kept(tmp_path, 0) == tmp_path / "logs" and part_logs.kept(tmp_path, began) is None


def test_of_a_long_log_the_end_is_kept_in_whole_lines(ray_logs, tmp_path):
    directory, logs = ray_logs
    (logs / f"{NAME}.out").write_text(":actor_name:Trainer\n" + "a line of it\n" * 100_000 + "the last\n")
    part_logs.keep(directory, tmp_path)
    text = (tmp_path / "logs" / "Trainer-17507.out").read_text()
    assert len(text) <= part_logs.KEPT_BYTES and text.startswith("a line of it\n") and text.endswith("the last\n")


def test_no_secret_of_the_run_stands_in_a_kept_log(ray_logs, tmp_path, monkeypatch):
    directory, logs = ray_logs
    monkeypatch.setenv("WORKBENCH_CONTROL_TOKEN", "of-this-process-1234")
    written = [
        "env of-this-process-1234 and of-another-process-5678",
        "{'RAY_AUTH_TOKEN': 'in-a-dump-1', \"HF_TOKEN\": \"in-a-dump-2\"} OPENAI_API_KEY=in-a-dump-3 max_tokens=64",
        "Authorization: Bearer in-a-header-4",
    ]
    (logs / f"{NAME}.err").write_text("\n".join(written))
    others = part_logs.secrets_in([b"WORKBENCH_WORKER_TOKEN=of-another-process-5678", b"HOME=/home/somebody"])
    part_logs.keep(directory, tmp_path, others)
    assert (tmp_path / "logs" / "worker-17507.err").read_text().splitlines() == [
        "env *** and ***",
        "{'RAY_AUTH_TOKEN': '***', \"HF_TOKEN\": \"***\"} OPENAI_API_KEY=*** max_tokens=64",
        "Authorization: Bearer ***",
    ]


def test_a_part_says_where_its_words_will_be(ray_logs, tmp_path):
    def said(log) -> str:
        log.write_text(":actor_name:PolicyWorker\n")
        asks = "from workbench.part_logs import own_log; print(own_log())"
        with log.open("ab") as stderr:
            return subprocess.run(
                [sys.executable, "-c", asks], stdout=subprocess.PIPE, stderr=stderr, text=True, check=True
            ).stdout.strip()

    _, logs = ray_logs
    assert said(logs / f"{NAME}.err") == "logs/PolicyWorker-17507.out and .err in the run's directory"
    # A cluster's Ray is not ours to clear up: its file stays where it is.
    assert said(tmp_path / f"{NAME}.err").startswith(f"{tmp_path / NAME}.out and .err on ")
    assert said(tmp_path / "stderr.txt") == "what its process wrote on stderr"
