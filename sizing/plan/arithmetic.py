"""A plan's figures with their formulas, to be checked by hand."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sizing.comparison.replay import Setup
from sizing.gpus import COMPUTE, MEMORY, USABLE_MEMORY, Roofline
from sizing.models.model_shape import STATES, ModelShape
from sizing.plan.layouts import NUM_MESSAGES, NUM_MESSAGES_AGGREGATED, TAIL_STEPS, AggregatedPlan, DisaggregatedPlan
from sizing.plan.load import OfferedLoad
from sizing.plan.prompts import PromptQueue
from sizing.plan.search import Option, Plan
from sizing.plan.streams import Streams


@dataclass(frozen=True, slots=True)
class PlanFigure:
    """One figure."""

    what: str
    how: str
    """The formula, with its numbers."""
    value: float
    unit: str


Section = tuple[str, Sequence[PlanFigure]]


def sections(plan: Plan) -> list[Section]:
    """Return all figures, in the order in which one builds on the other."""
    parts: list[Section] = [("model and load", list(_given(plan.setup, plan.load)))]
    if plan.apart is not None and isinstance(plan.apart.model, DisaggregatedPlan):
        model = plan.apart.model
        prefill, decode = plan.apart.scenario.prefill, plan.apart.scenario.decode
        parts.append(
            (
                f"disaggregated: {_many(prefill, 'prefill worker')} of {_worker(model.prefill.line.steps.roofline)}",
                list(_prefill(model)),
            )
        )
        parts.append(
            (
                f"disaggregated: {_many(decode, 'decode worker')} of {_worker(model.decode.streams.roofline)}",
                [*_decode(model), *_bill(plan.apart)],
            )
        )
    if plan.together is not None and isinstance(plan.together.model, AggregatedPlan):
        workers = plan.together.scenario.decode
        name = f"aggregated: {_many(workers, 'worker')} of {_worker(plan.together.model.streams.roofline)}"
        parts.append((name, [*_together(plan.together.model), *_bill(plan.together)]))
    return parts


def _given(setup: Setup, load: OfferedLoad) -> Iterator[PlanFigure]:
    model, outputs = setup.model, load.outputs
    yield PlanFigure("weights", model.weights_in_words, model.weight_bytes / 1e9, "GB")
    if model.undivided:
        how = f"all that the vllm engine takes with {model.undivided}; a larger TP below is arithmetic only"
        yield PlanFigure("GPUs of a worker", how, 1, "")
    if model.kv_bytes_per_token:
        yield PlanFigure("KV of a token", _of_token(model), model.kv_bytes_per_token / 1e3, "kB")
    if state := _states(model):
        yield PlanFigure("state", state, model.state_bytes / 1e6, "MB")
    if drafts := model.draft_bytes_per_token:
        how = f"{_many(model.draft_layers, 'layer')} of the MTP module; not counted below"
        yield PlanFigure("KV of a token where tokens are drafted, besides", how, drafts / 1e3, "kB")
    square = outputs.square
    how = f"prompt {load.prompt:,.0f} + E[output²] / 2 E[output] = {square:,.0f} / {2 * load.output:,.0f}"
    yield PlanFigure("tokens of a stream at any moment", how, load.context, "")
    yield PlanFigure("KV of a sequence", _of_sequence(model, load.context), model.kv_bytes(load.context) / 1e9, "GB")
    computed = load.rate * load.prompt * (1 - load.hit_rate)
    how = f"{load.rate:g} requests/s x {load.prompt:,.0f} x (1 - {load.hit_rate:g} cached)"
    yield PlanFigure("prompt tokens to compute", how, computed, "/s")
    yield PlanFigure("output tokens", f"{load.rate:g} requests/s x {load.output:,.0f}", load.rate * load.output, "/s")


def _prefill(apart: DisaggregatedPlan) -> Iterator[PlanFigure]:
    pool, load, setup = apart.prefill, apart.load, apart.setup
    line = pool.line
    yield from _prompts(line, load, setup.prefill_chunk)
    yield from _wait(line, load, pool.workers)
    kv_bytes = setup.model.loan_bytes(load.prompt)
    use = apart.link_utilisation
    how = f"{kv_bytes / 1e9:.3g} GB / {pool.bytes_per_s / 1e9:g} GB/s / (1 - {use:.3f} of the links in use)"
    yield PlanFigure("transfer of a prompt's KV", how, 1e3 * kv_bytes / pool.bytes_per_s / (1 - use), "ms")
    exposed_ms = 1e3 * load.prompts.mean_of(lambda prompt: pool.exposed_s(prompt, use))
    yield PlanFigure(
        "of it, after the prompt is computed", "the last chunk's, or what the link is behind", exposed_ms, "ms"
    )


def _decode(apart: DisaggregatedPlan) -> Iterator[PlanFigure]:
    pool, load, setup = apart.decode, apart.load, apart.setup
    yield from _memory(pool.streams, load)
    yield _largest(pool.largest_batch, setup)
    yield from _batch(pool.streams, pool.batch, pool.workers, pool.itl_s, load)
    yield PlanFigure("ITL", f"a step of {pool.batch:.1f} streams", 1e3 * pool.itl_s, "ms")
    unqueued_s = load.prompts.mean_of(apart.unqueued_s)
    how = f"{NUM_MESSAGES} messages + wait + prompt + rest of the transfer + {TAIL_STEPS:g} steps of the decode worker"
    yield PlanFigure("TTFT, mean", how, unqueued_s + apart.prefill.line.waiting.mean_of_all_s, "s")
    yield from _kept(
        apart.parts, apart.kept, setup, pool.held(apart.ttft_s), pool.workers * math.floor(pool.streams.fit)
    )


def _together(together: AggregatedPlan) -> Iterator[PlanFigure]:
    load, setup, line = together.load, together.setup, together.line
    yield from _memory(together.streams, load)
    yield _largest(together.streams.largest(setup.slo.itl_s), setup)
    yield from _batch(together.streams, together.batch, together.workers, together.itl_s, load)
    yield from _prompts(line, load, setup.decode_chunk)
    yield from _wait(line, load, together.workers)
    each = together.own_line
    part, each_ms = together.apart_share, 1e3 * each.mean_of_all_s
    how = f"{part:.2f} of the way from that of one line for all to that of one for each, {each_ms:.3g} ms"
    yield PlanFigure("wait, mean of all", how, 1e3 * together.wait_s, "ms")
    alone_s = together.streams.step_s(max(1.0, together.batch))
    rate, busy = load.rate / together.workers, line.busy
    how = (
        f"1 / ({rate:.3g}/s x {line.num_steps:.3g} steps with prompts + (1 - {busy:.3f}) / {1e3 * alone_s:.3g} ms,"
        f" a step of {together.batch:.1f} streams)"
    )
    yield PlanFigure("ITL, mean", how, 1e3 * together.itl_s, "ms")
    how = f"{NUM_MESSAGES_AGGREGATED} messages + wait + half a step + prompt"
    yield PlanFigure("TTFT, mean", how, together.ttft_s, "s")
    yield from _kept(
        together.parts, together.kept, setup, together.held, together.workers * math.floor(together.streams.fit)
    )


def _prompts(line: PromptQueue, load: OfferedLoad, chunk: int) -> Iterator[PlanFigure]:
    steps, roofline = line.steps, line.steps.roofline
    computed, pairs = steps.computed(load.prompt), steps.pairs(load.prompt)
    model = roofline.model
    flop = 2 * model.active_params * computed + model.attention_flops(computed, pairs)
    alone_s, count = steps.alone(load.prompt)
    beside = f", beside {steps.streams:.1f} streams" if steps.streams else ""
    how = (
        f"{flop / 1e12:.3g} TFLOP / ({_flops(roofline)}{_times(roofline)})"
        f" + {math.ceil(count)} steps of at most {chunk} tokens x {1e3 * roofline.step_s:g} ms,"
        f" or longer where memory binds{beside}"
    )
    yield PlanFigure("a prompt alone", how, 1e3 * alone_s, "ms")
    yield PlanFigure(
        "its part of full steps, mean", f"steps of {chunk} tokens, many prompts in each", 1e3 * line.packed_s, "ms"
    )
    rate = line.waiting.utilisation / line.packed_s
    how = f"at least 1, or {rate:.3g}/s come x {1e3 * line.fixed_s:.3g} ms beyond that / (1 - u)"
    yield PlanFigure("prompts that share a step", how, line.together, "")


def _wait(line: PromptQueue, load: OfferedLoad, workers: int) -> Iterator[PlanFigure]:
    wait = line.waiting
    how = f"{load.rate:g}/s x {1e3 * line.packed_s:.3g} ms / {workers}"
    yield PlanFigure("utilisation by prompts (u)", how, 100 * wait.utilisation, "%")
    yield PlanFigure("prompts that wait", f"M/G/{workers}: u^(√(2 x {workers + 1}) - 1)", 100 * wait.share, "%")
    how = f"{1e3 * line.packed_s:.3g} ms x (1 + {line.variation2:.2f}) / 2 / ({workers} x (1 - u))"
    yield PlanFigure("for, in the mean", how, 1e3 * wait.mean_s, "ms")


def _memory(streams: Streams, load: OfferedLoad) -> Iterator[PlanFigure]:
    roofline = streams.roofline
    left = streams.pool_bytes * roofline.copies / 1e9
    memory = f"{roofline.gpus} x {roofline.gpu.memory_bytes / 1e9:g} GB x {USABLE_MEMORY:g}"
    part = f", 1 / {roofline.dp} of the experts" if roofline.dp > 1 else ""
    how = f"{memory} - {roofline.weight_bytes / 1e9:.1f} GB of weights{part}"
    yield PlanFigure("KV pool of a worker", how, left, "GB")
    how = f"{streams.pool_tokens:,} tokens / ({load.context:,.0f} + {streams.block_tokens} / 2)"
    yield PlanFigure("sequences that fit", how, streams.fit, "")


def _largest(batch: float, setup: Setup) -> PlanFigure:
    return PlanFigure("streams by the ITL alone", f"the most whose step takes {1e3 * setup.slo.itl_s:g} ms", batch, "")


def _batch(streams: Streams, batch: float, workers: int, itl_s: float, load: OfferedLoad) -> Iterator[PlanFigure]:
    how = f"Little: {load.rate:g}/s x {load.gaps:,.0f} gaps x {1e3 * itl_s:.3g} ms / {workers}"
    yield PlanFigure("streams of a worker, mean", how, batch, "")
    roofline = streams.roofline
    bytes_read = roofline.model.weight_bytes_read(max(1, round(batch)) / roofline.pp, roofline.dp)
    kv = max(1.0, batch) * roofline.model.kv_bytes(load.context) * roofline.copies
    how = (
        f"({bytes_read / 1e9:.1f} GB of weights + {kv / 1e9:.1f} GB of KV{_stages(roofline)})"
        f" / ({_bandwidth(roofline)}) + {1e3 * roofline.step_s:g} ms, or arithmetic where it takes longer"
    )
    yield PlanFigure("a step of so many", how, 1e3 * streams.step_s(max(1.0, batch)), "ms")
    how = f"√({batch:.1f} / {workers} x (1 + variation² of KV) / (1 - B T´(B) / T(B)))"
    swing = streams.swing(batch)
    yield PlanFigure("batches vary by, standard deviation", how, math.sqrt(batch * swing / workers), "")


def _kept(parts: dict[str, float], kept: float, setup: Setup, held: float, fit: int) -> Iterator[PlanFigure]:
    slo = setup.slo
    yield PlanFigure(
        "keep the TTFT", f"P(wait <= {slo.ttft_s:g} s - the rest), mean over prompts", 100 * parts["ttft"], "%"
    )
    yield PlanFigure("keep the ITL", f"P(mean of a request <= {1e3 * slo.itl_s:g} ms)", 100 * parts["itl"], "%")
    how = f"P({held:.1f} in the mean, by Little, and as they vary, within the {fit} that fit)"
    yield PlanFigure("find room at once", how, 100 * parts["memory"], "%")
    yield PlanFigure("keep the SLO", "all three", 100 * kept, "%")


def _bill(option: Option) -> Iterator[PlanFigure]:
    scenario, setup = option.scenario, option.setup
    counts = []
    for role, count in (("prefill", scenario.prefill), ("decode", scenario.decode)):
        if count:
            gpu, gpus = setup.hardware("prefill" if role == "prefill" else "decode", scenario.apart)
            counts.append(f"{count} x {gpus} {gpu.name} x {setup.price_of(gpu):g} USD")
    yield PlanFigure("cost", " + ".join(counts), option.usd_per_hour, "USD/h")
    load = option.model.load
    how = f"{option.usd_per_hour:g} USD/h / ({load.rate * load.output:,.0f} output tokens/s x 3600 s)"
    yield PlanFigure("cost of a million output tokens", how, option.usd_per_million, "USD")


def _of_token(model: ModelShape) -> str:
    layers = sum(group.layers for group in model.groups if group.token_elements)
    if model.latent:
        elements = max(group.token_elements for group in model.groups)
        return f"{layers} layers x {elements} elements, which all heads share (MLA), x {model.kv_dtype_bytes} B"
    return f"2 x {layers} layers x {model.kv_heads} KV heads x {model.head_dim} x {model.kv_dtype_bytes} B"


def _states(model: ModelShape) -> str:
    dtype = model.kv_dtype_bytes
    groups = (group for group in model.groups if not group.token_elements)
    return " + ".join(f"{group.layers} layers x {group.state_bytes(dtype) / 1e3:,.1f} kB" for group in groups)


def _of_sequence(model: ModelShape, tokens: float) -> str:
    if model.is_uniform:
        return f"{tokens:,.0f} x {model.kv_bytes_per_token / 1e3:.1f} kB"
    parts = [
        f"{group.layers} layers x {group.tokens(tokens):,.0f} tokens x"
        f" {group.token_elements * model.kv_dtype_bytes / 1e3:.1f} kB"
        for group in model.groups
        if group.token_elements
    ]
    states = [f"{STATES} states x {model.state_bytes / 1e6:,.1f} MB"] if model.state_bytes else []
    return " + ".join([*parts, *states])


def _flops(roofline: Roofline) -> str:
    return f"{roofline.gpu.flops / 1e12:g} TFLOP/s x {COMPUTE:g}{_tp(roofline)}"


def _bandwidth(roofline: Roofline) -> str:
    return f"{roofline.gpu.bytes_per_s / 1e12:g} TB/s x {MEMORY:g}{_tp(roofline)}"


def _tp(roofline: Roofline) -> str:
    return f" x {roofline.effective_gpus:.3g} for TP {roofline.tp}" if roofline.tp > 1 else ""


def _times(roofline: Roofline) -> str:
    return f" x {roofline.pp} stages" if roofline.pp > 1 else ""


def _stages(roofline: Roofline) -> str:
    return f" / {roofline.pp} stages" if roofline.pp > 1 else ""


def _worker(roofline: Roofline) -> str:
    parts = [f"PP {roofline.pp} x TP {roofline.tp}"] if roofline.pp > 1 else []
    parts += [f"groups of {roofline.dp} with expert parallelism"] if roofline.dp > 1 else []
    return f"{roofline.gpus} {roofline.gpu.name}" + (f" ({', '.join(parts)})" if parts else "")


def _many(count: int, what: str) -> str:
    return f"{count} {what}" + ("s" if count != 1 else "")
