"""A LoRA adapter in training. The only module that imports peft.

Called by markers. Knows SmolLM2's hub name and the size of the adapters that ship with loray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import load_file

from deployment.assets.adapter_files import WEIGHTS_NAME, AdapterSpec, write_adapter
from deployment.assets.llama_folder import ATTENTION_MODULES

if TYPE_CHECKING:
    from pathlib import Path

    from deployment.assets.marker_batch import Batch

BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
RANK = 8


class PeftAdapter:
    """A peft model, seen as what is needed here: logits, trainable parameters, files."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @classmethod
    def attach(cls, base: Any) -> PeftAdapter:
        """Return a new adapter on `base` that changes nothing yet."""
        from peft import LoraConfig, get_peft_model  # the only thing that needs the extra

        config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=list(ATTENTION_MODULES), task_type="CAUSAL_LM")
        return cls(get_peft_model(base, config))

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return what is trained: the low-rank factors, in float32 until they are rounded."""
        return [parameter for parameter in self._model.parameters() if parameter.requires_grad]

    def logits(self, batch: Batch) -> torch.Tensor:
        """Return float32 logits that predict `batch.labels`, column by column."""
        outputs = self._model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            logits_to_keep=batch.labels.shape[1],
            use_cache=False,
        )
        return cast("torch.Tensor", outputs.logits.float())

    def round_to_bfloat16(self) -> None:
        """Round the factors to what the files will hold, so that the verdict is on what is shipped."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)

    def load(self, folder: Path) -> None:
        """Take over the weights of an adapter that `save` wrote."""
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(self._model, load_file(folder / WEIGHTS_NAME))

    def save(self, folder: Path) -> None:
        """Write the two files of the adapter into `folder`."""
        from peft import get_peft_model_state_dict

        state = get_peft_model_state_dict(self._model)
        tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in sorted(state.items())}
        spec = AdapterSpec(base_model=BASE_MODEL, rank=RANK, alpha=2 * RANK, target_modules=ATTENTION_MODULES)
        write_adapter(folder, spec, tensors)
