"""Uploads of exported models to the Hugging Face Hub.

    prepare_repository --> export of the model, which may take minutes --> upload_model

The preparation finds what would make the upload fail: a missing token, a wrong name, no network, or
no permission. It imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
)

from ludus.proto.errors import ConfigError, NotFoundError

_WEIGHT_PATTERNS = ["*.safetensors", "*.safetensors.index.json"]
"""Files that a new model may not contain, because the number of its weight files is different."""
_TOKEN_ADVICE = "set HF_TOKEN to a token with write access, or log in with `hf auth login`"


def prepare_repository(name: str, *, is_private: bool) -> str:
    """Create the repository of a model if there is none; return its id, OWNER/NAME.

    Args:
        name: OWNER/NAME, or NAME for a repository of the token's owner.
        is_private: True if only the owner may see the repository.

    Raises:
        ConfigError: the name is invalid, there is no token, the token may not write there, or the
            repository exists and is public although it must be private.
        NotFoundError: the Hub does not respond.
    """
    token = get_token()
    if token is None:
        raise ConfigError(f"an upload to the Hugging Face Hub needs a token; {_TOKEN_ADVICE}")
    api = HfApi(token=token)
    with _explain_failure(api.endpoint, name):
        _check_role(api)
        repo_id = api.create_repo(name, private=is_private or None, exist_ok=True).repo_id
        if is_private and not api.model_info(repo_id).private:
            raise ConfigError(
                f"the repository '{repo_id}' exists and is public; make it private in its "
                "settings, choose another name, or remove --private"
            )
    return repo_id


def upload_model(folder: Path, repo_id: str) -> str:
    """Upload the files of an exported model, and return the address of the model's page.

    Weights of an earlier upload are replaced.

    Raises:
        ConfigError: the Hub refuses the upload.
        NotFoundError: the Hub does not respond.
    """
    api = HfApi(token=get_token())
    with _explain_failure(api.endpoint, repo_id):
        api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message="Upload the model with Ludus",
            delete_patterns=_WEIGHT_PATTERNS,
        )
    return f"{api.endpoint}/{repo_id}"


def _check_role(api: HfApi) -> None:
    """Refuse a token that may only read, because it could create no commit."""
    access_token = api.whoami().get("auth", {}).get("accessToken", {})
    if access_token.get("role") == "read":
        raise ConfigError(f"the Hugging Face token may only read; {_TOKEN_ADVICE}")


@contextmanager
def _explain_failure(endpoint: str, name: str) -> Iterator[None]:
    try:
        yield
    except HFValidationError as error:
        reason = str(error).rstrip(".")
        raise ConfigError(
            f"'{name}' cannot be the name of a repository: {reason}; expected OWNER/NAME or NAME"
        ) from error
    except OfflineModeIsEnabled as error:
        raise ConfigError(
            "HF_HUB_OFFLINE forbids uploads to the Hugging Face Hub; unset it"
        ) from error
    except HfHubHTTPError as error:
        raise ConfigError(_describe_refusal(endpoint, name, error)) from error
    except HTTPError as error:  # of the HTTP client that this version of the library uses
        reason = str(error) or type(error).__name__
        raise NotFoundError(
            f"the Hugging Face Hub ({endpoint}) does not respond: {reason}; check the network, or "
            "set HF_ENDPOINT to a mirror"
        ) from error


def _describe_refusal(endpoint: str, name: str, error: HfHubHTTPError) -> str:
    status = error.response.status_code
    if status == HTTPStatus.UNAUTHORIZED:
        return f"the Hugging Face Hub ({endpoint}) refuses the token; {_TOKEN_ADVICE}"
    reason = error.server_message or str(error).partition("\n")[0]
    if status == HTTPStatus.FORBIDDEN:
        return (
            f"the token may not write to '{name}': {reason}; {_TOKEN_ADVICE}, or choose another "
            "owner"
        )
    return f"the Hugging Face Hub ({endpoint}) refuses '{name}' with status {status}: {reason}"
