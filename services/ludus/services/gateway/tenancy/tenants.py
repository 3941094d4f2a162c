"""Tenants of a gateway with their tokens, scopes and limits, and the file that lists them.

    tenants.toml --TenantsFile.read--> Tenants (SHA-256 of each token -> Tenant)

The file contains no tokens. For each token it contains the SHA-256 digest, or names the environment
variable or the file with the token. Messages never quote a value that could be a token.
"""

from __future__ import annotations

import hashlib
import os
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ludus.env.security.secret_files import SecretFile, read_file_signatures
from ludus.proto.documents import DocumentError, DocumentLimitError, parse_toml
from ludus.proto.errors import AuthenticationError, ConfigError, NotFoundError, UserError

MIN_TOKEN_CHARS = 16
MAX_TOKEN_CHARS = 512
_MAX_FILE_BYTES = 4 * 1024 * 1024
_TOKEN_REMEDY = "create one with: openssl rand -hex 32"
_TOKEN_FIELDS_HELP = (
    'token_env = "NAME" (an environment variable), token_file = "PATH", or token_sha256 ='
    ' "DIGEST" from: printf %s "$TOKEN" | sha256sum'
)
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")]


class Scope(StrEnum):
    """A kind of call that a token permits."""

    STEP = "step"
    """Open, play and close the tenant's own sessions."""
    ADMIN = "admin"
    """Drain servers and see the sessions of all tenants. It does not include `step`."""


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Limits of a tenant; None means no limit."""

    max_sessions: int | None = None
    opens_per_s: float | None = None
    steps_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of calls and sessions.

    Every wire authenticates each request or connection once and stores the tenant in a context
    variable, which is inherited by the tasks that the wire starts.
    """

    name: str
    """Name in session ids; empty if authentication is off."""
    scopes: frozenset[Scope] = frozenset(Scope)
    limits: TenantLimits = TenantLimits()
    token_digest: bytes = field(default=b"", repr=False, compare=False)
    """SHA-256 digest of the token that the caller sent; empty without a tenants file."""


ANONYMOUS = Tenant("")
"""The tenant of every caller if no tenants are configured; it has every scope."""
GATEWAY_TENANT = Tenant("gateway itself")
"""The tenant of the gateway's own calls. No tenant of a file can have this name, because of the
space."""
_CURRENT_TENANT: ContextVar[Tenant] = ContextVar("ludus_gateway_tenant")


def get_current_tenant() -> Tenant:
    """Return the tenant of the request that is being served."""
    try:
        return _CURRENT_TENANT.get()
    except LookupError:
        raise AuthenticationError(
            "the request was not authenticated; put its wire behind"
            " AuthenticationMiddleware or AuthenticationInterceptor"
        ) from None


def set_current_tenant(tenant: Tenant) -> None:
    """Set the current tenant of this task and of the tasks that it will start."""
    _CURRENT_TENANT.set(tenant)


@dataclass(frozen=True, slots=True)
class Tenants:
    """The contents of a valid tenants file."""

    by_name: dict[str, Tenant]
    by_digest: dict[bytes, Tenant]
    """The owner of each token, by the token's SHA-256 digest."""


class _TenantTable(BaseModel):
    """One `[[tenants]]` table of the file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,63}$")]
    token_env: Annotated[str, Field(pattern=r"^[A-Z_][A-Z0-9_]{0,63}$")] | None = None
    token_file: Annotated[str, Field(min_length=1)] | None = None
    token_sha256: _Sha256 | list[_Sha256] | None = None
    scopes: list[Annotated[Scope, Field(strict=False)]] = Field([Scope.STEP], min_length=1)
    max_sessions: Annotated[int, Field(ge=1)] | None = None
    opens_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    steps_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _check_token_is_set(self) -> _TenantTable:
        if not (self.token_env or self.token_file or self.token_sha256):
            raise ValueError(f"the tenant needs a token; set {_TOKEN_FIELDS_HELP}")
        return self


class _TenantsDocument(BaseModel):
    """A complete tenants file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    tenants: list[_TenantTable] = Field(min_length=1)


class TenantsFile:
    """A tenants file and its token files, which may change while the gateway runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._watched_paths: tuple[Path, ...] = (path,)
        self._signature: tuple[Any, ...] = ()

    def has_changed(self) -> bool:
        """Return whether a file changed after the last `read`."""
        return read_file_signatures(self._watched_paths) != self._signature

    def read(self) -> Tenants:
        """Read and validate the file, and return its tenants."""
        # The signature is computed before the contents are read, so that a change during the
        # read is found by the next check.
        signature = read_file_signatures((self.path,))
        self._signature = read_file_signatures(self._watched_paths)
        tables = self._parse()
        folder = self.path.parent
        token_files = tuple(folder / table.token_file for table in tables if table.token_file)
        self._watched_paths = (self.path, *token_files)
        self._signature = signature + read_file_signatures(token_files)
        by_name: dict[str, Tenant] = {}
        by_digest: dict[bytes, Tenant] = {}
        for index, table in enumerate(tables):
            location = f"{self.path}: tenants[{index}] ({table.name})"
            if table.name in by_name:
                raise ConfigError(
                    f"{self.path}: tenants[{index}].name: {table.name!r} is already in use; a"
                    " tenant may have token_env, token_file and several token_sha256 together"
                )
            limits = TenantLimits(table.max_sessions, table.opens_per_s, table.steps_per_s)
            tenant = by_name[table.name] = Tenant(table.name, frozenset(table.scopes), limits)
            for digest in _read_digests(table, folder, location):
                if digest in by_digest:
                    raise ConfigError(
                        f"{location}: the token also belongs to tenant {by_digest[digest].name!r};"
                        f" {_TOKEN_REMEDY}"
                    )
                by_digest[digest] = replace(tenant, token_digest=digest)
        return Tenants(by_name, by_digest)

    def _parse(self) -> list[_TenantTable]:
        file_bytes = _read_bytes(self.path, "tenants file", str(self.path))
        try:
            fields = parse_toml(file_bytes.decode())
        except DocumentLimitError as error:
            raise ConfigError(f"{self.path} cannot be used: {error}") from None
        except (DocumentError, UnicodeDecodeError) as error:
            # The parser's message may quote a token, so only its position is shown.
            _, _, problem = str(error).rpartition("(")
            is_toml_error = isinstance(error, DocumentError)
            problem = problem.rstrip(")") if is_toml_error else "not UTF-8"
            raise ConfigError(
                f"{self.path}: expected TOML with [[tenants]] tables, got a syntax error"
                f" ({problem}); correct it"
            ) from None
        try:
            return _TenantsDocument.model_validate(fields).tenants
        except ValidationError as error:
            problems = error.errors(include_url=False, include_context=False)[:8]
            lines = [f"{self.path}: {_explain_field(problem)}" for problem in problems]
            raise ConfigError("\n".join(lines)) from None


class TokensFile:
    """A file with tokens of `ANONYMOUS`, one on each line, which may change."""

    def __init__(self, path: Path) -> None:
        self._secret_file = SecretFile(path)

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self._secret_file.path

    def has_changed(self) -> bool:
        """Return whether the file changed after the last `read`."""
        return self._secret_file.has_changed()

    def read(self) -> Tenants:
        """Read and validate the tokens."""
        tokens = [check_token(token, str(self.path)) for token in self._secret_file.read()]
        digests = map(hash_token, tokens)
        by_digest = {digest: replace(ANONYMOUS, token_digest=digest) for digest in digests}
        return Tenants({ANONYMOUS.name: ANONYMOUS}, by_digest)


def hash_token(token: str | bytes) -> bytes:
    """Return the SHA-256 digest of a token; tokens are compared by their digests."""
    token_bytes = token if isinstance(token, bytes) else token.encode("utf-8", "replace")
    return hashlib.sha256(token_bytes).digest()


def check_token(token: str, location: str) -> str:
    """Return the token if it is long enough, and valid in headers and URLs.

    Raises:
        ConfigError: the token is too short, too long, or contains an invalid character.
    """
    if not MIN_TOKEN_CHARS <= len(token) <= MAX_TOKEN_CHARS:
        raise ConfigError(
            f"{location}: a token must have {MIN_TOKEN_CHARS} to {MAX_TOKEN_CHARS} characters, got"
            f" {len(token)}; {_TOKEN_REMEDY}"
        )
    if not all(char.isascii() and (char.isalnum() or char in "-._~+=") for char in token):
        raise ConfigError(
            f"{location}: a token may only contain letters, digits and -._~+= because it can be"
            f" part of a URL; {_TOKEN_REMEDY}"
        )
    return token


def _read_digests(table: _TenantTable, folder: Path, location: str) -> list[bytes]:
    digests: list[bytes] = []
    if table.token_env:
        token = os.environ.get(table.token_env)
        if token is None:
            raise ConfigError(
                f"{location}: token_env: the environment variable {table.token_env} is not set;"
                " export it before the gateway starts"
            )
        digests.append(hash_token(check_token(token.strip(), f"{location}: ${table.token_env}")))
    if table.token_file:
        path = folder / table.token_file
        file_bytes = _read_bytes(path, f"{location}: token_file with a token on each line", "it")
        lines = [line.strip() for line in file_bytes.decode("utf-8", "replace").splitlines()]
        tokens = [line for line in lines if line]
        if not tokens:
            raise ConfigError(f"{location}: token_file contains no token; {_TOKEN_REMEDY}")
        digests += (hash_token(check_token(token, f"{location}: token_file")) for token in tokens)
    hex_digests = table.token_sha256 or []
    if isinstance(hex_digests, str):
        hex_digests = [hex_digests]
    digests += map(bytes.fromhex, hex_digests)
    return digests


def _read_bytes(path: Path, description: str, shown_name: str) -> bytes:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(f"{description}: {shown_name} is larger than {_MAX_FILE_BYTES} bytes")
        return path.read_bytes()
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        error_class: type[UserError] = NotFoundError if is_missing else ConfigError
        raise error_class(
            f"{description}: cannot read {shown_name}: {error.strerror}; create it or name another"
            " file"
        ) from error


def _explain_field(problem: Any) -> str:
    keys = [key for key in problem["loc"] if key not in ("constrained-str", "list")]
    path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).lstrip(".")
    name = str(keys[-1]) if keys else ""
    if problem["type"] == "extra_forbidden":
        if name in ("token", "tokens", "password", "secret"):
            return f"{path}: this file must not contain a plain token; set {_TOKEN_FIELDS_HELP}"
        names = ", ".join((_TenantTable if len(keys) > 1 else _TenantsDocument).model_fields)
        return f"{path}: unknown field {name!r}; use one of {names}"
    if "token_sha256" in keys:
        return f"{path}: must be 64 hexadecimal digits; set {_TOKEN_FIELDS_HELP}"
    if name == "token_env":
        return f"{path}: must name an environment variable in capitals; set {_TOKEN_FIELDS_HELP}"
    if name == "token_file" or problem["type"] == "value_error":
        return f"{path}: {problem['msg'].removeprefix('Value error, ')}"
    if isinstance(problem["input"], str | int | float) and name != "tenants":
        return f"{path}: {problem['msg']}, got {problem['input']!r}; correct it"
    return f"{path}: {problem['msg']}; write one [[tenants]] table per tenant"
