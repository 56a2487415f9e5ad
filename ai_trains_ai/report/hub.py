"""Publish an exported outer policy on the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from ai_trains_ai.errors import AiTrainsAiError, ConfigurationError, Forbidden, MissingDependency, Transient

WEIGHTS = ("adapter_model.safetensors", "model.safetensors")
PUBLISHED = ("*.safetensors", "*.json", "*.txt", "*.jinja", "README.md", "LICENSE")


def push_to_hub(folder: str | Path, repo_id: str, *, private: bool = True, token: str | None = None) -> str:
    """Upload an export with its card, as one commit. The address of that commit.

    Args:
        folder: what `Experiment.export` wrote. Weights, JSON, templates and the card are uploaded, nothing else.
        repo_id: "owner/name"; made when it isn't there.
        private: whether a repository that is made can be seen by its owner alone.
        token: default the one of ``HF_TOKEN`` or ``hf auth login``.

    Raises:
        ConfigurationError: the folder is no export with a card, or ``repo_id`` no name.
        Forbidden: the token is missing, or may not write there.
        Transient: the hub can't be reached, or failed. What was uploaded is no part of the repository yet; try again.
    """
    folder = Path(folder)
    if not any((folder / name).is_file() for name in WEIGHTS) or not (folder / "README.md").is_file():
        raise ConfigurationError(f"{folder} is no export with its card. Make it with ai-trains-ai export RUN {folder}.")
    try:
        import httpx2
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
    except ImportError as error:
        raise MissingDependency.of("huggingface_hub", "hub") from error
    if repo_id.count("/") != 1:
        raise ConfigurationError(f"{repo_id!r} is no repository: write owner/name.")
    api = HfApi(token=token, library_name="ai-trains-ai")
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            allow_patterns=list(PUBLISHED),
            commit_message=f"Export of {folder.name}",
        )
    except HFValidationError as error:
        raise ConfigurationError(f"{repo_id!r} is no repository: {error}") from error
    except LocalTokenNotFoundError as error:
        raise Forbidden("No token for the hub: set HF_TOKEN, or run hf auth login.") from error
    except HfHubHTTPError as error:
        raise _ours(repo_id, error.response.status_code, error.server_message or str(error)) from error
    except (OSError, httpx2.TransportError) as error:
        raise Transient(f"The hub can't be reached ({type(error).__name__}: {error}). Try again.") from error
    return str(commit.commit_url)


def _ours(repo_id: str, status: int, said: str) -> AiTrainsAiError:
    said = " ".join(said.split())[:300]
    if status in (401, 403):
        return Forbidden(f"The hub refuses {repo_id} ({status}): {said} Check HF_TOKEN and its right to write there.")
    if status >= 500 or status == 429:
        return Transient(f"The hub failed ({status}): {said} Try again.")
    return ConfigurationError(f"The hub refuses {repo_id} ({status}): {said}")
