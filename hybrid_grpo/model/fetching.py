"""Which modules ZeRO-3 fetches whole."""

from typing import Any

from torch import nn

from hybrid_grpo.model.towers import text_of


def whole_layers(model: Any) -> list[nn.Module]:
    """Return the layers of a causal language model whose weights ZeRO-3 is to gather together, reducing their gradients
    together when the layer's backward pass has ended. By default it does so for each module of a layer, which takes
    Python longer than a GPU takes to compute a small one.

    These are the layers behind something that trains. DeepSpeed reduces a whole layer when the gradient of its input is
    known, which for an input without one is before those of its weights are.
    """
    text, found = text_of(model), list[nn.Module]()
    trains = any(p.requires_grad for p in text.get_input_embeddings().parameters())
    for layer in getattr(text, "layers", ()):
        if trains:
            found.append(layer)
        trains = trains or any(p.requires_grad for p in layer.parameters())
    return found
