"""Each layer has its own shape of K and V, and stores no more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from engine.attention.tensors import KVShape, KVTensors, LayerShape
from engine.errors import LoadError
from engine.start import probe
from engine.start.loading import LoadedModel
from tests.models import families

FLOAT = torch.float32
CPU = torch.device("cpu")


def works(loaded: LoadedModel, shape: KVShape) -> bool:
    try:
        probe.probe(loaded, shape, probe.TransformersBackend(loaded.model))
    except (LoadError, RuntimeError):
        return False
    return True


def test_layers_that_read_the_kv_of_others_store_nothing() -> None:
    loaded = families.family("gemma4_text")
    shape = probe.find_kv_shape(loaded)
    narrow, wide = LayerShape(2, 8, 8), LayerShape(2, 16, 16)
    assert shape.layers == {0: narrow, 1: narrow, 2: wide}
    assert shape.shared == {3: 1, 4: 1, 5: 2}
    assert shape.token_bytes(FLOAT) == (2 * 2 * 16 + 2 * 32) * 4
    storage = KVTensors(shape, 5, FLOAT, CPU)
    assert sum(moved.nbytes for moved in storage._moved) == 5 * shape.token_bytes(FLOAT)
    assert works(loaded, shape)


def test_latents_are_stored_once() -> None:
    loaded = families.family("glm4_moe_lite")
    shape = probe.find_kv_shape(loaded)
    assert shape.token_bytes(FLOAT) == 2 * (16 + 4) * 4
    storage = KVTensors(shape, 5, FLOAT, CPU)
    keys, values = storage.layers[1]
    assert keys.data_ptr() == values.data_ptr()
    assert values.shape == (5, 1, 16)
    assert works(loaded, shape)


WRONG: dict[str, tuple[str, Callable[[KVShape], KVShape]]] = {
    "one shape for all layers": ("gemma4_text", lambda shape: KVShape.equal(6, *shape.layers[0][:3])),
    "the K/V of another layer": ("gemma4_text", lambda shape: replace(shape, shared={3: 0, 4: 1, 5: 2})),
    "V as wide as K": (
        "glm4_moe_lite",
        lambda shape: KVShape(dict.fromkeys(shape.layers, LayerShape(1, 20, 20, is_latent=True))),
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_shapes_are_refused(wrong: str) -> None:
    name, change = WRONG[wrong]
    loaded = families.family(name)
    assert not works(loaded, change(probe.find_kv_shape(loaded)))
