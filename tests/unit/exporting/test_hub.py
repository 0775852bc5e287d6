"""Uploads to the hub, with a stub in place of its client: nothing here uses the network."""

import httpx
import pytest
from huggingface_hub import constants

from tandem.errors import ConfigError, TandemError
from tandem.exporting.hub import Upload, check_repository, push

pytestmark = pytest.mark.usefixtures("of_a_command")


class StubApi:
    def __init__(self, error: Exception | None = None):
        self.calls, self.error = [], error

    def create_repo(self, name, **given):
        self.calls.append(("create_repo", name, given))

    def upload_folder(self, **given):
        self.calls.append(("upload_folder", given))
        if self.error:
            raise self.error


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    (tmp_path / "README.md").write_text("card")
    (tmp_path / ".hidden").write_text("no")
    return tmp_path


def test_a_folder_is_uploaded_in_one_commit_to_a_private_repository(folder):
    api = StubApi()
    done = push(folder, "me/model", step=4, dry_run=False, api=api)
    assert done == Upload("me/model", {"README.md": 4, "model.safetensors": 5}, "https://huggingface.co/me/model")
    assert api.calls == [
        ("create_repo", "me/model", {"private": True, "exist_ok": True, "repo_type": "model"}),
        (
            "upload_folder",
            {
                "repo_id": "me/model",
                "folder_path": folder,
                "allow_patterns": ["README.md", "model.safetensors"],
                "commit_message": "Step 4, exported with tandem",
            },
        ),
    ]


def test_a_dry_run_lists_the_files_and_uploads_nothing(folder):
    api = StubApi()
    done = push(folder, "me/model", step=4, dry_run=True, api=api)
    assert (done.files, done.num_bytes, done.address, api.calls) == (
        {"README.md": 4, "model.safetensors": 5},
        9,
        None,
        [],
    )


@pytest.mark.parametrize("kind", [ConnectionError, httpx.ConnectError, httpx.ReadTimeout])
def test_a_hub_that_does_not_answer_is_not_said_to_refuse(folder, kind):
    with pytest.raises(TandemError) as failed:
        push(folder, "me/model", step=4, dry_run=False, api=StubApi(kind("no route")))
    assert str(failed.value) == (
        f"--push-to-hub me/model: the hub cannot be reached ({kind.__name__}: no route). The export in {folder} is complete; the "
        "same command uploads it again."
    )


def test_an_upload_that_is_refused_keeps_the_export(folder):
    with pytest.raises(TandemError) as refused:
        push(folder, "me/model", step=4, dry_run=False, api=StubApi(ValueError("403 Forbidden")))
    assert str(refused.value) == (
        f"--push-to-hub me/model: the hub refused the upload (ValueError: 403 Forbidden). The export in {folder} is complete; "
        "the same command uploads it again."
    )


@pytest.mark.parametrize("name", ["model", "a/b/c", "a b/c", "../x/y", "-a/b"])
def test_a_name_that_is_not_a_repository_is_refused(name):
    with pytest.raises(ConfigError) as refused:
        check_repository(name, dry_run=True)
    assert str(refused.value) == f"--push-to-hub {name}: not the name of a repository. Write OWNER/NAME."


def test_an_upload_without_a_token_is_refused_before_the_export(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ConfigError) as refused:
        check_repository("me/model", dry_run=False)
    assert str(refused.value) == (
        "--push-to-hub me/model: there is no token for the hub. Set HF_TOKEN to a token with write access, or run "
        "`hf auth login`."
    )
    check_repository("me/model", dry_run=True)


def test_an_upload_is_refused_offline(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError) as refused:
        check_repository("me/model", dry_run=False)
    assert str(refused.value) == (
        "--push-to-hub me/model: HF_HUB_OFFLINE is set, so nothing can be uploaded. Unset it, or add --dry-run."
    )
