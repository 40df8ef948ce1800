"""How object stores are found and asked: endpoints, credentials in URLs, signatures, what commands say of no answer."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Any

import pytest
import torch
from harness.fault_proxy import FaultProxy, Rule

import vescale_ckpt
from vescale_ckpt import CheckpointError
from vescale_ckpt._storage import object_clients
from vescale_ckpt._storage.open_storage import checkpoint_path
from vescale_ckpt.cli import main

pytest.importorskip("obstore", reason="object stores need obstore")

STATE = {"w": torch.arange(1000.0)}


@pytest.mark.parametrize("text", ["127.0.0.1:9000", "store.example", "ftp://store", "http://", "http://host?a=b"])
@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3"])
def test_an_endpoint_that_is_no_url_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, text: str) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv(variable, text)
    with pytest.raises(CheckpointError, match=f"{variable}: expected the URL") as raised:
        vescale_ckpt.save("s3://bucket/run", STATE)
    assert repr(text) in str(raised.value)
    monkeypatch.setenv(variable, "http://user:hidden@host")
    with pytest.raises(CheckpointError, match=variable) as raised:
        vescale_ckpt.load("s3://bucket/run", dict(STATE))
    assert "hidden" not in str(raised.value)


def test_a_panic_of_the_client_is_an_error(monkeypatch: pytest.MonkeyPatch, bucket_url: str) -> None:
    import obstore

    class PanicException(BaseException):  # as pyo3's
        pass

    def panic(*_: Any, **__: Any) -> None:
        raise PanicException("called `Result::unwrap()` on an `Err` value")

    for name in ("head", "list_with_delimiter", "get"):
        monkeypatch.setattr(obstore, name, panic)
    with pytest.raises(CheckpointError, match="unwrap"):
        vescale_ckpt.load(bucket_url, dict(STATE))


@pytest.mark.parametrize(
    "url",
    [
        "s3://MYNAME:hidden@bucket/x",
        "s3://MYNAME:hid/den@bucket/x",
        "S3://MYNAME:hidden@bucket/x",
        "s3:/MYNAME:hidden@bucket/x",
        "https://MYNAME:hidden@host/x",
        "gs://MYNAME@bucket/x",
        "az://MYNAME:hidden@container",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(
    url: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = [
        lambda: vescale_ckpt.save(url, STATE),
        lambda: vescale_ckpt.load(url, dict(STATE)),
        lambda: vescale_ckpt.verify(url),
        lambda: vescale_ckpt.CheckpointManager(url),
        lambda: vescale_ckpt.register_store(url, object()),
        lambda: checkpoint_path(url),
    ]
    with caplog.at_level(logging.DEBUG):
        for call in calls:
            with pytest.raises((ValueError, CheckpointError)) as raised:
                call()
            assert "register_store" in str(raised.value)
            assert not any(secret in str(raised.value) for secret in ("MYNAME", "hid"))
        assert main(["verify", url]) == 2
    output = capsys.readouterr()
    assert not any(secret in caplog.text + output.out + output.err for secret in ("MYNAME", "hidden", "hid/den"))


def test_payloads_are_hashed_where_nothing_else_guards_them(
    fault_proxy: FaultProxy, bucket_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value, unsigned in ((None, False), ("true", True), ("false", False)):
        if value is not None:
            monkeypatch.setenv("AWS_UNSIGNED_PAYLOAD", value)
        fault_proxy.clear()
        vescale_ckpt.save(bucket_url, STATE)
        assert {request.payload == "UNSIGNED-PAYLOAD" for request in fault_proxy.of("put")} == {unsigned}
    # Of a store with TLS only the options are looked at: there is no such server here.
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://store.example")
    assert "unsigned_payload" not in object_clients._from_amazon_environment({})["config"]
    monkeypatch.delenv("AWS_UNSIGNED_PAYLOAD")
    assert object_clients._from_amazon_environment({})["config"]["unsigned_payload"] == "true"


# --- Commands


def test_an_outage_is_no_damage(fault_proxy: FaultProxy, bucket_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    vescale_ckpt.save(bucket_url, STATE)
    fault_proxy.add(Rule("denied", kind="get", path="distcp", times=10**6))
    assert main(["verify", bucket_url]) == 2
    assert "could not be read: " in (told := capsys.readouterr().out) and "not known" in told
    assert main(["verify", bucket_url, "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["unreadable"] and not found["damaged"] and not found["ok"]
    fault_proxy.clear()
    assert main(["verify", bucket_url]) == 0


def test_the_first_call_of_a_process_may_be_load_file_of_a_url() -> None:
    script = (
        "from vescale_ckpt.safetensors import load_file\n"
        "try:\n    load_file('memory://run/model.safetensors')\n"
        "except FileNotFoundError as error:\n    print('no file', error.filename)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "no file memory://run/model.safetensors\n"), ran.stderr
