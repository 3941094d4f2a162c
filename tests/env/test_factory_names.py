"""Factories that another process can import by name, and factories that it cannot import."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import orjson
import pytest

from ludus.env.targets.targets import TargetFactory, make_importable_factory
from ludus.proto.errors import ConfigError
from tests.env.counting_env import CountingEnv, fail_during_creation

REPOSITORY = Path(__file__).parents[2]
SCRIPT = """
import sys
import orjson
from tests.env.counting_env import CountingEnv
from ludus.env.targets.targets import make_importable_factory

class ScriptedEnv(CountingEnv):
    name = "scripted"

if __name__ == "__main__":
    sys.stdout.write(orjson.dumps(make_importable_factory(ScriptedEnv)).decode())
"""


def encode_and_decode(factory) -> TargetFactory:
    """Encode a factory and return it as another process decodes it."""
    return TargetFactory(**orjson.loads(orjson.dumps(make_importable_factory(factory))))


@pytest.mark.parametrize(
    "factory",
    [
        CountingEnv,
        TargetFactory("tests.env.counting_env:CountingEnv"),
        partial(partial(CountingEnv)),
    ],
)
def test_importable_factory_is_decoded(factory) -> None:
    decoded_factory = encode_and_decode(factory)
    assert decoded_factory == TargetFactory("tests.env.counting_env:CountingEnv")
    assert isinstance(decoded_factory(), CountingEnv)


def test_outer_options_of_a_partial_factory_win() -> None:
    factory = partial(partial(fail_during_creation, reason="inner"), reason="outer")
    with pytest.raises(RuntimeError, match="outer"):
        encode_and_decode(factory)()


class OuterClass:
    """A class that contains an environment class."""

    class InnerEnv(CountingEnv):
        """A nested class that can be imported by its qualified name."""


def test_nested_class_is_encoded_by_its_qualified_name() -> None:
    assert make_importable_factory(OuterClass.InnerEnv).target.endswith(
        "test_factory_names:OuterClass.InnerEnv"
    )


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: CountingEnv(), r"lambda.*isolation='inline'"),
        (CountingEnv().reset, "worker processes cannot import|isolation='inline'"),
        (partial(fail_during_creation, "positional"), "isolation='inline'"),
        (partial(fail_during_creation, reason=object()), "must be JSON values"),
        (partial(fail_during_creation, reason=(1, 2)), "must be JSON values"),
    ],
)
def test_factory_that_cannot_be_imported_is_refused_with_a_remedy(factory, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_importable_factory(factory)


@pytest.mark.slow
def test_environment_defined_in_a_script_loads_without_running_main(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(REPOSITORY)},
        timeout=60,
    )
    try:
        factory = TargetFactory(**orjson.loads(process.stdout))
        factory.load()
        environment = factory()
        assert environment.name == "scripted"
        assert isinstance(environment, CountingEnv)
    finally:
        sys.modules.pop("__ludus_main__", None)
