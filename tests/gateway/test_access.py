"""Authentication by token, the tenants file, and the absence of tokens in errors and logs."""

from __future__ import annotations

import base64
import hashlib
import logging
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.proto.errors import (
    AuthenticationError,
    ConfigError,
    NotFoundError,
    PermissionDeniedError,
)
from ludus.services.gateway.tenancy.access import (
    AuthFailure,
    TenantAccess,
    read_authorization,
)
from ludus.services.gateway.tenancy.tenants import Scope, Tenant, TenantLimits
from tests.gateway.clock import Clock

ALICE = "a11ce-a11ce-a11ce-a11ce"
BOB = "b0b-b0b-b0b-b0b-b0b-b0b"


def compute_sha256(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def make_basic_header(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def write_tenants_file(folder: Path, text: str | None = None) -> Path:
    path = folder / "tenants.toml"
    path.write_text(
        text
        if text is not None
        else f"""
        [[tenants]]
        name = "alice"
        token_sha256 = "{compute_sha256(ALICE)}"
        max_sessions = 8
        opens_per_s = 4
        steps_per_s = 1000.5

        [[tenants]]
        name = "bob"
        token_sha256 = ["{compute_sha256(BOB)}", "{compute_sha256(BOB + "-next")}"]
        scopes = ["step", "admin"]
        """
    )
    return path


@pytest.fixture
def access(tmp_path: Path, clock: Clock) -> TenantAccess:
    return TenantAccess.from_file(write_tenants_file(tmp_path), clock=clock)


@pytest.mark.parametrize(
    "authorization",
    [
        f"Bearer {ALICE}",
        f"bearer   {ALICE} ",
        make_basic_header("alice", ALICE),
        make_basic_header("any-user", ALICE),
        make_basic_header("", ALICE),
        make_basic_header(ALICE, ""),
    ],
)
def test_every_authorization_format_authenticates_the_tenant(
    access: TenantAccess, authorization: str
) -> None:
    tenant = access.authenticate(authorization)
    assert tenant == Tenant("alice", frozenset({Scope.STEP}), TenantLimits(8, 4.0, 1000.5))
    assert access.authenticate(authorization.encode()) == tenant


def test_tenant_can_have_two_tokens_during_rotation(access: TenantAccess) -> None:
    assert access.authenticate(f"Bearer {BOB}-next") == access.authenticate(f"Bearer {BOB}")


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        ALICE,
        "Bearer",
        "Bearer " + ALICE[:-1],
        "Bearer " + ALICE + "x",
        "Bearer alice",
        f"Digest {ALICE}",
        f"Bearer {ALICE} {ALICE}",
        "Basic " + ALICE,
        make_basic_header("alice", ""),
        make_basic_header(ALICE, "wrong"),
        "Basic " + base64.b64encode(ALICE.encode()).decode(),
        "Basic =",
        "Basic ñ",
        f"Bearer {compute_sha256(ALICE)}",
    ],
)
def test_malformed_authorization_is_refused(access: TenantAccess, authorization: str) -> None:
    with pytest.raises(AuthenticationError, match="Bearer <token>") as error:
        access.authenticate(authorization)
    assert ALICE not in str(error.value)


def test_missing_and_duplicate_headers_are_refused(access: TenantAccess) -> None:
    with pytest.raises(AuthenticationError, match="no Authorization header"):
        access.authenticate()
    with pytest.raises(AuthenticationError, match="malformed Authorization"):
        access.authenticate(f"Bearer {ALICE}", f"Bearer {BOB}")


def test_missing_scope_error_lists_granted_scopes(access: TenantAccess) -> None:
    failures: list[AuthFailure] = []
    access.on_failure = failures.append
    alice = access.authenticate(f"Bearer {ALICE}")
    access.require_scope(alice, Scope.STEP)
    access.require_scope(access.authenticate(f"Bearer {BOB}"), Scope.ADMIN)
    with pytest.raises(
        PermissionDeniedError, match="scope admin, but tenant 'alice' has only step"
    ):
        access.require_scope(alice, Scope.ADMIN)
    assert failures == [AuthFailure.SCOPE]


# -- no tenants, or a single token -----------------------------------------------------


def test_gateway_without_tokens_can_listen_only_on_loopback() -> None:
    access = TenantAccess()
    assert access.authenticate() == access.authenticate("Bearer x") == Tenant("")
    for host in ("127.0.0.1", "localhost", "::1", "127.3.2.1"):
        access.check_host(host)
    for host in ("0.0.0.0", "::", "gateway.example", "10.0.0.3", ""):
        with pytest.raises(ConfigError, match="tenants or a token"):
            access.check_host(host)
        access.check_host(host, insecure=True)
        TenantAccess.from_token(ALICE).check_host(host)


def test_single_token_has_every_scope() -> None:
    access = TenantAccess.from_token(ALICE)
    tenant = access.authenticate(f"Bearer {ALICE}")
    assert (tenant.name, tenant.limits) == ("", TenantLimits())
    access.require_scope(tenant, Scope.ADMIN)
    with pytest.raises(AuthenticationError):
        access.authenticate(f"Bearer {BOB}")


@pytest.mark.parametrize(
    "token", ["", "short", "x" * 513, "with a space in it", "slash/slash/slash/"]
)
def test_weak_or_url_unsafe_token_is_refused_and_not_in_the_error(token: str) -> None:
    with pytest.raises(ConfigError, match="openssl rand") as error:
        TenantAccess.from_token(token)
    assert not token or token not in str(error.value)


# -- the tenants file --------------------------------------------------------------------


def test_tokens_are_read_from_the_environment_and_from_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALICES_TOKEN", ALICE)
    (tmp_path / "bob").write_text(f"{BOB}\n\n{BOB}-next\n")
    path = write_tenants_file(
        tmp_path,
        '[[tenants]]\nname = "alice"\ntoken_env = "ALICES_TOKEN"\n'
        '[[tenants]]\nname = "bob"\ntoken_file = "bob"\n',
    )
    access = TenantAccess.from_file(path)
    assert access.authenticate(f"Bearer {ALICE}").name == "alice"
    assert access.authenticate(f"Bearer {BOB}").name == "bob"
    assert access.authenticate(f"Bearer {BOB}-next").name == "bob"


SECRET = "s3cr3t-s3cr3t-s3cr3t"
ENTRY = '[[tenants]]\nname = "a"\n'


@pytest.mark.parametrize(
    ("text", "expected_message"),
    [
        (
            ENTRY + f'token = "{SECRET}"',
            r"tenants\[0\]\.token: this file must not contain a plain token.*sha256sum",
        ),
        (
            ENTRY + f'tokn = "{SECRET}"',
            r"tenants\[0\]\.tokn: unknown field 'tokn'; use one of name, token_env",
        ),
        (f'token = "{SECRET}"\n' + ENTRY, r": token: this file must not contain a plain token"),
        (ENTRY, r"tenants\[0\]: the tenant needs a token"),
        (ENTRY + f'token_sha256 = "{SECRET}"', r"tenants\[0\]\.token_sha256: .*64 hexadecimal"),
        (ENTRY + f'token_sha256 = ["{SECRET}"]', r"tenants\[0\]\.token_sha256.*64 hexadecimal"),
        (ENTRY + f'token_env = "{SECRET}"', r"token_env: must name an environment"),
        (ENTRY + 'token_env = "NO_SUCH_TOKEN"', r"environment variable NO_SUCH_TOKEN is not set"),
        (ENTRY + f'token_file = "{SECRET}"', r"tenants\[0\] \(a\): token_file.*No such file"),
        (ENTRY + f'token_sha256 = "{"0" * 64}"\nmax_sessions = 0', r"\[0\]\.max_sessions.*got 0"),
        (ENTRY + f'token_sha256 = "{"0" * 64}"\nopens_per_s = "9"', r"opens_per_s: .*got '9'"),
        (ENTRY + f'token_sha256 = "{"0" * 64}"\nsteps_per_s = inf', r"steps_per_s: .*got inf"),
        (ENTRY + f'token_sha256 = "{"0" * 64}"\nscopes = ["root"]', r"scopes\[0\]: .*got 'root'"),
        (ENTRY + f'token_sha256 = "{"0" * 64}"\nscopes = []', r"tenants\[0\]\.scopes"),
        ('[[tenants]]\nname = "a b"\ntoken_env = "A"', r"tenants\[0\]\.name: .*got 'a b'"),
        (f'[[tenants]]\ntoken_sha256 = "{"0" * 64}"', r"tenants\[0\]\.name: Field required"),
        ((ENTRY + f'token_sha256 = "{"0" * 64}"\n') * 2, r"\[1\]\.name: 'a' is already in use"),
        (f'[[tenants]]\nname = "{SECRET}', r"syntax error \(at "),
        (f"{SECRET}\x00", r"syntax error \(at "),
        ("tenants = " + "[" * 5000, r"cannot be used: "),
        ("x = " + "{a = " * 5000, r"cannot be used: "),
        ("", r"tenants: Field required; write one \[\[tenants\]\] table"),
        ("tenants = []", r"tenants: List should have at least 1 item"),
    ],
)
def test_tenants_file_error_has_location_and_remedy_but_no_token(
    tmp_path: Path, text: str, expected_message: str
) -> None:
    path = write_tenants_file(tmp_path, text)
    with pytest.raises((ConfigError, NotFoundError), match=expected_message) as error:
        TenantAccess.from_file(path)
    assert SECRET not in str(error.value)
    assert str(path) in str(error.value)


def test_two_tenants_cannot_share_a_token(tmp_path: Path) -> None:
    entry = '[[tenants]]\nname = "{}"\ntoken_sha256 = "' + compute_sha256(ALICE) + '"\n'
    path = write_tenants_file(tmp_path, entry.format("a") + entry.format("b"))
    with pytest.raises(ConfigError, match="the token also belongs to tenant 'a'"):
        TenantAccess.from_file(path)


def test_missing_tenants_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"absent\.toml: No such file"):
        TenantAccess.from_file(tmp_path / "absent.toml")


def test_changed_tenants_file_is_reloaded_after_the_interval(
    access: TenantAccess, clock: Clock, tmp_path: Path
) -> None:
    carol_token = "ca401-ca401-ca401-ca401"
    removed_tenant = access.authenticate(f"Bearer {ALICE}")
    write_tenants_file(
        tmp_path, f'[[tenants]]\nname = "carol"\ntoken_sha256 = "{compute_sha256(carol_token)}"\n'
    )
    assert access.authenticate(f"Bearer {ALICE}") is removed_tenant  # the file is not checked yet
    clock.now_s += 1.0
    assert access.authenticate(f"Bearer {carol_token}").name == "carol"
    with pytest.raises(AuthenticationError):
        access.authenticate(f"Bearer {ALICE}")
    with pytest.raises(AuthenticationError, match="'alice' was removed"):
        access.admit(removed_tenant)


def test_admit_returns_current_tenant_limits(
    access: TenantAccess, clock: Clock, tmp_path: Path
) -> None:
    alice = access.authenticate(f"Bearer {ALICE}")
    path = write_tenants_file(tmp_path)
    path.write_text(path.read_text().replace("max_sessions = 8", "max_sessions = 9"))
    clock.now_s += 1.0
    assert access.admit(alice).limits.max_sessions == 9


def test_replaced_token_file_is_reloaded(tmp_path: Path, clock: Clock) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(ALICE)
    text = '[[tenants]]\nname = "alice"\ntoken_file = "token"\n'
    access = TenantAccess.from_file(write_tenants_file(tmp_path, text), clock=clock)
    (tmp_path / "new").write_text(BOB)
    (tmp_path / "new").replace(token_file)
    clock.now_s += 1.0
    assert access.authenticate(f"Bearer {BOB}").name == "alice"


def test_invalid_change_keeps_the_previous_tenants_and_is_logged_once(
    access: TenantAccess, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tenants_file(tmp_path, f'[[tenants]]\nname = "alice"\ntoken = "{SECRET}"\n')
    for _ in range(3):
        clock.now_s += 1.0
        assert access.authenticate(f"Bearer {ALICE}").name == "alice"
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "the previous content remains" in caplog.text
    assert SECRET not in caplog.text
    write_tenants_file(tmp_path)
    clock.now_s += 1.0
    assert access.authenticate(f"Bearer {BOB}").name == "bob"


# -- random input ---------------------------------------------------------------------------

SINGLE_TOKEN_ACCESS = TenantAccess.from_token(ALICE)


@given(st.one_of(st.text(), st.binary()))
def test_random_authorization_raises_authentication_error(authorization: str | bytes) -> None:
    with pytest.raises(AuthenticationError):
        SINGLE_TOKEN_ACCESS.authenticate(authorization)


@pytest.mark.slow
@given(
    st.sampled_from(["Bearer ", "basic ", "Basic ", "BASIC\t", "Bearer"]),
    st.one_of(
        st.binary().map(lambda content: base64.b64encode(content).decode()),
        st.text(string.printable),
        st.text(),
    ),
)
def test_random_credentials_with_known_scheme_never_authenticate(
    scheme: str, credentials: str
) -> None:
    with pytest.raises(AuthenticationError):
        SINGLE_TOKEN_ACCESS.authenticate(scheme + credentials)


@pytest.mark.slow
@given(
    st.text(st.characters(blacklist_characters=":", blacklist_categories=["Cs"])), st.text("ab:")
)
def test_basic_header_token_is_the_password_or_otherwise_the_user(user: str, password: str) -> None:
    expected_token = (password or user).encode() or None
    token = read_authorization(make_basic_header(user, password)[:4090])
    assert token == expected_token or len(user) > 800
