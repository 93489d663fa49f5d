"""Train the storyteller: a demo model small enough to check in and readable enough to watch.

python examples/storyteller/train.py --out tandem/storyteller/model
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from grammar import Document, call_documents, call_drills, drills, long_documents, short_documents
from muon import Muon
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from tokens import rows, train_tokenizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transplant import transplant

VOCAB_SIZE = 2048
DRILL, SHORT, LONG = 128, 512, 1024
DRILL_TOKENS_PER_STEP = 2048
HELD_OUT_SEED_OFFSET = 1_000_000
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""


@dataclass(frozen=True)
class Schedule:
    """Course of a training."""

    steps: int
    lr: float
    """Peak learning rate."""
    drill_share: float
    """Share of the steps that are drills."""
    drill_call_share: float
    """Share of calls and JSON among the drills."""
    call_share: float
    """Share of calls and JSON among the documents after them."""
    tokens_per_step: int


FROM_NOTHING = Schedule(1000, 4e-3, drill_share=0.5, drill_call_share=0.5, call_share=0.5, tokens_per_step=4096)
CONTINUED = Schedule(320, 3e-3, drill_share=0.15, drill_call_share=0.8, call_share=0.65, tokens_per_step=3072)
SAMPLES: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Tell me a story about a fox and a lantern."}],
    [{"role": "user", "content": "Tell me a story about a robot in the library."}],
    [{"role": "system", "content": "You are a storyteller."}, {"role": "user", "content": "Hello!"}],
)


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a Llama of 3.8 million parameters, below 8 MB in bfloat16; its sizes divide by 2 and 4."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=448,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def optimizers(model: LlamaForCausalLM, lr: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices, and AdamW for the rest."""
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
    rest = [p for p in model.parameters() if p.ndim != 2 or p is embedding]
    return [
        Muon(matrices, lr=lr, weight_decay=0.05),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def fast_bf16() -> bool:
    """Return whether this machine multiplies in bfloat16 no slower than in float32."""
    return torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported()


def keep_memory() -> None:
    """Let glibc keep the memory of large tensors: getting it anew from the kernel takes a quarter of each step."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def lr_scale(step: int, steps: int, warmup: int = 40) -> float:
    """Linear warm-up, a plateau, and a linear way down over the last half."""
    if step < warmup:
        return (step + 1) / warmup
    return min(1.0, 2.0 * (steps - step) / steps)


def batches(tokenizer: PreTrainedTokenizerFast, seed: int, schedule: Schedule) -> Iterator[torch.Tensor]:
    """Yield the batches of a schedule: drills first, then short documents, then more and more long ones.

    Only the drills teach the model within minutes to look back and repeat a name; stories teach it too thinly.
    """

    def short_of(seed: int) -> Iterator[Document]:
        return mixed(seed, short_documents(seed), call_documents(seed), schedule.call_share)

    def drills_of(seed: int) -> Iterator[Document]:
        return mixed(seed, drills(seed), call_drills(seed), schedule.drill_call_share)

    drill = rows(tokenizer, drills_of(seed), drills_of(seed + 1), DRILL)
    short = rows(tokenizer, short_of(seed), short_of(seed + 1), SHORT)
    long = rows(tokenizer, long_documents(seed), short_of(seed + 2), LONG)
    due = 0.0
    for step in range(schedule.steps):
        progress = step / schedule.steps
        if progress < schedule.drill_share:
            yield batch_of(drill, DRILL_TOKENS_PER_STEP // DRILL)
            continue
        due += 0.0 if progress < 0.75 else 0.6
        take_long = due >= 1.0
        due -= take_long
        stream, length = (long, LONG) if take_long else (short, SHORT)
        yield batch_of(stream, schedule.tokens_per_step // length)


def mixed(seed: int, first: Iterator[Document], second: Iterator[Document], share: float) -> Iterator[Document]:
    """Yield documents of both kinds; ``share`` is that of the second."""
    rng = random.Random(f"mixed {seed}")
    while True:
        yield next(second if rng.random() < share else first)


def batch_of(stream: Iterator[list[int]], count: int) -> torch.Tensor:
    """Return the next ``count`` rows."""
    return torch.tensor(list(itertools.islice(stream, count)))


def loss_of(model: LlamaForCausalLM, ids: torch.Tensor, *, bf16: bool) -> torch.Tensor:
    """Return the next-token loss over every token that is to be learned, the requests included."""
    labels = torch.where(ids < 0, -100, ids)
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=bf16):
        loss: torch.Tensor = model(input_ids=torch.where(ids < 0, ~ids, ids), labels=labels, use_cache=False).loss
    return loss


def train(
    model: LlamaForCausalLM, stream: Iterator[torch.Tensor], schedule: Schedule, bf16: bool, console: Console
) -> None:
    """Run the training loop behind a progress bar."""
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}, {task.fields[speed]:,.0f} tokens/s,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    chosen = optimizers(model, schedule.lr)
    smooth, tokens, start = math.nan, 0, time.monotonic()
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("train", total=schedule.steps, loss=math.nan, speed=0.0)
        for step, ids in enumerate(stream):
            for optimizer in chosen:
                for group in optimizer.param_groups:
                    group["lr"] = schedule.lr * lr_scale(step, schedule.steps)
            loss = loss_of(model, ids.to(model.device), bf16=bf16)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in chosen:
                optimizer.step()
                optimizer.zero_grad()
            smooth = loss.item() if math.isnan(smooth) else 0.97 * smooth + 0.03 * loss.item()
            tokens += ids.numel()
            speed = tokens / (time.monotonic() - start)
            bar.update(task, advance=1, loss=smooth, speed=speed)
            if (step + 1) % 100 == 0 and not console.is_terminal:
                console.print(f"step {step + 1}/{schedule.steps}  loss {smooth:.3f}  {speed:,.0f} tokens/s")


@torch.inference_mode()
def held_out_loss(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, kind: str) -> float:
    """Return the mean loss on documents of another seed: "short", "long" or "calls"."""
    length = LONG if kind == "long" else SHORT
    seed += HELD_OUT_SEED_OFFSET
    first = {"short": short_documents, "long": long_documents, "calls": call_documents}[kind](seed)
    filler = call_documents if kind == "calls" else short_documents
    stream = rows(tokenizer, first, filler(seed + 1), length)
    count = 16 * SHORT // length
    losses = [loss_of(model, torch.tensor([next(stream)]).to(model.device), bf16=False).item() for _ in range(count)]
    return sum(losses) / len(losses)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write an ordinary Hugging Face directory, its weights in bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.eos_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out, save_jinja_files=False)


@torch.inference_mode()
def show_samples(out: Path, console: Console, seed: int) -> None:
    """Load what was saved, as a user would, and let it speak."""
    model = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out)
    torch.manual_seed(seed)
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in SAMPLES]
    for prompt in (*prompts, tokenizer.bos_token + "Once upon a time"):
        ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
        reply = model.generate(ids, max_new_tokens=300, do_sample=True, temperature=0.8, top_k=0)
        console.rule(prompt, style="dim")
        console.print(tokenizer.decode(reply[0, ids.shape[1] :]), markup=False, highlight=False)


def main() -> None:
    """Make the corpus and tokenizer, train, save, measure and show samples."""
    parser = argparse.ArgumentParser(description="Train the storyteller demo model.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write the model to")
    parser.add_argument(
        "--start", type=Path, help="directory of an earlier model to continue from; default: a new model"
    )
    parser.add_argument("--steps", type=int, help="training steps")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--data-seed", type=int, help="seed of the training's documents; default: --seed")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument(
        "--bf16", action=argparse.BooleanOptionalAction, default=fast_bf16(), help="bfloat16 matrix products"
    )
    args = parser.parse_args()
    keep_memory()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    console = Console()
    start = time.monotonic()
    tokenizer = train_tokenizer(VOCAB_SIZE, args.seed)
    model = build_model(tokenizer).to("cuda" if torch.cuda.is_available() else "cpu")
    console.print(f"{model.num_parameters():,} parameters, {len(tokenizer):,} tokens in the vocabulary")
    if args.start is not None:
        transplant(model, tokenizer, args.start)
    schedule = CONTINUED if args.start is not None else FROM_NOTHING
    schedule = replace(schedule, steps=args.steps or schedule.steps)
    data_seed = args.seed if args.data_seed is None else args.data_seed
    train(model, batches(tokenizer, data_seed, schedule), schedule, args.bf16, console)
    save(model, tokenizer, args.out)
    result = {
        f"loss, {kind}": round(held_out_loss(model.float(), tokenizer, args.seed, kind), 3)
        for kind in ("short", "long", "calls")
    }
    result |= {
        "minutes": round((time.monotonic() - start) / 60, 1),
    }
    console.print("held-out:", json.dumps(result))
    show_samples(args.out, console, args.seed)


if __name__ == "__main__":
    main()
