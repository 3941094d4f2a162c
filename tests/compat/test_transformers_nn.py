"""Language models as actor and critic networks, with padding on either side."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from ludus.trainer.compat.gymformer.rl.transformers_nn import LMActorNetwork, LMCriticNetwork
from tests.compat.tiny_models import tiny_model

PAD_ID = 0


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a model with rotary or with learned position embeddings."""
    path = tmp_path_factory.mktemp("model")
    if request.param == "llama":
        return tiny_model(path / "model", ["one two three"])
    torch.manual_seed(0)
    GPT2LMHeadModel(
        GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    ).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def actor(model_folder: str) -> LMActorNetwork:
    return LMActorNetwork(model_folder, pad_token_id=PAD_ID)


@pytest.fixture(scope="module")
def critic(model_folder: str) -> LMCriticNetwork:
    network = LMCriticNetwork(model_folder, pad_token_id=PAD_ID)
    torch.nn.init.normal_(network.model.score.weight)
    return network


def test_the_actor_returns_logits_of_the_next_token(actor: LMActorNetwork) -> None:
    state = torch.tensor([5, 6, 7])
    logits = actor(state)
    assert logits.shape == (actor.model.config.vocab_size,)
    torch.testing.assert_close(logits, actor.model(input_ids=state[None]).logits[0, -1])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_change_the_output(
    actor: LMActorNetwork, critic: LMCriticNetwork, side: str
) -> None:
    states = [[5, 6, 7, 8, 9], [11, 12]]
    padding = [PAD_ID] * 3
    short_state = [*padding, *states[1]] if side == "left" else [*states[1], *padding]
    padded_states = torch.tensor([states[0], short_state])
    for network in (actor, critic):
        separate_outputs = torch.stack([network(torch.tensor(state)) for state in states])
        torch.testing.assert_close(network(padded_states), separate_outputs, atol=1e-5, rtol=0)


def test_a_pad_token_inside_a_state_is_not_padding(actor: LMActorNetwork) -> None:
    state_with_pad, state_without_pad = torch.tensor([5, PAD_ID, 7]), torch.tensor([5, 7])
    assert not torch.allclose(actor(state_with_pad), actor(state_without_pad), atol=1e-3)


def test_attention_mask_determines_whether_a_pad_token_is_padding(actor: LMActorNetwork) -> None:
    state = torch.tensor([5, 6, PAD_ID])
    logits = actor(state, attention_mask=torch.ones(3))
    torch.testing.assert_close(logits, actor.model(input_ids=state[None]).logits[0, -1])
    torch.testing.assert_close(actor(state), actor(state[:2]))


def test_pad_token_id_none_disables_padding(model_folder: str) -> None:
    actor = LMActorNetwork(model_folder, pad_token_id=None)
    state = torch.tensor([5, 6, PAD_ID])
    torch.testing.assert_close(actor(state), actor.model(input_ids=state[None]).logits[0, -1])


def test_float_token_ids_are_accepted(actor: LMActorNetwork) -> None:
    torch.testing.assert_close(actor(torch.tensor([5.0, 6.0])), actor(torch.tensor([5, 6])))


def test_critic_can_be_a_model_with_experts(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=300,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=2,
        num_experts_per_tok=1,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    critic = LMCriticNetwork(str(tmp_path), pad_token_id=PAD_ID)
    assert critic(torch.tensor([[5, 6]])).tolist() == [[0.0]]


@pytest.mark.slow
def test_a_new_critic_returns_0_and_can_learn(model_folder: str) -> None:
    torch.manual_seed(0)
    critic = LMCriticNetwork(model_folder, pad_token_id=PAD_ID)
    states, returns = torch.tensor([[5, 6], [7, 8]]), torch.tensor([[1.0], [-1.0]])
    assert critic(states).tolist() == [[0.0], [0.0]]
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
    for _ in range(40):
        loss = (critic(states) - returns).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    from ludus.proto.errors import NotFoundError

    with pytest.raises(NotFoundError, match="the model cannot be loaded"):
        LMActorNetwork(str(tmp_path), pad_token_id=PAD_ID)
