"""Key outliers on purpose: the same function, with channels that a scale shared by a whole head cannot hold."""

import torch

from eval.program import BadInput


@torch.no_grad()
def add_key_outliers(model, factor: float) -> None:
    """Multiply two channels of every key head by `factor` and divide the query's by it, in place.

    Some released models have such channels by training (large key biases). Rotary embedding turns channels i and
    i + D/2 together, so scaling the last such pair of a head leaves every q·k, and so the model, as it was.

    Raises:
        BadInput: the model norms its keys after the projection (the factor would be undone), or has no plain q_proj
            and k_proj.
    """
    attentions = [module for module in model.modules() if hasattr(module, "q_proj") and hasattr(module, "k_proj")]
    if not attentions or any(hasattr(module, "k_norm") for module in attentions):
        raise BadInput(
            f"--key-outliers {factor:g}: {model.config.model_type} has no plain q_proj and k_proj, or norms its keys "
            "after them; give a model of the Llama, Mistral or Qwen2 kind"
        )
    for module in attentions:
        for channel in (module.head_dim // 2 - 1, module.head_dim - 1):
            for projection, by in ((module.k_proj, factor), (module.q_proj, 1 / factor)):
                for parameter in projection.parameters():
                    parameter[channel :: module.head_dim] *= by
