"""Train a tiny model that reads pictures of shapes, with vLLM's environment, on one core.

.venv-vllm/bin/python examples/shapes/train.py
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from pictures import COLOURS, OTHERS, SHAPES, Figure, Question, Scene, draw, questions, scene
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.nn import functional
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

HERE = Path(__file__).parent
SIDE, PATCH = 56, 8
IMAGE_TOKENS = (SIDE // PATCH) ** 2
MEAN, STD = 0.5, 0.5
CONTEXT = 1024
BEGIN, END, PAD, IMAGE, USER, ASSISTANT = "<|begin|>", "<|end|>", "<|pad|>", "<image>", "<|user|>", "<|assistant|>"
SPECIAL = (BEGIN, END, PAD, IMAGE, USER, ASSISTANT)
VOCABULARY = 448
BATCH, WARM_UP = 32, 30
MUON_LR, ADAM_LR = 1e-2, 3e-3
ENCODER_SHARE = 0.4
"""Share of the steps that train the encoder alone: what each patch shows teaches it far faster than answers do."""
OTHER_QUESTIONS = 2
IMAGE_LAST = 0.2
"""Share of the pictures that stand after the question."""
SIZES = (len(SHAPES), len(COLOURS))
PATCH_WEIGHT = 0.3
"""Weight of the patches' loss beside that of the answers."""
HELD_OUT = 1_000_000
"""Distance of the held-out pictures' seed."""
HELD_OUT_PICTURES = 300
SAMPLES = (
    Scene((Figure("circle", "red", 0.45, 0.55, 0.35, 0),)),
    Scene((Figure("triangle", "purple", 0.6, 0.5, 0.3, 4),)),
    Scene((Figure("star", "green", 0.26, 0.4, 0.22, -5), Figure("square", "orange", 0.74, 0.6, 0.2, 6))),
)
TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] not in ['user', 'assistant'] -%}
{{- raise_exception('roles are user and assistant, not ' + message['role']) -}}
{%- endif -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['content'] is string -%}
{{- message['content'] | trim -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{- '<image>' -}}
{%- elif part['type'] == 'text' -%}{{- part['text'] | trim -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""


def train_tokenizer() -> Tokenizer:
    """Return byte-level BPE in which each word of the questions and answers is a token."""
    rng = random.Random(0)
    asked = [question for _ in range(4000) for question in questions(scene(rng), rng, len(OTHERS))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for each in asked for text in (each.text, each.answer)), trainer)
    return tokenizer


def build_model(tokenizer: Tokenizer) -> LlavaForConditionalGeneration:
    """Return a LLaVA of 1.2 million parameters: CLIP's encoder of pictures, and a Llama."""
    ids = {name: tokenizer.token_to_id(token) for name, token in (("bos", BEGIN), ("eos", END), ("pad", PAD))}
    special = {f"{name}_token_id": number for name, number in ids.items()}
    vision = CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=128,
        initializer_range=0.05,
    )
    text = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        initializer_range=0.05,
        **special,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.token_to_id(IMAGE),
        vision_feature_layer=-1,
        image_seq_length=IMAGE_TOKENS,
        tie_word_embeddings=False,
        **special,
    )
    model = LlavaForConditionalGeneration(config)
    # CLIP's own, of 0.02, are lost beside the patches, and shapes are learned later
    nn.init.normal_(model.model.vision_tower.embeddings.position_embedding.weight, std=0.5)
    return model


def pixels(picture: Image.Image) -> torch.Tensor:
    """Return a picture as the model reads it."""
    small = picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    values = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8).view(SIDE, SIDE, 3).permute(2, 0, 1)
    return (values / 255 - MEAN) / STD


def chat_ids(tokenizer: Tokenizer, turns: list[Question], image_last: bool) -> tuple[list[int], list[int]]:
    """Return the tokens of a chat about a picture, and those that are to be learned, -100 in place of the others."""
    ids, labels = [tokenizer.token_to_id(BEGIN)], [-100]
    for number, turn in enumerate(turns):
        shown = IMAGE * IMAGE_TOKENS if number == 0 else ""
        asked = f"{USER}{turn.text}{shown}" if image_last else f"{USER}{shown}{turn.text}"
        prompt = tokenizer.encode(f"{asked}{END}{ASSISTANT}").ids
        answer = tokenizer.encode(f"{turn.answer}{END}").ids
        ids += prompt + answer
        labels += [-100] * len(prompt) + answer
    return ids, labels


def patch_labels(shown: Scene) -> list[tuple[int, int]]:
    """Return the shape and the colour of the figure at each patch, counted from 1; 0 where there is none."""
    labels = []
    for patch in range(IMAGE_TOKENS):
        row, column = divmod(patch, SIDE // PATCH)
        x, y = (column + 0.5) * PATCH / SIDE, (row + 0.5) * PATCH / SIDE
        figures = [each for each in shown.figures if (each.x - x) ** 2 + (each.y - y) ** 2 < each.radius**2]
        found = [(1 + SHAPES.index(each.shape), 1 + list(COLOURS).index(each.colour)) for each in figures]
        labels.append(found[0] if found else (0, 0))
    return labels


@dataclass(frozen=True)
class Batch:
    """Inputs of one training step."""

    pixels: torch.Tensor
    patches: torch.Tensor
    """Shape and colour at each patch, [picture, patch, 2]."""
    ids: torch.Tensor
    labels: torch.Tensor
    """Tokens to be learned, -100 elsewhere."""


def batch(tokenizer: Tokenizer, rng: random.Random) -> Batch:
    """Return the inputs of the next step."""
    scenes = [scene(rng) for _ in range(BATCH)]
    chats = [chat_ids(tokenizer, questions(shown, rng, OTHER_QUESTIONS), rng.random() < IMAGE_LAST) for shown in scenes]
    length = max(len(ids) for ids, _ in chats)
    pad = tokenizer.token_to_id(PAD)
    return Batch(
        torch.stack([pixels(draw(shown, rng)) for shown in scenes]),
        torch.tensor([patch_labels(shown) for shown in scenes]),
        torch.tensor([ids + [pad] * (length - len(ids)) for ids, _ in chats]),
        torch.tensor([labels + [-100] * (length - len(labels)) for _, labels in chats]),
    )


class Losses(nn.Module):
    """Losses of the answers, and of what a linear layer reads from each patch's token."""

    def __init__(self, model: LlavaForConditionalGeneration) -> None:
        """Add the layer, which is not part of the model."""
        super().__init__()
        self.model = model
        self.heads = nn.ModuleList(nn.Linear(model.config.text_config.hidden_size, 1 + size) for size in SIZES)

    def of_patches(self, inputs: Batch) -> torch.Tensor:
        """Return the loss of the encoder alone."""
        return self._of_features(self._encode(inputs), inputs)

    def of_answers(self, inputs: Batch) -> torch.Tensor:
        """Return both losses together."""
        features = self._encode(inputs)
        embeddings = self.model.get_input_embeddings()(inputs.ids)
        places = (inputs.ids == self.model.config.image_token_id)[..., None].expand_as(embeddings)
        embeddings = embeddings.masked_scatter(places, features.to(embeddings.dtype))
        hidden = self.model.model.language_model(inputs_embeds=embeddings).last_hidden_state[:, :-1]
        labels = inputs.labels[:, 1:]
        learned = labels != -100
        answers = functional.cross_entropy(self.model.lm_head(hidden[learned]).float(), labels[learned])
        return answers + PATCH_WEIGHT * self._of_features(features, inputs)

    def _encode(self, inputs: Batch) -> torch.Tensor:
        encoded = self.model.model.vision_tower(inputs.pixels).last_hidden_state[:, 1:]
        features: torch.Tensor = self.model.model.multi_modal_projector(encoded)
        return features

    def _of_features(self, features: torch.Tensor, inputs: Batch) -> torch.Tensor:
        losses = [
            functional.cross_entropy(head(features).float().flatten(0, 1), inputs.patches[..., number].flatten())
            for number, head in enumerate(self.heads)
        ]
        return torch.stack(losses).sum()


def optimizers(losses: Losses) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of all layers, and AdamW for the rest."""
    matrices = [
        weight
        for name, weight in losses.model.named_parameters()
        if weight.ndim == 2 and not any(part in name for part in ("embed", "lm_head"))
    ]
    chosen = set(map(id, matrices))
    rest = [weight for weight in losses.parameters() if id(weight) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=ADAM_LR, betas=(0.9, 0.98), weight_decay=0.02),
    ]


def train(model: LlavaForConditionalGeneration, tokenizer: Tokenizer, steps: int, seed: int) -> None:
    """Train the encoder, then the encoder and the language model together."""
    rng = random.Random(seed)
    losses = Losses(model)
    pairs = [(optimizer, optimizer.param_groups[0]["lr"]) for optimizer in optimizers(losses)]
    first = int(ENCODER_SHARE * steps)
    for phase, loss_of, count in (("encoder", losses.of_patches, first), ("all", losses.of_answers, steps - first)):
        start, mean = time.monotonic(), 0.0
        for step in range(count):
            scale = min((step + 1) / WARM_UP, 1.0, 2 * (count - step) / count)
            for optimizer, peak in pairs:
                optimizer.param_groups[0]["lr"] = peak * scale
            with torch.autocast("cpu", torch.bfloat16, enabled=torch.cpu._is_avx512_bf16_supported()):
                loss = loss_of(batch(tokenizer, rng))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(losses.parameters(), 1.0)
            for optimizer, _ in pairs:
                optimizer.step()
                optimizer.zero_grad()
            mean = loss.item() if step == 0 else 0.95 * mean + 0.05 * loss.item()
            if (step + 1) % 50 == 0:
                seconds = time.monotonic() - start
                print(f"{phase}: step {step + 1} of {count}, loss {mean:.3f}, {seconds:.0f} s", flush=True)


@torch.inference_mode()
def accuracy(
    model: LlavaForConditionalGeneration, tokenizer: Tokenizer, seed: int, count: int = 300
) -> dict[str, float]:
    """Return the share of right answers to each kind of question, about pictures of another seed."""
    rng = random.Random(seed + HELD_OUT)
    right: dict[str, list[bool]] = {}
    for _ in range(HELD_OUT_PICTURES):
        shown = scene(rng)
        picture = pixels(draw(shown, rng))[None].to(model.dtype)
        for question in questions(shown, rng, len(OTHERS)):
            kind = question_kind(question, shown)
            right.setdefault(kind, []).append(answer(model, tokenizer, picture, question.text) == question.answer)
    return {kind: round(sum(each) / len(each), 3) for kind, each in sorted(right.items())}


def question_kind(question: Question, shown: Scene) -> str:
    """Return under which name a question is counted: descriptions by their number of shapes, the others together."""
    is_whole = question.answer.rstrip(".").lower() == shown.description
    return f"{len(shown.figures)} described" if is_whole else "other questions"


def answer(model: LlavaForConditionalGeneration, tokenizer: Tokenizer, picture: torch.Tensor, question: str) -> str:
    """Return the model's answer to one question, greedy."""
    text = f"{BEGIN}{USER}{IMAGE * IMAGE_TOKENS}{question}{END}{ASSISTANT}"
    ids = torch.tensor([tokenizer.encode(text).ids])
    mask = torch.ones_like(ids)
    made = model.generate(input_ids=ids, attention_mask=mask, pixel_values=picture, max_new_tokens=24, do_sample=False)
    found: str = tokenizer.decode(made[0, ids.shape[1] :].tolist())
    return found


def save(model: LlavaForConditionalGeneration, tokenizer: Tokenizer, out: Path) -> None:
    """Write an ordinary Hugging Face directory, its weights named as published models name them."""
    model.save_pretrained(out)
    file = out / "model.safetensors"
    save_file({_published(name): weight for name, weight in load_file(file).items()}, file, {"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(TEMPLATE)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [IMAGE, USER, ASSISTANT],
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
    }
    size = {"height": SIDE, "width": SIDE}
    image_processor = {
        "image_processor_type": "CLIPImageProcessor",
        "processor_class": "LlavaProcessor",
        "size": size,
        "crop_size": size,
        **dict.fromkeys(("do_center_crop", "do_normalize", "do_resize", "do_rescale", "do_convert_rgb"), True),
        "resample": Image.Resampling.BICUBIC,
        "rescale_factor": 1 / 255,
        "image_mean": [MEAN] * 3,
        "image_std": [STD] * 3,
    }
    processor = {
        "processor_class": "LlavaProcessor",
        "image_token": IMAGE,
        "patch_size": PATCH,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    files = {"tokenizer": config, "preprocessor": image_processor, "processor": processor}
    for name, content in files.items():
        (out / f"{name}_config.json").write_text(json.dumps(content, indent=2) + "\n")


def _published(name: str) -> str:
    """Return a weight's name in published models, which vLLM reads."""
    prefix = "vision_tower."
    return f"{prefix}vision_model.{name.removeprefix(prefix)}" if name.startswith(prefix) else name


def write_samples(out: Path) -> None:
    """Write a few pictures, each named after what it shows."""
    out.mkdir(exist_ok=True)
    for shown in SAMPLES:
        picture = draw(shown, random.Random(HELD_OUT), 128)
        picture.save(out / f"{shown.description.replace(' ', '-')}.png", optimize=True)


def main() -> None:
    """Train, save, and measure what was saved."""
    parser = argparse.ArgumentParser(description="Train a tiny model that reads pictures of shapes.")
    parser.add_argument("--out", type=Path, default=HERE / "model", help="directory to write the model to")
    parser.add_argument("--steps", type=int, default=1200, help="training steps")
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tokenizer = train_tokenizer()
    model = build_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {tokenizer.get_vocab_size()} tokens")
    start = time.monotonic()
    train(model, tokenizer, args.steps, args.seed)
    model = model.eval().to(torch.bfloat16)
    save(model, tokenizer, args.out)
    write_samples(args.out.parent / "samples")
    print(f"{(time.monotonic() - start) / 60:.1f} minutes; held out: {accuracy(model, tokenizer, args.seed)}")


if __name__ == "__main__":
    main()
