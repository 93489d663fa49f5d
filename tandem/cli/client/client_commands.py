"""Commands that call a router: for text, and for information."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.common import INSPECT, USE, Model, OfModel, asking, console, out_file, run, run_cluster

if TYPE_CHECKING:
    from tandem.client import Target

app = typer.Typer()
MaxTokens = Annotated[int | None, typer.Option(help="largest number of tokens to generate")]
Temperature = Annotated[float | None, typer.Option(help="sampling temperature; 0 is greedy")]
TopP = Annotated[
    float | None, typer.Option(help="nucleus sampling: keep the likeliest tokens up to this cumulative probability")
]
TopK = Annotated[int | None, typer.Option(help="number of likeliest tokens to sample from; 0 keeps all")]
Seed = Annotated[int | None, typer.Option(help="seed of the sampling; the same seed gives the same text")]
Stop = Annotated[list[str] | None, typer.Option(help="stop before this string; may be repeated")]
MinP = Annotated[
    float | None, typer.Option(help="keep tokens at least this likely, as a share of the likeliest token's probability")
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="penalty for tokens of prompt and output; above 1 repeats less")
]
PresencePenalty = Annotated[
    float | None, typer.Option(help="penalty for tokens that are already in the output; above 0 repeats less")
]
FrequencyPenalty = Annotated[
    float | None, typer.Option(help="penalty for each time the output has a token; above 0 repeats less")
]
LogitBias = Annotated[
    list[str] | None, typer.Option(metavar="TOKEN=BIAS", help="number added to a token's logit; may be repeated")
]
MinTokens = Annotated[int | None, typer.Option(help="smallest number of tokens to generate")]
StopTokenId = Annotated[list[int] | None, typer.Option(help="stop after this token; may be repeated")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="continue after the model's end token")]
Logprobs = Annotated[int | None, typer.Option(help="show log probabilities, and those of this many likeliest tokens")]
PromptLogprobs = Annotated[
    int | None,
    typer.Option(help="show log probabilities of the prompt's tokens, and those of this many likeliest tokens"),
]
Choices = Annotated[int | None, typer.Option("--n", help="number of completions")]
STRUCTURED = "Structured output (one of)"
JsonSchema = Annotated[
    str | None,
    typer.Option(metavar="SCHEMA|@FILE", help="JSON schema that the output follows", rich_help_panel=STRUCTURED),
]
JsonObject = Annotated[bool, typer.Option("--json", help="make the output any JSON object", rich_help_panel=STRUCTURED)]
Regex = Annotated[
    str | None, typer.Option(help="regular expression that the output matches", rich_help_panel=STRUCTURED)
]
Grammar = Annotated[
    str | None,
    typer.Option(metavar="LARK|@FILE", help="Lark grammar that the output follows", rich_help_panel=STRUCTURED),
]
Choice = Annotated[
    list[str] | None,
    typer.Option(help="text that the output may be; repeat for each choice", rich_help_panel=STRUCTURED),
]
Task = Annotated[
    str, typer.Option(help="task that a model must have in its settings, with --model auto", rich_help_panel=OfModel)
]
MinQuality = Annotated[
    float, typer.Option(help="smallest quality of the chosen model, 0 to 1", rich_help_panel=OfModel)
]
MaxTtft = Annotated[
    float | None, typer.Option(help="time limit for the first token, in milliseconds", rich_help_panel=OfModel)
]
Image = Annotated[list[str] | None, typer.Option(metavar="FILE|URL", help="picture; may be repeated")]
ShowReceipt = Annotated[bool, typer.Option("--receipt", help="show where the KV came from and where the time went")]


@app.command(rich_help_panel=USE)
@asking
def generate(
    target: "Target",
    prompt: Annotated[str, typer.Argument(help="text to continue")],
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    presence_penalty: PresencePenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    logit_bias: LogitBias = None,
    stop: Stop = None,
    stop_token_id: StopTokenId = None,
    min_tokens: MinTokens = None,
    ignore_eos: IgnoreEos = False,
    logprobs: Logprobs = None,
    prompt_logprobs: PromptLogprobs = None,
    n: Choices = None,
    json_schema: JsonSchema = None,
    json_object: JsonObject = False,
    regex: Regex = None,
    grammar: Grammar = None,
    choice: Choice = None,
    model: Model = "",
    task: Task = "",
    min_quality: MinQuality = 0.0,
    max_ttft_ms: MaxTtft = None,
    image: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE|URL", help="picture for a placeholder in the text, such as <image>; one for each"),
    ] = None,
    receipt: ShowReceipt = False,
) -> None:
    """Continue a text; tokens appear as they are sampled."""
    from tandem.cli.client.chat import make_sampling, make_structured, parse_logit_bias, stream_text
    from tandem.client.options import picture

    structured = make_structured(
        json_schema=json_schema, json_object=json_object or None, regex=regex, grammar=grammar, choice=choice or None
    )
    sampling = make_sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=parse_logit_bias(logit_bias),
        stop=stop,
        stop_token_ids=stop_token_id,
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        n=n,
        structured=structured,
    )
    options = {"model": model, "task": task, "min_quality": min_quality, "max_ttft_ms": max_ttft_ms}
    options |= {"media": [picture(each) for each in image]} if image else {}
    run(stream_text(console, target, prompt, sampling, receipt, **options))


@app.command(rich_help_panel=INSPECT)
@asking
def explain(
    target: "Target",
    prompt: Annotated[str | None, typer.Argument(help="text to continue")] = None,
    request_id: Annotated[
        str | None,
        typer.Option(
            "--request", metavar="ID", help="id of a past request: show how it was placed, instead of a prompt"
        ),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="file of records, a router's records_file, in which --request is looked up",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    max_tokens: MaxTokens = None,
    most: Annotated[int, typer.Option(help="number of candidates to show, the cheapest first", min=1)] = 10,
    model: Model = "",
    task: Task = "",
    min_quality: MinQuality = 0.0,
    max_ttft_ms: MaxTtft = None,
    session_id: Annotated[str, typer.Option(help="session whose last workers are preferred")] = "",
) -> None:
    """Show which model and workers a request would get now, with the predicted cost of each candidate.

    Nothing is started. With --request: how a recent request was placed, the candidates then, and the outcome.
    """
    from tandem.cli.client.chat import make_sampling
    from tandem.cli.client.explain import show_decisions, show_explanation

    if (prompt is None) == (request_id is None):
        raise typer.BadParameter("give either a prompt or --request")
    if prompt is None:
        run(show_decisions(console, target, request_id or "", most, log))
        return
    options = {"model": model, "task": task, "min_quality": min_quality, "max_ttft_ms": max_ttft_ms}
    options["session_id"] = session_id
    run(show_explanation(console, target, prompt, make_sampling(max_tokens=max_tokens), most, **options))


@app.command(rich_help_panel=USE)
@asking
def chat(
    target: "Target",
    system: Annotated[str, typer.Option(help="system message")] = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    model: Model = "",
    image: Image = None,
    receipt: ShowReceipt = False,
) -> None:
    """Talk with the model; an empty line or Ctrl-D ends it."""
    from tandem.cli.client.chat import chat_loop, make_sampling

    sampling = make_sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    run(chat_loop(console, target, system, sampling, receipt, model, image or ()))


@app.command(rich_help_panel=USE)
@asking
def batch(
    target: "Target",
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN.jsonl", help="file with a GenerateRequest as JSON on each line (fields: docs/grpc.md)"
        ),
    ],
    out: Annotated[
        Path,
        out_file("--out", "-o", metavar="OUT.jsonl", help="file for the answers, in the order in which they end"),
    ],
    concurrency: Annotated[int, typer.Option(help="number of requests at a time", min=1)] = 32,
    timeout: Annotated[float, typer.Option(help="deadline of each request, in seconds")] = 600.0,
    priority: Annotated[
        int, typer.Option(help="priority of lines without one; below 0 leaves room for other requests")
    ] = -1,
    receipts: Annotated[bool, typer.Option("--receipts", help="write receipts too")] = False,
    up: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="file of a cluster to start for the batch, as by `tandem up --config FILE`, and to stop after it",
        ),
    ] = None,
) -> None:
    """Process a file of prompts.

    If it was interrupted or prompts failed, run it again: it processes only those.

    `ray job submit --working-dir . -- tandem batch IN.jsonl -o OUT.jsonl --up cluster.yaml` needs no running cluster.

    Exit code: 1 if prompts failed.
    """
    from tandem.cli.client.batch import BatchOutcome, check_names, run_batch

    outcome: BatchOutcome | None = None

    async def work(addresses: list[str]) -> None:
        nonlocal outcome
        router = dataclasses.replace(target, address=",".join(addresses))
        outcome = await run_batch(console, router, source, out, concurrency, timeout, priority, receipts)

    if up is None:
        run(work([target.address]))
    else:
        check_names(source)  # before a cluster is started in vain
        run_cluster(up, work)
    if outcome is None:
        raise typer.Exit(130)  # stopped before the end
    if outcome.failed:
        raise typer.Exit(1)


@app.command(rich_help_panel=INSPECT)
@asking
def status(
    target: "Target",
) -> None:
    """Show the workers, the queue and the KV transfers between workers as a router sees them now."""
    from tandem.cli.client.status import show_status

    run(show_status(console, target))


@app.command(rich_help_panel=INSPECT)
@asking
def top(
    target: "Target",
    interval: Annotated[float, typer.Option(help="seconds between two updates", min=0.1)] = 1.0,
) -> None:
    """Watch the cluster; Ctrl-C ends it."""
    from tandem.cli.client.status import follow

    run(follow(console, target, interval))
