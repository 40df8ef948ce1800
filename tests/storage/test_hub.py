"""Repositories of the Hugging Face Hub as places, against a server that stands in for it: reads by ranges of one
commit, and commits of all files or none, with harm on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.hub_server import PATIENCE, HubServer, use
from harness.ranks import run_ranks
from safetensors.torch import load as load_bytes

import vescale_ckpt
from vescale_ckpt import CheckpointError, CheckpointManager
from vescale_ckpt.cli import main
from vescale_ckpt.safetensors import load_file, safe_open

pytest.importorskip("huggingface_hub", reason="hf:// needs huggingface_hub")

MODEL = "org/model"
URL = f"hf://{MODEL}"
CONFIG = b'{"model_type": "test"}'
SHARD = r"PUT /lfs/"


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server, use(server.endpoint):
        yield server


def weights(k: int = 0) -> dict[str, torch.Tensor]:
    return {f"layer{i}.weight": torch.arange(1000, dtype=torch.float32) + 1000 * i + k for i in range(6)}


def same(a: Any, b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in b)


def model_files(path: Path, k: int = 0) -> dict[str, bytes]:
    """A model of several shards, with an index and a configuration."""
    if not path.exists():
        vescale_ckpt.save(path, weights(k), format="safetensors", max_shard_size=9000)
        (path / "config.json").write_bytes(CONFIG)
    return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}


def checkpoint(path: Path, k: int = 0) -> Path:
    vescale_ckpt.save(path, {"model": weights(k), "step": 3})
    return path


def push(source: Path, url: str = URL, **options: Any) -> None:
    vescale_ckpt.convert(
        source, url, format="safetensors", keys="model", rename={"model": ""}, max_shard_size=9000, on_objects="drop",
        **options,
    )  # fmt: skip


def stored(files: dict[str, bytes]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, content in files.items():
        if name.endswith(".safetensors"):
            found |= load_bytes(content)
    return found


# --- Reads


def test_a_repository_is_loaded_verified_inspected_converted_copied_and_opened(hub: HubServer, tmp_path: Path) -> None:
    repository = hub.repository(MODEL, model_files(tmp_path / "model"))
    state = {name: torch.zeros_like(value) for name, value in weights().items()}
    vescale_ckpt.load(URL, state)
    assert same(state, weights()) and same(vescale_ckpt.load(URL), weights())
    assert vescale_ckpt.verify(URL).ok
    info = vescale_ckpt.inspect(URL)
    assert set(info.tensors) == set(weights()) and info.path == f"{URL}@{repository.branches['main']}"
    vescale_ckpt.convert(URL, tmp_path / "dcp", format="dcp")
    assert same(vescale_ckpt.load(tmp_path / "dcp"), weights())
    vescale_ckpt.copy(URL, tmp_path / "copy")
    assert (tmp_path / "copy" / "config.json").read_bytes() == CONFIG
    assert same(vescale_ckpt.load(tmp_path / "copy"), weights())
    shard = min(name for name in repository.files() if name.endswith(".safetensors"))
    with safe_open(f"{URL}/{shard}") as file:
        names = file.keys()
        assert names and all(torch.equal(file.get_tensor(name), weights()[name]) for name in names)
    assert set(load_file(f"{URL}/{shard}")) < set(weights())


def test_a_part_of_a_model_is_read_by_ranges(hub: HubServer) -> None:
    large = {"wanted": torch.arange(64.0), "other": torch.zeros(4 << 20)}
    content = _single(large)
    hub.repository(MODEL, {"model.safetensors": content})
    state = {"wanted": torch.zeros(64)}
    vescale_ckpt.load(URL, state, strict=False)
    assert torch.equal(state["wanted"], large["wanted"])
    assert 0 < hub.served < len(content) // 4


def _single(tensors: dict[str, torch.Tensor]) -> bytes:
    from safetensors.torch import save

    return save(tensors)


def test_revisions_and_folders_of_a_repository(hub: HubServer, tmp_path: Path) -> None:
    repository = hub.repository(MODEL, {"README.md": b""})
    files = model_files(tmp_path / "old")
    first = repository.commit({f"sub/folder/{name}": content for name, content in files.items()}, "release/1")
    repository.commit(model_files(tmp_path / "new", 5))
    assert same(vescale_ckpt.load(f"{URL}@release%2F1/sub/folder"), weights())
    assert same(vescale_ckpt.load(f"{URL}@{first}/sub/folder"), weights())
    assert same(vescale_ckpt.load(URL), weights(5))


def _load_on_rank(endpoint: str, url: str) -> tuple[bool, str]:
    with use(endpoint):
        state = {name: torch.zeros_like(value) for name, value in weights().items()}
        vescale_ckpt.load(url, state)
        return same(state, weights()), url


def _load_error(endpoint: str, url: str) -> str:
    with use(endpoint), pytest.raises(CheckpointError) as raised:
        vescale_ckpt.load(url)
    return str(raised.value)


def test_all_ranks_read_the_commit_that_the_coordinator_found(hub: HubServer, tmp_path: Path) -> None:
    repository = hub.repository(MODEL, model_files(tmp_path / "model"))

    def move_the_branch(handler: Any) -> bool:
        """The branch moves when the first rank has asked for it: a second one would see another model."""
        found = repository.branches["main"]
        handler._route(["api", "models", *MODEL.split("/"), "revision", "main"], {})
        repository.commit(model_files(tmp_path / "later", 7))
        assert repository.branches["main"] != found
        return True

    hub.fail("GET /api/models/org/model/revision/main", move_the_branch)
    assert [ok for ok, _ in run_ranks(2, _load_on_rank, hub.endpoint, URL)] == [True, True]
    assert hub.count("/revision/main") == 1


def test_all_ranks_raise_if_there_is_no_repository(hub: HubServer) -> None:
    texts = run_ranks(2, _load_error, hub.endpoint, "hf://org/typo")
    assert all("there is no repository org/typo" in text and "hf auth login" in text for text in texts)


@pytest.mark.parametrize(
    ("url", "options", "text"),
    [
        ("hf://org/typo", {}, "no repository org/typo, or it is private"),
        ("hf://org/model@v9", {}, "org/model has no branch, tag or commit v9"),
        ("hf://org/private", {"token": None}, "org/private, or it is private.*hf auth login"),
        ("hf://org/gated", {"token": None}, "org/gated is gated: accept its conditions at http.*HF_TOKEN"),
        ("hf://org/model", {"offline": True}, "HF_HUB_OFFLINE is set"),
    ],
)
def test_errors_name_the_repository_and_what_to_do(
    hub: HubServer, tmp_path: Path, url: str, options: dict[str, Any], text: str
) -> None:
    hub.repository(MODEL, model_files(tmp_path / "model"))
    hub.repository("org/private", model_files(tmp_path / "model"), private=True)
    hub.repository("org/gated", model_files(tmp_path / "model"), gated=True)
    with use(hub.endpoint, **options), pytest.raises(CheckpointError, match=text):
        vescale_ckpt.load(url)
    if "token" in options:
        assert same(vescale_ckpt.load(url), weights())


def test_a_hub_that_is_away_is_an_error_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)  # between repetitions
    with use("http://127.0.0.1:9"), pytest.raises(CheckpointError, match=r"cannot be reached.*HF_ENDPOINT"):
        vescale_ckpt.load(URL)


def test_a_hub_that_does_not_answer_is_given_up(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setenv("VESCALE_CKPT_OBJECT_STORE_TIMEOUT", "2")
    hub.hold("GET /api/models", times=100)
    with pytest.raises(CheckpointError, match=r"did not answer in time \(VESCALE_CKPT_OBJECT_STORE_TIMEOUT\)"):
        vescale_ckpt.load(URL)


def test_a_server_that_sends_whole_files_is_named(hub: HubServer) -> None:
    hub.repository(MODEL, {"model.safetensors": _single({"w": torch.zeros(5 << 20)})})

    def answer_with_everything(handler: Any) -> bool:
        del handler.headers["Range"]
        return False

    hub.fail("GET /lfs/", answer_with_everything, times=100)
    with pytest.raises(CheckpointError, match="answers with whole files: is HF_ENDPOINT right"):
        vescale_ckpt.load(URL)


def _convert_on_rank(endpoint: str, path: str) -> None:
    with use(endpoint):
        vescale_ckpt.convert(URL, path, format="dcp")


def test_ranks_convert_one_commit(hub: HubServer, tmp_path: Path) -> None:
    hub.repository(MODEL, model_files(tmp_path / "model"))
    run_ranks(2, _convert_on_rank, hub.endpoint, str(tmp_path / "dcp"))
    assert hub.count("/revision/main") == 1
    assert same(vescale_ckpt.load(tmp_path / "dcp"), weights())


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("hf://name", "expected hf://org/name"),
        ("hf://datasets/org/name", "only repositories of models"),
        ("hf://org/name@a b", "expected hf://org/name"),
        ("hf:/org/name", "write hf://org/name"),
    ],
)
def test_urls_that_name_no_repository(tmp_path: Path, url: str, text: str) -> None:
    for call in (vescale_ckpt.load, vescale_ckpt.inspect, CheckpointManager):
        with pytest.raises(ValueError, match=text):
            call(url)
    for source, target in ((url, tmp_path / "dcp"), (tmp_path, url)):
        with pytest.raises(ValueError, match=text):
            vescale_ckpt.convert(source, target, format="dcp")


def test_cut_ranges_and_passing_failures_are_read_again(hub: HubServer, tmp_path: Path) -> None:
    hub.repository(MODEL, model_files(tmp_path / "model"))
    hub.cut("GET /lfs/", after=3)
    hub.fail_with("GET /api/models", 503)
    hub.fail_with("GET .*/resolve/", 500)
    assert same(vescale_ckpt.load(URL), weights())
    assert [fault.times for fault in hub.faults] == [0, 0, 0]


def test_an_expired_address_is_asked_for_again(hub: HubServer) -> None:
    tensors = {f"t{i}": torch.arange(3 << 20, dtype=torch.float32) + i for i in range(3)}
    hub.repository(MODEL, {"model.safetensors": _single(tensors)})
    hub.fail("GET /lfs/", lambda handler: False, times=1)
    hub.fail_with("GET /lfs/", 403)
    assert same(vescale_ckpt.load(URL), tensors)
    assert [fault.times for fault in hub.faults] == [0, 0]
    assert 2 <= hub.count("/resolve/") < hub.count("GET /lfs/")


def test_damage_is_found(hub: HubServer, tmp_path: Path) -> None:
    files = model_files(tmp_path / "model")
    shard = min(name for name in files if name.endswith(".safetensors"))
    files[shard] = files[shard][:-1] + bytes([files[shard][-1] ^ 1])
    hub.repository(MODEL, files)
    with pytest.raises(vescale_ckpt.CorruptCheckpointError):
        vescale_ckpt.load(URL)
    assert not vescale_ckpt.verify(URL).ok


# --- Commits


def test_a_conversion_is_one_commit_and_keeps_other_files(hub: HubServer, tmp_path: Path) -> None:
    repository = hub.repository(MODEL, {"config.json": CONFIG, "model.safetensors": _single({"old": torch.ones(3)})})
    source = checkpoint(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"holds model.safetensors already.*overwrite=True"):
        push(source)
    assert not hub.received and len(repository.commits) == 1
    push(source, overwrite=True)
    assert len(repository.commits) == 2 and same(stored(repository.files()), weights())
    assert repository.files()["config.json"] == CONFIG and "model.safetensors" not in repository.files()
    assert same(vescale_ckpt.load(URL), weights()) and vescale_ckpt.verify(URL).ok
    from huggingface_hub import snapshot_download

    stock = Path(snapshot_download(MODEL, local_dir=tmp_path / "stock"))
    found = {name: (stock / name).read_bytes() for name in repository.files()}
    assert found == repository.files() and same(stored(found), weights())


def test_a_folder_with_its_configuration_is_copied_into_a_branch(hub: HubServer, tmp_path: Path) -> None:
    repository = hub.repository(MODEL)
    repository.commit(dict(repository.files()), "dev")
    before = repository.files()
    files = model_files(tmp_path / "model")
    report = vescale_ckpt.copy(tmp_path / "model", f"{URL}@dev/best")
    assert repository.files("dev") == before | {f"best/{name}": content for name, content in files.items()}
    assert repository.files() == before
    assert report.files == len(files) and report.bytes == sum(map(len, files.values()))
    assert same(vescale_ckpt.load(f"{URL}@dev/best"), weights())


def test_the_commands_take_repositories(hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository = hub.repository(MODEL)
    source = checkpoint(tmp_path / "run")
    assert main(["export", str(source), URL]) == 0
    told = capsys.readouterr().out
    assert "6 tensors" in told and "there is no config.json" in told
    assert same(stored(repository.files()), weights()) and "config.json" not in repository.files()
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_bytes(CONFIG)
    assert main(["export", str(source), URL, "--overwrite", "--config", str(tmp_path / "base")]) == 0
    assert repository.files()["config.json"] == CONFIG and len(repository.commits) == 3
    assert main(["verify", URL]) == 0
    assert main(["copy", URL, str(tmp_path / "copy")]) == 0
    assert main(["copy", str(tmp_path / "copy"), URL]) == 2  # without --overwrite
    assert "only replaced with overwrite=True (--overwrite)" in capsys.readouterr().err
    assert main(["copy", str(tmp_path / "copy"), URL, "--overwrite"]) == 0
    assert len(repository.commits) == 3  # nothing differs, so there is no other


@pytest.mark.parametrize("status", [409, 412, 500])
def test_a_refused_commit_leaves_the_repository_and_the_next_one_sends_nothing_again(
    hub: HubServer, tmp_path: Path, status: int
) -> None:
    repository = hub.repository(MODEL)
    before, source = dict(repository.files()), checkpoint(tmp_path / "run")
    hub.fail_with("POST .*/commit/", status)
    with pytest.raises(CheckpointError, match=r"org/model.*HTTP|org/model.*refused a commit(?s:.*)is as it was"):
        push(source)
    assert repository.files() == before and len(repository.commits) == 1
    assert len(hub.received) == 3
    push(source)
    assert len(hub.received) == 3 and same(stored(repository.files()), weights())


def test_a_commit_of_others_meanwhile_is_not_overwritten(hub: HubServer, tmp_path: Path) -> None:
    repository = hub.repository(MODEL)

    def commit(_: Any) -> bool:
        repository.commit(repository.files() | {"theirs": b"1"})
        return False

    hub.fail("POST .*/commit/", commit)
    with pytest.raises(CheckpointError, match="has got another commit meanwhile, and is not changed"):
        push(checkpoint(tmp_path / "run"))
    assert set(repository.files()) == {"README.md", "theirs"}


def test_a_commit_whose_answer_is_lost_counts(hub: HubServer, tmp_path: Path) -> None:
    repository = hub.repository(MODEL)
    hub.cut("POST .*/commit/", after=0)
    push(checkpoint(tmp_path / "run"))
    assert len(repository.commits) == 2 and same(stored(repository.files()), weights())


def test_an_upload_that_fails_goes_on_where_it_was(hub: HubServer, tmp_path: Path) -> None:
    repository = hub.repository(MODEL)
    before, source = dict(repository.files()), checkpoint(tmp_path / "run")
    hub.fail(SHARD, lambda handler: False, times=2)  # two shards arrive
    hub.fail_with(SHARD, 403)
    with pytest.raises(CheckpointError, match=r"access to org/model was denied.*(?s:.*)is as it was"):
        push(source)
    arrived = len(hub.received)
    assert repository.files() == before and arrived == 2
    push(source)
    assert sorted(set(hub.received)) == sorted(hub.received) and len(hub.received) == 3
    assert same(stored(repository.files()), weights())


def test_a_kill_before_the_commit_leaves_the_old_one_and_the_next_sends_what_lacks(
    hub: HubServer, tmp_path: Path
) -> None:
    repository = hub.repository(MODEL)
    before, source = dict(repository.files()), checkpoint(tmp_path / "run")
    hub.hold("POST .*/commit/")
    script = (
        "import sys, vescale_ckpt\n"
        "vescale_ckpt.convert(sys.argv[1], sys.argv[2], format='safetensors', keys='model', rename={'model': ''},\n"
        "                     max_shard_size=9000, on_objects='drop')\n"
    )
    environment = {**os.environ, **hub.environment(), "TMPDIR": str(tmp_path)}
    child = subprocess.Popen([sys.executable, "-c", script, str(source), URL], env=environment)
    try:
        assert hub.arrived.wait(PATIENCE), "the commit was not reached"
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(PATIENCE)
    hub.released.set()
    assert repository.files() == before and len(hub.received) == 3
    vescale_ckpt.save(tmp_path / "run", {"model": weights() | {"layer5.weight": torch.zeros(1000)}, "step": 4})
    push(source)
    assert len(hub.received) == 4  # one shard has changed
    assert same(stored(repository.files()), weights() | {"layer5.weight": torch.zeros(1000)})


@pytest.mark.parametrize("status", [401, 404])
def test_pushes_without_a_token_or_a_repository_send_nothing(hub: HubServer, tmp_path: Path, status: int) -> None:
    if status == 401:
        hub.repository(MODEL)
    with use(hub.endpoint, token=None), pytest.raises(CheckpointError, match=r"org/model.*hf auth login"):
        push(checkpoint(tmp_path / "run"))
    assert not hub.received


def _convert_error(endpoint: str, source: str) -> str:
    with use(endpoint), pytest.raises(ValueError, match="one process converts into a repository") as raised:
        vescale_ckpt.convert(source, URL, format="safetensors")
    return str(raised.value)


def test_what_a_repository_is_not_written_by(hub: HubServer, tmp_path: Path) -> None:
    repository = hub.repository(MODEL)
    source = checkpoint(tmp_path / "run")
    with pytest.raises(CheckpointError, match="written in whole commits only"):
        vescale_ckpt.save(URL, {"model": weights()})
    for options in ({"directory": URL}, {"directory": URL, "local": tmp_path / "local"}):
        with pytest.raises(ValueError, match="takes no saves: push from on_commit"):
            CheckpointManager(**options)
    with pytest.raises(ValueError, match="expected format='safetensors' and a folder"):
        vescale_ckpt.convert(source, URL, format="dcp")
    with pytest.raises(CheckpointError, match="a commit cannot be written to"):
        push(source, f"{URL}@{repository.branches['main']}")
    with pytest.raises(ValueError, match="as huggingface_hub does"):
        vescale_ckpt.register_store("hf://org/model", object())
    assert len(run_ranks(2, _convert_error, hub.endpoint, str(source))) == 2
    assert len(repository.commits) == 1


def test_a_reader_of_dcp_wants_a_commit(hub: HubServer, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    repository = hub.repository(MODEL, model_files(tmp_path / "model"))
    state = {name: torch.zeros_like(value) for name, value in weights().items()}
    # torch 2.11 does not tell why
    with pytest.raises(dcp.api.CheckpointException, match=r"expected a commit|metadata is None"):
        dcp.load(state, storage_reader=vescale_ckpt.StorageReader(URL))
    dcp.load(state, storage_reader=vescale_ckpt.StorageReader(f"{URL}@{repository.branches['main']}"))
    assert same(state, weights())
