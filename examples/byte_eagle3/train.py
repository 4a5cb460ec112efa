"""Train the byte-level Gemma 3 target, then its EAGLE-3 drafter, on the documentation that ships with Python.

    python examples/byte_eagle3/train.py

The text is `pydoc_data.topics` and the docstrings of the standard library, so it depends on Python's version; seeds are
fixed. Writes target/, drafter/ (weights in bf16) and prompts.json (beginnings of held-out texts), here or into --out.
"""

import argparse
import ast
import contextlib
import json
import platform
import random
import sysconfig
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from eagle_kernels.byte_eagle3.drafter import DraftLayer, TrainableInputStage
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig

import eagle_kernels as ek
from eagle_kernels.engines.transformers import capture

BOS = 128  # one token added to the 128 ASCII bytes: the vocabulary that slicing by ceil(V / tp) gets wrong
LENGTH, BATCH = 256, 8
LAYER_IDS = [1, 3, 5]
DRAFTS = 4
PROMPTS, PROMPT_BYTES = 6, 64
TARGET = Gemma3TextConfig(
    vocab_size=BOS + 1,
    bos_token_id=BOS,
    eos_token_id=None,
    pad_token_id=0,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    query_pre_attn_scalar=32,
    sliding_window=64,
    max_position_embeddings=1024,
)


def read_texts() -> list[str]:
    """Every topic of the language reference and every docstring of the library, in a fixed shuffled order."""
    texts = [topics[name] for name in sorted(topics)]
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data"} & set(path.parts):
            continue
        with contextlib.suppress(SyntaxError, UnicodeDecodeError):
            nodes = ast.walk(ast.parse(path.read_text("utf-8")))
            documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
            texts += filter(None, (ast.get_docstring(node) for node in nodes if isinstance(node, documented)))
    texts = sorted({text for text in texts if len(text) > 80})
    random.Random(0).shuffle(texts)
    return texts


def encode(text: str) -> list[int]:
    return [BOS, *text.encode("ascii", "ignore")]


def batches(texts: list[str], steps: int, seed: int) -> Iterator[Tensor]:
    """[BATCH, LENGTH] windows of the joined texts at random places."""
    ids = torch.tensor([token for text in texts for token in encode(text)])
    places = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        begins = torch.randint(len(ids) - LENGTH, (BATCH, 1), generator=places)
        windows = ids[begins + torch.arange(LENGTH)]
        windows[:, 0] = BOS
        yield windows


def target_loss(model: Gemma3ForCausalLM, ids: Tensor) -> Tensor:
    logits = model(ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class DrafterLoss:
    """Cross-entropy to the target's distribution over DRAFTS chained drafts from every position at once.

    In draft j the row of position i continues the chain that began at position i - j: it takes over the hidden state
    that row i - 1 had in draft j - 1, and sees the keys of the target's states up to i - j and those of its own chain.
    """

    def __init__(self, target: Gemma3ForCausalLM, stage: TrainableInputStage, layer: DraftLayer) -> None:
        self.target, self.stage, self.layer = target, stage, layer
        config = target.config
        self.boundaries = ek.capture_layers(config.model_type, config.num_hidden_layers, LAYER_IDS)
        self.buffer = ek.AuxHiddenStates(BATCH * LENGTH, len(LAYER_IDS), config.hidden_size, dtype=torch.float32)

    def __call__(self, ids: Tensor) -> Tensor:
        with torch.no_grad(), capture(self.target, self.boundaries, self.buffer):
            truth = self.target(ids, use_cache=False).logits[:, 1:].softmax(-1)
            embeds = F.embedding(ids, self.target.model.embed_tokens.weight)[:, 1:]
        rows = LENGTH - 1
        positions = torch.arange(rows)[None]
        hidden = self.stage(self.buffer.packed(ids.numel())).view(*ids.shape, -1)[:, :-1]
        masks: list[Tensor] = []
        cache, total = DynamicCache(), torch.zeros(())
        for j in range(DRAFTS):
            if j:
                hidden = hidden.roll(1, dims=1)
                masks = [mask.roll(1, dims=0) for mask in masks]
            masks.append(torch.eye(rows).bool() if j else torch.ones(rows, rows).tril().bool())
            normed, hidden = self.layer(hidden, embeds, positions, cache, torch.cat(masks, 1))
            logits = F.linear(normed, self.target.lm_head.weight)
            # roll() gave the first j rows the states of the last ones: no chain begins before position 0.
            total = total + F.cross_entropy(logits[:, j:].flatten(0, 1), truth[:, j:].flatten(0, 1))
        return total / DRAFTS


def train(
    name: str, module: nn.Module, loss_of: Callable[[Tensor], Tensor], data: Iterator[Tensor], steps: int, lr: float
) -> None:
    optimizer = torch.optim.AdamW(module.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.05)
    start = time.perf_counter()
    for step, ids in enumerate(data, 1):
        loss = loss_of(ids)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps:
            seconds = time.perf_counter() - start
            print(f"{name} step {step} of {steps}: loss {loss.item():.3f}, {seconds:.0f} s", flush=True)


@torch.no_grad()
def print_held_out(name: str, loss_of: Callable[[Tensor], Tensor], held_out: list[str]) -> None:
    losses = [loss_of(ids).item() for ids in batches(held_out, 16, seed=3)]
    print(f"{name}: held-out loss {sum(losses) / len(losses):.3f} nats per byte")


def save(folder: Path, tensors: dict[str, Tensor], config: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def train_target(out: Path, texts: list[str], held_out: list[str], steps: int) -> None:
    target = Gemma3ForCausalLM(TARGET)
    print(f"target: {sum(weight.numel() for weight in target.parameters()) / 1e6:.2f} M parameters")
    train("target", target, partial(target_loss, target), batches(texts, steps, seed=1), steps, 3e-3)
    print_held_out("target", partial(target_loss, target), held_out)
    tensors = target.state_dict()
    del tensors["lm_head.weight"]  # tied to the embedding
    save(out / "target", tensors, target.config.to_diff_dict())


def train_drafter(out: Path, texts: list[str], held_out: list[str], steps: int) -> None:
    torch.manual_seed(0)  # the same drafter whether or not the target was trained just before
    # From the file, so that the drafter learns from the target that ships, rounded to bf16.
    target = Gemma3ForCausalLM.from_pretrained(out / "target", dtype=torch.float32).requires_grad_(False).eval()
    stage, layer = TrainableInputStage(len(LAYER_IDS), target.config), DraftLayer(target.config)
    both = nn.ModuleList([stage, layer])
    print(f"drafter: {sum(weight.numel() for weight in both.parameters()) / 1e6:.2f} M parameters")
    loss = DrafterLoss(target, stage, layer)
    train("drafter", both, loss, batches(texts, steps, seed=2), steps, 2e-3)
    print_held_out("drafter", loss, held_out)
    tensors = stage.state_dict() | {f"midlayer.{name}": tensor for name, tensor in layer.state_dict().items()}
    config = {
        "hidden_size": target.config.hidden_size,
        "rms_norm_eps": target.config.rms_norm_eps,
        "fc_norm": True,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": LAYER_IDS},
    }
    save(out / "drafter", tensors, config)


@torch.inference_mode()
def write_prompts(out: Path, held_out: list[str]) -> None:
    """Write the first held-out texts that the target continues with words: in blank lines every draft is accepted."""
    target = Gemma3ForCausalLM.from_pretrained(out / "target", dtype=torch.float32).eval()
    prompts: list[str] = []
    for text in held_out:
        prompt = encode(text)[: PROMPT_BYTES + 1]
        ids = torch.tensor([prompt])
        continuation = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=96, do_sample=False)
        if len(continuation[0, len(prompt) :].unique()) >= 15:
            prompts.append(bytes(prompt[1:]).decode())
        if len(prompts) == PROMPTS:
            break
    (out / "prompts.json").write_text(json.dumps(prompts, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target-steps", type=int, default=2800, help="0 keeps the target that is there")
    parser.add_argument("--drafter-steps", type=int, default=1500)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent, help="folder to write")
    arguments = parser.parse_args()
    start = time.perf_counter()
    torch.manual_seed(0)
    texts = read_texts()
    held_out, texts = texts[: len(texts) // 50], texts[len(texts) // 50 :]
    print(f"{sum(map(len, texts)) / 1e6:.2f} MB in {len(texts)} texts, Python {platform.python_version()}")
    if arguments.target_steps:
        train_target(arguments.out, texts, held_out, arguments.target_steps)
    train_drafter(arguments.out, texts, held_out, arguments.drafter_steps)
    write_prompts(arguments.out, held_out)
    elapsed, cpu = (time.perf_counter() - start) / 60, time.process_time() / 60
    print(f"{elapsed:.1f} minutes, {cpu:.1f} of CPU time, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
