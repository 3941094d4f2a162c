"""Who may use a gateway: tenants, what they may do, and the file that lists them.

    tenants.toml --TenantsFile.read--> Tenants (SHA-256 of each token -> Tenant)

The file holds no token: it names an environment variable or a file that holds it, or its
SHA-256. No message made here quotes a value that could be a token.
"""

from __future__ import annotations

import hashlib
import os
import tomllib
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ludus.env.security.tls import file_signatures
from ludus.proto.errors import ConfigError, NotFoundError, PermissionDeniedError, UserError

MIN_TOKEN_CHARS = 16
MAX_TOKEN_CHARS = 512
_MAX_FILE_BYTES = 4 * 1024 * 1024
_MAKE_TOKEN = "make one with: openssl rand -hex 32"
_WAYS = (
    'token_env = "NAME" (an environment variable), token_file = "PATH", or token_sha256 ='
    ' "DIGEST" from: printf %s "$TOKEN" | sha256sum'
)
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")]


class Scope(StrEnum):
    """What a token may be used for."""

    STEP = "step"
    """Open, play and close one's own sessions."""
    ADMIN = "admin"
    """Drain servers, see everybody's sessions. It does not include `step`."""


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What a tenant may use at most; None is without limit."""

    max_sessions: int | None = None
    opens_per_s: float | None = None
    steps_per_s: float | None = None


NO_LIMITS = TenantLimits()


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who a call belongs to."""

    name: str
    """Stands in session ids; empty where nobody has to authenticate."""
    scopes: frozenset[Scope] = frozenset(Scope)
    limits: TenantLimits = NO_LIMITS
    token_digest: bytes = field(default=b"", repr=False, compare=False)
    """SHA-256 of the token that it came with; empty where that is no tenant's of a file."""

    def require(self, scope: Scope) -> None:
        """Refuse a tenant without the scope.

        Raises:
            PermissionDeniedError: it has not.
        """
        if scope not in self.scopes:
            raise PermissionDeniedError(
                f"expected a token with the scope {scope!s}, got one of tenant {self.name!r} with"
                f" {', '.join(sorted(self.scopes))}; use another token, or add the scope to the"
                " tenant in the gateway's tenants file"
            )


@dataclass(frozen=True, slots=True)
class Tenants:
    """One good reading of a tenants file."""

    by_name: dict[str, Tenant]
    digests: tuple[tuple[bytes, Tenant], ...]
    """SHA-256 of each token, and whose it is."""
    by_digest: dict[bytes, Tenant] = field(init=False)
    """The same, for tokens that were compared before."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_digest", dict(self.digests))


class _TenantEntry(BaseModel):
    """One `[[tenants]]` table."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,63}$")]
    token_env: Annotated[str, Field(pattern=r"^[A-Z_][A-Z0-9_]{0,63}$")] | None = None
    token_file: Annotated[str, Field(min_length=1)] | None = None
    token_sha256: _Sha256 | list[_Sha256] | None = None
    scopes: list[Literal["step", "admin"]] = Field(default=["step"], min_length=1)
    max_sessions: Annotated[int, Field(ge=1)] | None = None
    opens_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    steps_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _has_a_token(self) -> _TenantEntry:
        if not (self.token_env or self.token_file or self.token_sha256):
            raise ValueError(f"expected where the tenant's token is, got none; set {_WAYS}")
        return self

    def tenant(self) -> Tenant:
        """The tenant without its tokens."""
        return Tenant(
            name=self.name,
            scopes=frozenset(Scope(scope) for scope in self.scopes),
            limits=TenantLimits(self.max_sessions, self.opens_per_s, self.steps_per_s),
        )


class _Document(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    tenants: list[_TenantEntry] = Field(min_length=1)


class TenantsFile:
    """A tenants file and the token files it names, which may all change."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._watched: tuple[Path, ...] = (path,)
        self._signature: tuple[Any, ...] = ()

    def has_changed(self) -> bool:
        """True when a file differs from what `read` saw last."""
        return file_signatures(self._watched) != self._signature

    def read(self) -> Tenants:
        """The tenants that the file lists now.

        Raises:
            NotFoundError: the file is not there.
            ConfigError: it cannot be used; names file, field, value and the way out.
        """
        # Taken before the contents: a change while reading is seen by the next look.
        own = file_signatures((self.path,))
        self._signature = file_signatures(self._watched)
        entries = self._parse()
        folder = self.path.parent
        token_files = tuple(folder / entry.token_file for entry in entries if entry.token_file)
        self._watched = (self.path, *token_files)
        self._signature = own + file_signatures(token_files)
        by_name: dict[str, Tenant] = {}
        owners: dict[bytes, Tenant] = {}
        for index, entry in enumerate(entries):
            where = f"{self.path}: tenants[{index}] ({entry.name})"
            if entry.name in by_name:
                raise ConfigError(
                    f"{self.path}: tenants[{index}].name: expected each name once, got"
                    f" {entry.name!r} again; a tenant may have token_env, token_file and several"
                    " token_sha256 at once"
                )
            tenant = by_name[entry.name] = entry.tenant()
            for digest in _digests(entry, folder, where):
                if digest in owners:
                    raise ConfigError(
                        f"{where}: expected a token of its own, got that of tenant"
                        f" {owners[digest].name!r}; {_MAKE_TOKEN}"
                    )
                owners[digest] = replace(tenant, token_digest=digest)
        return Tenants(by_name, tuple(owners.items()))

    def _parse(self) -> list[_TenantEntry]:
        content = _read_bytes(self.path, "a tenants file", str(self.path))
        try:
            raw = tomllib.loads(content.decode())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            # The reason may quote the text, which may be a token: only the place is said.
            _, _, place = str(error).rpartition("(")
            place = place.rstrip(")") if isinstance(error, tomllib.TOMLDecodeError) else "no UTF-8"
            raise ConfigError(
                f"{self.path}: expected TOML with [[tenants]] tables, got a syntax error"
                f" ({place}); correct it there"
            ) from None
        try:
            return _Document.model_validate(raw).tenants
        except ValidationError as error:
            raise ConfigError(_explain(self.path, error)) from None


def token_digest(token: str | bytes) -> bytes:
    """SHA-256 of a token, which is what tokens are compared by."""
    raw = token if isinstance(token, bytes) else token.encode("utf-8", "replace")
    return hashlib.sha256(raw).digest()


def check_token(token: str, where: str) -> str:
    """The token, when it is one that cannot be guessed and fits every header and path.

    Raises:
        ConfigError: it is too short, too long, or has characters that URLs and headers break.
    """
    if not MIN_TOKEN_CHARS <= len(token) <= MAX_TOKEN_CHARS:
        raise ConfigError(
            f"{where}: expected a token of {MIN_TOKEN_CHARS} to {MAX_TOKEN_CHARS} characters, got"
            f" {len(token)}; {_MAKE_TOKEN}"
        )
    if not all(char.isascii() and (char.isalnum() or char in "-._~+=") for char in token):
        raise ConfigError(
            f"{where}: expected a token of letters, digits and -._~+= (it also stands in URLs),"
            f" got other characters; {_MAKE_TOKEN}"
        )
    return token


def _digests(entry: _TenantEntry, folder: Path, where: str) -> list[bytes]:
    found: list[bytes] = []
    if entry.token_env:
        token = os.environ.get(entry.token_env)
        if token is None:
            raise ConfigError(
                f"{where}: token_env: expected the environment variable {entry.token_env}, got"
                " none of this name; export it before the gateway starts"
            )
        found.append(token_digest(check_token(token.strip(), f"{where}: ${entry.token_env}")))
    if entry.token_file:
        path = folder / entry.token_file
        content = _read_bytes(path, f"{where}: a token_file with a token on each line", "it")
        lines = [line.strip() for line in content.decode("utf-8", "replace").splitlines()]
        tokens = [line for line in lines if line]
        if not tokens:
            raise ConfigError(f"{where}: expected a token in token_file, got none; {_MAKE_TOKEN}")
        found.extend(token_digest(check_token(t, f"{where}: token_file")) for t in tokens)
    given = entry.token_sha256 or []
    found.extend(bytes.fromhex(one) for one in ([given] if isinstance(given, str) else given))
    return found


def _read_bytes(path: Path, what: str, name: str) -> bytes:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(
                f"expected {what} of at most {_MAX_FILE_BYTES} bytes, got more in {name}"
            )
        return path.read_bytes()
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        kind: type[UserError] = NotFoundError if missing else ConfigError
        raise kind(
            f"expected {what}, got {error.strerror} for {name}; create it or name another"
        ) from error


def _explain(path: Path, error: ValidationError) -> str:
    faults = [_fault(fault) for fault in error.errors(include_url=False, include_context=False)]
    return "\n".join(f"{path}: {fault}" for fault in faults[:8])


def _fault(fault: Any) -> str:
    fields = [part for part in fault["loc"] if part not in ("constrained-str", "list")]
    place = "".join(f"[{f}]" if isinstance(f, int) else f".{f}" for f in fields).lstrip(".")
    name = str(fields[-1]) if fields else ""
    if fault["type"] == "extra_forbidden":
        if name in ("token", "tokens", "password", "secret"):
            return f"{place}: expected no plain token in this file, got one; set {_WAYS}"
        known = ", ".join((_TenantEntry if len(fields) > 1 else _Document).model_fields)
        return f"{place}: expected one of {known}; got {name!r}; rename or remove it"
    if "token_sha256" in fields:
        return f"{place}: expected 64 hexadecimal digits, got something else; set {_WAYS}"
    if name == "token_env":
        return f"{place}: expected the name of an environment variable in capitals; set {_WAYS}"
    if name == "token_file" or fault["type"] == "value_error":
        return f"{place}: {fault['msg'].removeprefix('Value error, ')}"
    if isinstance(fault["input"], str | int | float) and name != "tenants":
        return f"{place}: {fault['msg']}, got {fault['input']!r}; correct it"
    return f"{place}: {fault['msg']}; write a [[tenants]] table for each tenant"
