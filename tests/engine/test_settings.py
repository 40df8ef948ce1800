"""The table of settings: every row parses what it should, refuses what it should, and is documented."""

from __future__ import annotations

from typing import Any

import pytest

from vescale_ckpt import StorageReader, StorageWriter, settings

NUMBERS = [name for name, setting in settings.SETTINGS.items() if isinstance(setting.default, int)]
CHOICES = [name for name, setting in settings.SETTINGS.items() if setting.choices]


def test_every_setting_is_a_number_a_choice_or_any_text() -> None:
    assert {*NUMBERS, *CHOICES, "trace"} == set(settings.SETTINGS)


@pytest.mark.parametrize("name", settings.SETTINGS)
def test_default_without_the_variable(name: str) -> None:
    setting = settings.SETTINGS[name]
    assert settings.value(name) == setting.default
    assert setting.parse(str(setting.default)) == setting.default
    assert setting.variable == f"VESCALE_CKPT_{name.upper()}"
    assert setting.help


@pytest.mark.parametrize("name", NUMBERS)
def test_number_from_the_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = settings.SETTINGS[name]
    for number in (setting.least, min(int(setting.default) * 2, setting.most)):
        monkeypatch.setenv(setting.variable, str(number))
        assert settings.value(name) == settings.number(name) == number


@pytest.mark.parametrize("name", NUMBERS)
def test_number_that_makes_no_sense_or_is_too_small_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = settings.SETTINGS[name]
    for text in ("", "x", "1.5", "8M", "-1", "0x10", str(setting.least - 1)):
        monkeypatch.setenv(setting.variable, text)
        with pytest.raises(ValueError, match=setting.variable) as raised:
            settings.value(name)
    assert str(setting.least) in str(raised.value) or not setting.least


@pytest.mark.parametrize("name", CHOICES)
def test_choice_from_the_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = settings.SETTINGS[name]
    for choice in setting.choices:
        monkeypatch.setenv(setting.variable, choice)
        assert settings.value(name) == choice
    for text in ("", "maybe", setting.choices[0].upper() + "x"):
        monkeypatch.setenv(setting.variable, text)
        with pytest.raises(ValueError, match=f"{setting.variable}.*{setting.choices[-1]}"):
            settings.value(name)


@pytest.mark.parametrize(("text", "meaning"), [("auto", "auto"), ("on", True), ("off", False)])
def test_direct_io_of_the_environment_where_the_call_leaves_it_open(
    text: str, meaning: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VESCALE_CKPT_DIRECT_IO", text)

    def options(part: Any) -> Any:
        return getattr(part, "_source", part).options

    for part in (StorageWriter, StorageReader):
        assert options(part("x")).direct_io == meaning
        assert options(part("x", direct_io=True)).direct_io is True
        assert options(part("x", direct_io=False)).direct_io is False
