"""Models that are loaded in shards and exported by two ranks, compared with transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ludus.proto.errors import NotFoundError
from tests.learner import sharded_ranks
from tests.learner.sharded_ranks import CONFIGS, RankResult
from tests.learner.tiny_policy import make_batch, make_learner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOKEN_IDS = torch.tensor([[5, 9, 2, 40, 7, 7, 1, 33]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run two ranks; return the folder of the models, the exported models and the results."""
    folder = tmp_path_factory.mktemp("sharded")
    for kind in CONFIGS:
        sharded_ranks.make_model_folder(folder / kind, kind)
    sharded_ranks.make_large_model_folder(folder / "large")
    mp.spawn(sharded_ranks.run_rank, args=(str(folder),), nprocs=sharded_ranks.NUM_RANKS)
    return folder


def load_results(folder: Path) -> tuple[dict[str, RankResult], dict[str, torch.Tensor]]:
    results: tuple[dict[str, RankResult], dict[str, torch.Tensor]] = torch.load(
        folder / "results.pt", weights_only=False
    )
    return results


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Load the tensors of all files of a model."""
    return {
        name: tensor
        for path in folder.glob("model*.safetensors")
        for name, tensor in load_file(path).items()
    }


@torch.no_grad()
def compute_logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits: torch.Tensor = model(TOKEN_IDS).logits
    return logits


@pytest.mark.parametrize("kind", CONFIGS)
def test_sharded_model_trains_like_a_whole_model(folder: Path, kind: str) -> None:
    result = load_results(folder)[0][kind]
    assert result.different_names == []
    learner = make_learner(str(folder / kind), packing="pad")
    metrics = learner.train_step(make_batch(), sharded_ranks.COEFFICIENTS)
    assert result.loss == pytest.approx(metrics.loss, rel=1e-5, abs=1e-6)
    assert result.grad_norm == pytest.approx(metrics.grad_norm, rel=1e-5)


@pytest.mark.parametrize("kind", CONFIGS)
def test_ranks_export_the_original_tensors_in_several_files(folder: Path, kind: str) -> None:
    exported_folder = folder / f"{kind}-export"
    assert all(number >= 2 for number in load_results(folder)[0][kind].num_files)
    tensors, original_tensors = load_tensors(exported_folder), load_tensors(folder / kind)
    assert tensors.keys() == original_tensors.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, original_tensors[name].float())
    assert torch.equal(compute_logits(exported_folder), compute_logits(folder / kind))
    index = json.loads((exported_folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()


def test_rank_never_holds_the_whole_model(folder: Path) -> None:
    for rank in range(sharded_ranks.NUM_RANKS):
        peak_bytes = torch.load(folder / f"peak-{rank}.pt")
        assert peak_bytes < 0.8 * sharded_ranks.NUM_LARGE_BYTES


def test_adapters_do_not_depend_on_the_number_of_ranks(folder: Path) -> None:
    adapters = load_results(folder)[1]
    learner = sharded_ranks.make_adapter_learner(str(folder / "tied_embeddings"))
    expected_adapters = learner.gather_weights()
    assert adapters.keys() == expected_adapters.keys()
    for name, tensor in adapters.items():
        assert torch.equal(tensor, expected_adapters[name])
    assert any(tensor.abs().max() > 0 for tensor in adapters.values())


def test_exported_adapters_are_merged_in_float32(folder: Path) -> None:
    tensors = load_tensors(folder / "adapters-export")
    original_tensors = load_tensors(folder / "tied_embeddings")
    assert tensors.keys() == original_tensors.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.float32
        is_target = any(target in name for target in sharded_ranks.LORA_CONFIG.targets)
        is_changed = not torch.equal(tensor, original_tensors[name].float())
        assert is_changed == (is_target and name.endswith(".weight"))


@pytest.fixture
def split_folder(folder: Path, tmp_path: Path) -> Path:
    """Return a folder with a model in several files."""
    split_folder = tmp_path / "split"
    shutil.copytree(folder / "tied_embeddings-export", split_folder)
    return split_folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_truncated_file_is_named(split_folder: Path, dtype: str) -> None:
    path = sorted(split_folder.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(NotFoundError, match=rf"{path.name} is incomplete or damaged.*; copy the"):
        make_learner(str(split_folder), dtype=dtype)


def test_missing_file_is_named(split_folder: Path) -> None:
    path = sorted(split_folder.glob("*.safetensors"))[1]
    path.unlink()
    with pytest.raises(NotFoundError, match=path.name):
        make_learner(str(split_folder), dtype="bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_no_file_contains_are_refused(split_folder: Path, dtype: str) -> None:
    path = split_folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = "model.layers.1.mlp.up_proj.weight"
    removed_file = index["weight_map"][name]
    index["weight_map"] = {
        key: file for key, file in index["weight_map"].items() if file != removed_file
    }
    path.write_text(json.dumps(index))
    with pytest.raises(NotFoundError, match=r"do not contain \d+ of its weights, such as 'model"):
        make_learner(str(split_folder), dtype=dtype)
