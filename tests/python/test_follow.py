"""cohort.Follow and python -m cohort.follow: the numbers of metrics.jsonl, each once, in the client's run. Fake clients take the
place of wandb and trackio, so that this needs neither; the last tests have the real ones, offline."""
import contextlib
import fcntl
import json
import math
import os
import pathlib
import signal
import sqlite3
import struct
import subprocess
import sys
import time
from collections import Counter

import cohort
import pytest
from cohort import training
from cohort._background import Background

# Both keep rows in files. As in the real clients, the latest rows of a killed process are lost: rows are written by threes.
STORE = '''
import json, os, pathlib

STORE = pathlib.Path(os.environ["FAKE_STORE"])


class Rows:
    def __init__(self, path):
        self.path, self._rows = path, []
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def log(self, numbers, step, commit=True):
        assert commit and all(type(value) in (int, float) for value in numbers.values())
        self._rows.append(json.dumps([step, numbers]))
        if len(self._rows) == 3:
            self.finish()

    def finish(self):
        with self.path.open("a") as file:
            file.writelines(row + "\\n" for row in self._rows)
        self._rows = []
'''
CLIENTS = {"wandb": STORE + '''
import time


class Run(Rows):
    def __init__(self, path, offline):
        super().__init__(path)
        self.offline, self.axes = offline, {}
        rows = path.read_text().splitlines()
        self.step = json.loads(rows[-1])[0] + 1 if rows else 0

    def define_metric(self, name, step_metric):
        self.axes[name] = step_metric

    def log(self, numbers, step, commit):
        assert step >= self.step  # which a server would drop
        assert any(axis in numbers for axis in self.axes.values())
        super().log(numbers, step, commit)


def init(project, name, id, resume, config, mode, dir, allow_val_change, reinit):
    assert allow_val_change and reinit == "create_new" and project and name and resume == "allow" and "steps" in " ".join(config)
    offline = (mode or os.environ.get("WANDB_MODE")) == "offline"
    folder = STORE / "wandb" / f"{'offline-' if offline else ''}run-{time.time_ns() if offline else 0}-{id}"
    assert dir == str(STORE)
    return Run(folder / "rows", offline)
''', "trackio": STORE + '''
class Stored:
    def __init__(self, path):
        self._path, self.name = path, path.name

    def delete(self):
        self._path.unlink()


class Api:
    def runs(self, project):
        if not (STORE / project).exists():
            raise ValueError("no project")
        return [Stored(path) for path in (STORE / project).iterdir()]


def init(project, name, config, embed):
    assert not (STORE / project / name).exists() and "steps" in " ".join(config) and not embed
    return Rows(STORE / project / name)
'''}
WAYS = ["wandb offline", "wandb", "trackio"]


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """The folder in which fake clients store their rows; other processes import them too."""
    for name, text in CLIENTS.items():
        (tmp_path / "clients").mkdir(exist_ok=True)
        (tmp_path / "clients" / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("FAKE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "clients"))
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "store"))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.syspath_prepend(tmp_path / "clients")
    yield tmp_path / "store"
    for name in CLIENTS:
        sys.modules.pop(name, None)


def follow(way):
    return cohort.Follow(way.split()[0], offline="offline" in way)


def command(way, run):
    return [sys.executable, "-m", "cohort.follow", str(run), "--to", way.split()[0], *(["--offline"] if "offline" in way else [])]


def rows(store):
    (path,) = [path for path in store.rglob("*") if path.is_file()]  # no second copy
    return [json.loads(line) for line in path.read_text().splitlines()]


def stored(store):
    """How often each number is in the client's run: by name, step and value."""
    out = Counter()
    for step, numbers in rows(store):
        axes = [name for name in numbers if name == "step" or name.endswith("/step")]
        for name, value in numbers.items():
            if name not in axes:
                out[name, numbers[axes[0]] if axes else step, value] += 1
    return out


def logged(run, names=lambda name: True):
    """The same of the files of a run."""
    out = Counter()
    for path in [pathlib.Path(run, "metrics.jsonl"), *pathlib.Path(run).glob("*-*/metrics.jsonl")]:
        prefix = "" if path.parent == pathlib.Path(run) else path.parent.name + "/"
        for line in map(json.loads, path.read_text().splitlines() if path.exists() else []):
            out.update((prefix + name, line["step"], value) for name, value in line.items()
                       if name != "step" and type(value) in (int, float) and math.isfinite(value) and names(prefix + name))
    return out


def append(run, step, **values):
    with pathlib.Path(run, "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "time": "12:00", **values}) + "\n")


def wait_for(condition):
    for _ in range(600):
        with contextlib.suppress(ValueError, OSError):  # of files that a follower replaces meanwhile
            if condition():
                return
        time.sleep(0.05)
    raise AssertionError("nothing happened in 30 seconds")


@pytest.fixture
def run(tmp_path):
    """The folder of a run that trains: it is locked, and has four steps and an evaluation."""
    config = {"name": "run", "trainer": "sft", "steps": 100, "model": {"num_layers": 1, "d_model": 16, "num_heads": 2},
              "data": {"task": "addition"}}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(json.dumps(config))
    append(tmp_path / "run", 0, eval=True, loss=0.5)
    for step in range(1, 5):
        append(tmp_path / "run", step, loss=1 / step, skipped=None, seconds=float("nan"), count=3)
    with (tmp_path / "run" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield tmp_path / "run"


@pytest.mark.parametrize("way", WAYS)
def test_a_callback_logs_every_number_of_all_stages(small, fake, way):
    config = small("sft", stages=[{"trainer": "sft", "batch_size": 4, "steps": steps} for steps in (5, 4)])
    result = cohort.train(config, callbacks=[follow(way)], progress=False)
    assert stored(fake) == logged(result.dir)
    names = {name for name, _, _ in stored(fake)}
    assert {"1-sft/loss", "2-sft/loss"} < names and not {name for name in names if name.endswith("/eval")}


@pytest.mark.parametrize("way", WAYS)
def test_a_killed_and_resumed_run_trains_steps_again(small, fake, tmp_path, way):
    config = small("sft", batch_size=4, steps=7, checkpoint={"every": 2})
    script = f'''
import cohort, os, signal


class Kills(cohort.Callback):
    def on_step(self, metrics):
        if metrics["step"] == 5:
            os.kill(os.getpid(), signal.SIGKILL)


cohort.train({config!r}, callbacks=[cohort.Follow({way.split()[0]!r}, offline={"offline" in way}), Kills()], progress=False)
'''
    done = subprocess.run([sys.executable, "-c", script], timeout=120)
    assert done.returncode == -signal.SIGKILL and stored(fake)
    result = cohort.train(resume=config["output_dir"], callbacks=[follow(way)], progress=False)
    assert [metrics["step"] for metrics in result.metrics] == list(range(1, 8))
    if way != "wandb":
        assert stored(fake) == logged(result.dir)
    else:  # the server has the times of step 5 before the kill, if that was sent
        assert {key[:2] for key in stored(fake)} == {key[:2] for key in logged(result.dir)}
        assert all(count == 1 for count in stored(fake).values())
        exact = [Counter(key for key in counts.elements() if key[0] in ("loss", "num_tokens"))
                 for counts in (stored(fake), logged(result.dir))]
        assert exact[0] == exact[1] and exact[0]


@pytest.mark.parametrize("way", WAYS)
def test_a_follower_that_was_killed_continues(fake, run, way):
    step = 4
    for _ in range(3):
        process = subprocess.Popen(command(way, run))
        for _ in range(5):
            append(run, step := step + 1, loss=0.1 * step, count=4)
        wait_for(lambda: len(rows(fake)) >= step // 3 * 3)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    process = subprocess.Popen(command(way, run))
    append(run, step + 1, loss=7)
    (run / ".lock").unlink()  # the run has ended
    assert process.wait(60) == 0
    assert stored(fake) == logged(run) and len(rows(fake)) == step + 2


@pytest.mark.parametrize("way", WAYS)
def test_an_incomplete_line_waits_and_a_damaged_one_is_left_out(fake, run, caplog, way):
    follower = follow(way)
    follower.on_message(f"run directory: {run}")
    with (run / "metrics.jsonl").open("a") as file:
        file.write("not JSON\n" + "[" * 100_000 + '\n{"step": 5, "loss": 1' + "0" * 400 + '}\n{"step": 5, "lo')
        file.flush()
        follower.on_step({})
        file.write('ss": 0.25}\n{"step": 6, "loss": 12')
    follower.on_end()
    assert "damaged" in caplog.text and [numbers.get("loss") for _, numbers in rows(fake)][-2:] == [0.25, 0.25]
    assert not any(name in numbers for _, numbers in rows(fake) for name in ("skipped", "seconds", "time", "eval"))


@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_a_resume_has_replaced_is_logged_once(fake, run, way):
    follower = follow(way)
    follower.on_message(f"run directory: {run}")
    follower.on_step({})
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "new").write_text("".join(lines[:3]))
    os.replace(run / "new", run / "metrics.jsonl")
    follower.on_step({})
    for step in range(3, 8):
        append(run, step, loss=1 / step, count=3)
    follower.on_end()
    assert stored(fake) == logged(run)


def test_a_damaged_id_removes_no_other_run(fake, run):
    (run / ".follow-wandb").write_bytes(b"*\xff")
    other = fake / "wandb" / "offline-run-1-01234567\N{REPLACEMENT CHARACTER}"
    other.mkdir(parents=True)
    for _ in range(2):
        follower = follow("wandb offline")
        follower.on_message(f"run directory: {run}")
        follower.on_end()
    assert other.exists() and stored(fake) == logged(run)


def test_an_interrupt_ends_the_follower_with_what_it_has_logged(fake, run):
    process = subprocess.Popen(command("wandb offline", run), stderr=subprocess.PIPE, text=True)
    wait_for(lambda: rows(fake))
    process.send_signal(signal.SIGINT)
    assert "Traceback" not in process.communicate(timeout=30)[1] and process.returncode == 130
    assert stored(fake) <= logged(run)


def test_a_run_has_one_follower(fake, run):
    first = follow("trackio")
    first.on_message(f"run directory: {run}")
    with pytest.raises(cohort.InputError, match="another process"):
        follow("trackio").on_message(f"run directory: {run}")
    first.on_end()
    (run / ".lock").unlink()
    follow("trackio").until_end(run)
    assert stored(fake) == logged(run)


def test_an_error_of_the_client_ends_the_callback(fake, run, monkeypatch):
    follower = follow("trackio")
    follower.on_message(f"run directory: {run}")
    monkeypatch.setattr("trackio.Rows.log", lambda *arguments, **keywords: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        follower.on_step({})
    follower.on_end()
    assert rows(fake) == []


def test_an_error_at_the_end_leaves_nothing_open(fake, run, monkeypatch):
    followers = [follow("trackio"), follow("wandb")]
    callbacks = training._Callbacks(followers, Background(), lambda: None)
    callbacks.on_message(f"run directory: {run}")
    for follower in followers:
        follower.on_step({})
    monkeypatch.setattr("trackio.Rows.finish", lambda run: 1 / 0)
    with pytest.raises(ZeroDivisionError) as error:
        callbacks.on_end()
    assert stored(fake / "wandb") == logged(run)
    monkeypatch.undo()
    again = follow("trackio")
    again.on_message(f"run directory: {run}")  # while the error, with its frames, is kept
    again.on_end()
    assert error.value


def test_errors_say_what_to_do(fake, tmp_path, monkeypatch):
    with pytest.raises(cohort.InputError, match="wandb or trackio"):
        cohort.Follow("tensorboard")
    with pytest.raises(cohort.InputError, match="no config.yaml; hint: .*cohort train"):
        follow("wandb").until_end(tmp_path / "missing")
    (tmp_path / "config.yaml").write_text("version: 3\n")
    with pytest.raises(cohort.InputError, match="version"):
        follow("wandb").until_end(tmp_path)
    done = subprocess.run(command("trackio", tmp_path / "missing"), capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    monkeypatch.setenv("TRACKIO_SPACE_ID", "me/space")
    with pytest.raises(cohort.InputError, match="trackio sync"):
        follow("trackio")


@pytest.mark.parametrize("name", ["wandb", "trackio"])
@pytest.mark.parametrize("folder", [".", "wandb", "trackio"])  # which a client may have written
def test_a_missing_client_is_named(monkeypatch, tmp_path, name, folder):
    (tmp_path / folder).mkdir(exist_ok=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(path for path in sys.path if "site-packages" not in path)])
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(cohort.InputError, match=f"hint: pip install {name}"):
        cohort.Follow(name)


def kill_in_the_middle(way, run, begun):
    process = subprocess.Popen(command(way, run))
    wait_for(begun)
    append(run, 5, loss=0.25)
    time.sleep(0.1)
    process.kill()
    process.wait()
    append(run, 6, loss=0.75)
    (run / ".lock").unlink()
    subprocess.run(command(way, run), check=True, timeout=120)


def test_trackio_has_every_number_once(run, tmp_path, monkeypatch):
    pytest.importorskip("trackio", reason="trackio is not installed")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    path = tmp_path / "trackio" / "cohort.db"

    def stored_rows():
        try:
            return sqlite3.connect(path).execute("SELECT step, metrics FROM metrics").fetchall()
        except sqlite3.OperationalError:  # the table is not there yet
            return []

    kill_in_the_middle("trackio", run, lambda: path.exists() and stored_rows())
    found = Counter((name, step, value) for step, numbers in stored_rows() for name, value in json.loads(numbers).items())
    assert found == logged(run)


def wandb_records(file):
    """The records of a file .wandb: LevelDB's log after 7 bytes, blocks of chunks (checksum, size, type) that make up records."""
    at, record = 7, b""
    while at + 7 <= len(file):
        if (left := -at % 32768 or 32768) < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", file, at + 4)
        record += file[at + 7:at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last chunk
            yield record
            record = b""


def test_wandb_has_every_number_once(run, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    kill_in_the_middle("wandb", run, lambda: list(tmp_path.glob("wandb/offline-run-*/files/requirements.txt")))
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")  # that of the killed one is gone
    from wandb.proto.wandb_internal_pb2 import Record
    found = Counter()
    for data in wandb_records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        found.update((name, values["step"], value) for name, value in values.items() if name != "step" and name[0] != "_")
    assert found == logged(run)


def test_wandb_leaves_a_run_of_the_program_alone(run, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with wandb.init(dir=str(tmp_path)) as own:
        follower = follow("wandb")
        follower.on_message(f"run directory: {run}")
        follower.on_end()
        own.log({"mine": 1})  # raises if it has ended
    assert list(run.glob("wandb/offline-run-*"))
    wandb.teardown()
