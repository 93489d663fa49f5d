"""Train the storyteller: a demo model small enough to check in and readable enough to watch.

python examples/storyteller/train.py --out examples/storyteller/model
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from grammar import drills, long_documents, short_documents
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

VOCAB_SIZE = 2048
DRILL, SHORT, LONG = 128, 512, 1024
TOKENS_PER_STEP, DRILL_TOKENS_PER_STEP = 4096, 2048
DRILL_SHARE = 0.5
HELD_OUT_SEED_OFFSET = 1_000_000
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
    """Muon for the matrices, which needs far fewer steps than Adam here, and AdamW for the rest."""
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
    rest = [p for p in model.parameters() if p.ndim != 2 or p is embedding]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def lr_scale(step: int, steps: int, warmup: int = 40) -> float:
    """Linear warm-up, a plateau, and a linear way down over the last half."""
    if step < warmup:
        return (step + 1) / warmup
    return min(1.0, 2.0 * (steps - step) / steps)


def batches(tokenizer: PreTrainedTokenizerFast, seed: int, steps: int) -> Iterator[torch.Tensor]:
    """Yield ``steps`` batches: drills first, then short documents, then more and more long ones.

    Only the drills teach the model within minutes to look back and repeat a name; stories teach it too thinly.
    """
    drill = rows(tokenizer, drills(seed), drills(seed + 1), DRILL)
    short = rows(tokenizer, short_documents(seed), short_documents(seed + 1), SHORT)
    long = rows(tokenizer, long_documents(seed), short_documents(seed + 2), LONG)
    due = 0.0
    for step in range(steps):
        progress = step / steps
        if progress < DRILL_SHARE:
            yield batch_of(drill, DRILL_TOKENS_PER_STEP // DRILL)
            continue
        due += 0.0 if progress < 0.75 else 0.6
        take_long = due >= 1.0
        due -= take_long
        stream, length = (long, LONG) if take_long else (short, SHORT)
        yield batch_of(stream, TOKENS_PER_STEP // length)


def batch_of(stream: Iterator[list[int]], count: int) -> torch.Tensor:
    """Return the next ``count`` rows."""
    return torch.tensor(list(itertools.islice(stream, count)))


def loss_of(model: LlamaForCausalLM, ids: torch.Tensor, *, bf16: bool) -> torch.Tensor:
    """Next-token loss over every token, the requests included."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=bf16):
        loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def train(model: LlamaForCausalLM, stream: Iterator[torch.Tensor], args: argparse.Namespace, console: Console) -> None:
    """Run the training loop behind a progress bar."""
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}, {task.fields[speed]:,.0f} tokens/s,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    chosen = optimizers(model, args.lr)
    smooth, tokens, start = math.nan, 0, time.monotonic()
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("train", total=args.steps, loss=math.nan, speed=0.0)
        for step, ids in enumerate(stream):
            for optimizer in chosen:
                for group in optimizer.param_groups:
                    group["lr"] = args.lr * lr_scale(step, args.steps)
            loss = loss_of(model, ids.to(model.device), bf16=args.bf16)
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
                console.print(f"step {step + 1}/{args.steps}  loss {smooth:.3f}  {speed:,.0f} tokens/s")


@torch.inference_mode()
def held_out_loss(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, *, long: bool) -> float:
    """Mean loss on documents of another seed."""
    length = LONG if long else SHORT
    seed += HELD_OUT_SEED_OFFSET
    stream = rows(tokenizer, (long_documents if long else short_documents)(seed), short_documents(seed + 1), length)
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
    parser.add_argument("--steps", type=int, default=1000, help="training steps")
    parser.add_argument("--lr", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True, help="bfloat16 matrix products")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    console = Console()
    start = time.monotonic()
    tokenizer = train_tokenizer(VOCAB_SIZE, args.seed)
    model = build_model(tokenizer).to("cuda" if torch.cuda.is_available() else "cpu")
    console.print(f"{model.num_parameters():,} parameters, {len(tokenizer):,} tokens in the vocabulary")
    train(model, batches(tokenizer, args.seed, args.steps), args, console)
    save(model, tokenizer, args.out)
    result = {
        "loss": round(held_out_loss(model.float(), tokenizer, args.seed, long=False), 3),
        "loss_long": round(held_out_loss(model, tokenizer, args.seed, long=True), 3),
        "minutes": round((time.monotonic() - start) / 60, 1),
    }
    console.print("held-out:", json.dumps(result))
    show_samples(args.out, console, args.seed)


if __name__ == "__main__":
    main()
