"""An export published with the real client of the hub, against a local one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.hub import HubServer, hub_server

from ai_trains_ai.errors import ConfigurationError, Forbidden, Transient
from ai_trains_ai.report.hub import push_to_hub

hub_constants = pytest.importorskip("huggingface_hub.constants", reason="needs the extra hub")

TOKEN = "hf_a_secret_that_nobody_sees"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_server() as server:
        monkeypatch.setattr(hub_constants, "ENDPOINT", server.url)
        monkeypatch.setattr(hub_constants, "HF_HUB_DISABLE_XET", True)  # the store of large files is not at hand here
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


@pytest.fixture
def export(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"weights" * 1000)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    (folder / "notes.db").write_bytes(b"the run's own business")
    return folder


def test_an_export_is_one_commit_of_what_is_meant_to_be_public(hub: HubServer, export: Path) -> None:
    address = push_to_hub(export, "me/my-trainer")
    [commit] = hub.repositories["me/my-trainer"].commits
    assert sorted(commit) == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    assert commit["adapter_model.safetensors"] == b"weights" * 1000
    assert address.startswith(f"{hub.url}/me/my-trainer/commit/")
    assert hub.repositories["me/my-trainer"].private
    assert hub.tokens >= {TOKEN}


def test_a_public_one_and_once_more(hub: HubServer, export: Path) -> None:
    for _ in range(2):
        push_to_hub(export, "me/my-trainer", private=False)
    assert not hub.repositories["me/my-trainer"].private
    assert len(hub.repositories["me/my-trainer"].commits) == 2


@pytest.mark.parametrize(
    ("part", "status", "kind", "remedy"),
    [
        ("create", 401, Forbidden, "HF_TOKEN"),
        ("commit", 403, Forbidden, "HF_TOKEN"),
        ("create", 400, ConfigurationError, "no such thing"),
    ],
)
def test_a_refusal_is_named(
    hub: HubServer, export: Path, part: str, status: int, kind: type[Exception], remedy: str
) -> None:
    hub.refusals[part] = (status, "no such thing")
    with pytest.raises(kind, match=remedy) as caught:
        push_to_hub(export, "me/my-trainer")
    assert TOKEN not in str(caught.value)


def test_a_hub_that_fails_is_worth_another_try(hub: HubServer, export: Path) -> None:
    hub.refusals["create"] = (500, "we are down")
    with pytest.raises(Transient, match="again"):
        push_to_hub(export, "me/my-trainer")


def test_a_hub_that_is_not_there(hub: HubServer, export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Transient, match="can't be reached"):
        push_to_hub(export, "me/my-trainer")


@pytest.mark.parametrize("name", ["my-trainer", "me/my/trainer", "me/bad name", "me/--"])
def test_no_name_of_a_repository(hub: HubServer, export: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="no repository"):
        push_to_hub(export, name)


@pytest.mark.parametrize("missing", ["adapter_model.safetensors", "README.md"])
def test_what_is_no_export_stays_here(hub: HubServer, export: Path, missing: str) -> None:
    (export / missing).unlink()
    with pytest.raises(ConfigurationError, match="no export"):
        push_to_hub(export, "me/my-trainer")
    assert not hub.repositories
