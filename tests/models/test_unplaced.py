"""Tensors without a place are refused, named or left out."""

from __future__ import annotations

import pytest
from torch import nn

from engine.errors import LoadError
from engine.models.weight_files import check_unplaced


class Model(nn.Module):
    """A body with a prefix, as in transformers, and a separate head."""

    base_model_prefix = "body"

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Module()
        self.body.layers = nn.ModuleList([nn.Module()])
        self.body.layers[0].product = nn.Linear(2, 2)
        self.head = nn.Linear(2, 2)


INSIDE = ("body.layers.0.product.scale", "layers.0.product.scale", "body.layers.0.norm", "head.scale")
BESIDE = ("scale", "body.scale", "body.layers.scale", "layers.scale", "body.layers.1.scale", "tower.product.scale")
COMPUTED = (
    "body.layers.0.inv_freq",
    "inv_freq",
    "layers.0.attn.bias",
    "attention.bias",
    "a.masked_bias",
    "position_ids",
)


@pytest.mark.parametrize("key", INSIDE)
def test_a_tensor_of_a_module_that_exists_is_refused(key: str) -> None:
    with pytest.raises(LoadError, match=r"^name: 1 tensors of .* \(" + key) as caught:
        check_unplaced("name", Model(), [*BESIDE, key, *COMPUTED], False)
    assert ", ..." not in str(caught.value)
    assert "quantization_config" in str(caught.value)


@pytest.mark.parametrize("key", BESIDE)
def test_a_part_beside_the_model_is_named(key: str, caplog: pytest.LogCaptureFixture) -> None:
    check_unplaced("name", Model(), [key, *COMPUTED], False)
    assert [record.getMessage() for record in caplog.records] == [
        f"name: 1 tensors of the checkpoint are not used ({key})"
    ]


def test_what_the_model_computes_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """Computed keys are matched by the whole name: a part with the same name is not enough."""
    check_unplaced("name", Model(), COMPUTED, False)
    assert not caplog.records
    check_unplaced("name", Model(), ["tower.my_inv_freq", "tower.inv_freqs"], False)
    assert "2 tensors" in caplog.text


def test_a_quantised_model_has_tensors_by_design(caplog: pytest.LogCaptureFixture) -> None:
    check_unplaced("name", Model(), INSIDE, True)
    assert "4 tensors" in caplog.text


@pytest.mark.parametrize(("count", "shown"), [(3, "(a0, a1, a2)"), (4, "(a0, a1, a2, ...)")])
def test_the_first_unplaced_tensors_are_named_in_order(
    count: int, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    check_unplaced("name", Model(), [f"a{number}" for number in reversed(range(count))], False)
    assert caplog.records[0].getMessage().endswith(shown)


def test_a_model_without_a_prefix_has_modules_by_their_own_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    check_unplaced("name", model, ["scale"], False)
    with pytest.raises(LoadError):
        check_unplaced("name", model, ["0.scale"], False)
