"""A model, data and settings for torchtitan that train on a CPU, in the form in which its users bring their own."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset

import frameworks.programs.torchtitan_on_cpu  # noqa: F401  # isort: skip
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models.common import Embedding, Linear
from torchtitan.protocols import BaseModel, ModelSpec
from torchtitan.trainer import Trainer

from frameworks.progress import resumed, stepped, tensors_of

WORDS, WIDTH = 4096, 256
"""So many that each rank's file is one that :func:`support.storage.bucket.hold_up` can delay."""


class Sentences(IterableDataset):
    """Random words; a rank's own."""

    def __init__(self, rank: int, length: int) -> None:
        self.rank, self.length, self.number = rank, length, 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(2 * self.number + self.rank)
            self.number += 1
            words = torch.randint(0, WORDS, (self.length + 1,), generator=generator)
            yield {"input": words[:-1]}, words[1:]

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


class Loader(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = 1,
        **others: Any,
    ) -> None:
        super().__init__(
            Sentences(dp_rank, seq_len),
            dp_rank,
            dp_world_size,
            batch_size=local_batch_size,
            snapshot_every_n_steps=snapshot_every_n_steps,
        )


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *arguments: Any, **others: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *arguments: Any, **others: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return WORDS


class Model(BaseModel):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        words: Embedding.Config = field(
            default_factory=lambda: Embedding.Config(num_embeddings=WORDS, embedding_dim=WIDTH)
        )
        head: Linear.Config = field(
            default_factory=lambda: Linear.Config(in_features=WIDTH, out_features=WORDS)
        )

        def update_from_config(self, *, config: Any, **others: Any) -> None:
            pass

        def get_nparams_and_flops(self, model: Any, seq_len: int) -> tuple[int, int]:
            return 1, 1

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.words = config.words.build()
        self.head = config.head.build()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(words))


class ReportingTrainer(Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        if self.metrics_processor is not None and not hasattr(self, "_reported"):
            self._reported = True
            resumed(self.step - 1)
        super().train_step(data_iterator)
        stepped(self.step, tensors_of(self.model_parts[0], self.optimizers))


def _shard(model: Model, *, parallel_dims: Any, **others: Any) -> torch.nn.Module:
    return fully_shard(model, mesh=parallel_dims.get_mesh("fsdp"))


def trainer_config() -> Trainer.Config:
    """Of a job whose checkpoint isn't set yet."""
    return ReportingTrainer.Config(
        model_spec=ModelSpec(
            name="tiny",
            flavor="tiny",
            model=Model.Config(),
            parallelize_fn=_shard,
            pipelining_fn=None,
            post_optimizer_build_fn=None,
            state_dict_adapter=None,
        ),
        loss=CrossEntropyLoss.Config(),
        tokenizer=NoTokenizer.Config(),
        dataloader=Loader.Config(),
        optimizer=default_adamw(lr=1e-2),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=1,
            seq_len=16,
            steps=int(os.environ["STEPS"]),
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        dump_folder=os.environ["SCRATCH"],
    )
