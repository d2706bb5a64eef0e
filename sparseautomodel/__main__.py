"""The command line: `sparseautomodel --help` lists the commands, docs/command-line.md shows each.

torch and what stands on it take seconds to import, so each command imports what it needs; the top needs only typer.
"""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from sparseautomodel.console import (
    Device,
    Execution,
    Json,
    RecipeForm,
    RecipeOption,
    Requantize,
    Revision,
    Source,
    Subfolder,
    Traceback,
    TrustRemoteCode,
    check_device,
    checked_source,
    load_model,
    load_recipe,
    load_tokenizer,
    print_json,
    print_plan,
    print_result,
    print_rows,
    print_table,
    read_text,
    shipped,
    summary,
    working,
    wrong_usage,
)

app = typer.Typer(
    name="sparseautomodel",
    help="A recipe turns a checkpoint into a sparse or quantized model, every weight read once.",
    epilog="Exit status: 0 done, 1 the work failed or the verdict is bad, 2 wrong usage.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # boxes around errors break the paths in them
)
recipes_app = typer.Typer(rich_markup_mode=None)
app.add_typer(recipes_app, name="recipes", invoke_without_command=True)


def main() -> None:
    """The entry point `sparseautomodel`."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"sparseautomodel {version('sparseautomodel')}")
        except PackageNotFoundError:
            typer.echo("sparseautomodel, not installed")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def plan(
    path: Source,
    recipe: RecipeForm,
    requantize: Requantize = False,
    subfolder: Subfolder = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Show what a recipe would do to a model.

    Each layer, sizes, memory and who can read the result, from config.json and the headers of the files: no weights are
    read. Exit status 1 if the recipe does not fit the model.
    """
    with working(as_json, traceback):
        hub = checked_source(path, subfolder, revision)
        from sparseautomodel.plan import plan

        found = plan(path, load_recipe(recipe), requantize=requantize, trust_remote_code=trust_remote_code, **hub)
    if as_json:
        print_json(found.to_dict())
    else:
        print_plan(found)
    raise typer.Exit(1 if found.errors else 0)


@app.command()
def oneshot(
    path: Source,
    recipe: RecipeForm,
    output: Annotated[Path, typer.Option(metavar="DIR", help="The folder that appears when the result is complete.")],
    data: Annotated[str | None, typer.Option(help="Calibration data: a file, or the name of a data set.")] = None,
    num_samples: Annotated[int, typer.Option(min=1, help="Rows of calibration data.")] = 512,
    max_length: Annotated[int, typer.Option(min=1, help="Tokens a row.")] = 2048,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows a forward.")] = 8,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the blocks of a killed run.")] = False,
    device: Device = None,
    memory_budget: Annotated[str, typer.Option(metavar="SIZE", help="Calibration state held in memory.")] = "1GB",
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Size of a file of weights: 5GB, 500MB.")] = "5GB",
    requantize: Requantize = False,
    subfolder: Subfolder = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Compress a model from files to files.

    One tensor is in memory at a time. The result is verified before it appears under its name.
    """
    with working(as_json, traceback):
        hub = checked_source(path, subfolder, revision)
        from sparseautomodel.oneshot import oneshot
        from sparseautomodel.save import parse_size

        check_device(device)
        with wrong_usage("--max-shard-size or --memory-budget", ValueError):
            limit, budget = parse_size(max_shard_size), parse_size(memory_budget)
        report = oneshot(
            path,
            load_recipe(recipe),
            data,
            output,
            num_samples=num_samples,
            max_length=max_length,
            batch_size=batch_size,
            resume=resume,
            device=device,
            memory_budget=budget,
            max_shard_size=limit,
            requantize=requantize,
            trust_remote_code=trust_remote_code,
            **hub,
        )
    print_result(report if as_json else replace(report, warnings=()), as_json)  # they are on stderr already


@app.command()
def verify(
    path: Source,
    against: Annotated[str | None, typer.Option(metavar="PATH", help="The checkpoint it was made from.")] = None,
    subfolder: Subfolder = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Check that a checkpoint is in order.

    Files and index, names and shapes, finite values, positive scales, promised zeros. Exit status 1 if anything is
    wrong; every problem is listed.
    """
    with working(as_json, traceback):
        hub = checked_source(path, subfolder, revision)
        if against is not None:
            checked_source(against, parameter="--against")
        from sparseautomodel.verify import verify

        verdict = verify(path, against, trust_remote_code=trust_remote_code, **hub)
    print_result(verdict, as_json)
    raise typer.Exit(0 if verdict.ok else 1)


@app.command("inspect")
def inspect_(
    path: Source,
    values: Annotated[
        bool, typer.Option("--values/--no-values", help="Read the values and count zeros, or read headers only.")
    ] = True,
    layers: Annotated[bool, typer.Option("--layers", help="One line a layer, not one for all that are alike.")] = False,
    execution: Annotated[bool, typer.Option("--execution", help="Say what each layer would run on.")] = False,
    device: Device = None,
    subfolder: Subfolder = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Say what is in a checkpoint, per layer.

    Format, scheme, size, share of values that are exactly zero, N:M pattern. Values are read and decoded for it.
    """
    with working(as_json, traceback):
        hub = checked_source(path, subfolder, revision)
        from sparseautomodel.execution import execution_of
        from sparseautomodel.inspection import inspect

        found: Any
        if execution:
            found = execution_of(path, device=device, trust_remote_code=trust_remote_code, **hub)
        else:
            found = inspect(path, values=values, trust_remote_code=trust_remote_code, **hub)
    print_rows(found, layers, as_json)


@app.command()
def generate(
    path: Source,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="What the model continues, or answers.")],
    recipe: RecipeOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N")] = 64,
    temperature: Annotated[
        float, typer.Option(min=0.0, metavar="T", help="Sample at this temperature; 0 takes the likeliest token.")
    ] = 0.0,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Use the chat template of the tokenizer.  [default: if it has one]"),
    ] = None,
    execution: Execution = "auto",
    device: Device = None,
    requantize: Requantize = False,
    subfolder: Subfolder = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Let a model write text.

    Prints what is new, token by token. What loading did goes to stderr.
    """
    with working(as_json, traceback):
        hub = checked_source(path, subfolder, revision) | {"trust_remote_code": trust_remote_code}
        tokenizer = load_tokenizer(path, hub)
        if chat and not tokenizer.chat_template:
            raise typer.BadParameter(f"the tokenizer in {path} has no chat template", param_hint="--chat")
        model = load_model(path, recipe, execution, device, requantize, hub)
        from transformers import TextStreamer

        if tokenizer.chat_template and chat is not False:
            messages = [{"role": "user", "content": prompt}]
            inputs = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
        else:
            inputs = tokenizer(prompt, return_tensors="pt")
        sampling: dict[str, Any] = (
            {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        )
        streamer = None if as_json else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        outputs = model.generate(
            **inputs.to(model.device), max_new_tokens=max_new_tokens, streamer=streamer, **sampling
        )
        new = outputs[0, inputs["input_ids"].shape[1] :]
    if as_json:
        print_json({"text": tokenizer.decode(new, skip_special_tokens=True), "tokens": len(new)})


@app.command("eval")
def eval_(
    path: Source,
    text: Annotated[Path, typer.Argument(metavar="TEXTFILE", exists=True, dir_okay=False, help="UTF-8 text.")],
    recipe: RecipeOption = None,
    window: Annotated[int, typer.Option(min=2, metavar="N", help="Tokens that the model sees at a time.")] = 512,
    stride: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens that each window moves on.  [default: the window]")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=2, metavar="N", help="Read no more than these.")] = None,
    execution: Execution = "auto",
    device: Device = None,
    requantize: Requantize = False,
    subfolder: Subfolder = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Measure the perplexity of a text file.

    The text is read in windows, and each token is counted once: a smaller stride gives each more of what comes before.
    """
    if stride is not None and stride > window:
        raise typer.BadParameter(f"{stride} is more than the window, {window}", param_hint="--stride")
    with working(as_json, traceback):
        content = read_text(text)
        hub = checked_source(path, subfolder, revision) | {"trust_remote_code": trust_remote_code}
        tokenizer = load_tokenizer(path, hub)
        model = load_model(path, recipe, execution, device, requantize, hub)
        from sparseautomodel.report import perplexity

        found = perplexity(model, tokenizer, content, window=window, stride=stride, max_tokens=max_tokens)
        if not math.isfinite(found.value):
            raise ValueError(f"the perplexity is {found.value}: {path} gives logits that are not finite")
    print_result(found, as_json)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", exists=True, file_okay=False, help="What oneshot wrote.")],
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page.  [default: DIR/compression_report.html]")
    ] = None,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Write one HTML page about a compressed model.

    Sizes, verdict, errors, schemes, zeros, time and memory, from compression_report.json; it needs no network. Prints
    where the page is.
    """
    with working(as_json, traceback):
        from sparseautomodel.report_page import write_report

        page = str(write_report(folder, output))
    if as_json:
        print_json({"page": page})
    else:
        typer.echo(page)


@recipes_app.callback()
def recipes(context: typer.Context, as_json: Json = False) -> None:
    """List, show and check recipes."""
    if context.invoked_subcommand is not None:
        return
    found = {name: summary(file.read_text(encoding="utf-8")) for name, file in shipped().items()}
    if as_json:
        print_json([{"name": name, "summary": text} for name, text in found.items()])
    else:
        print_table(("recipe", "what it does"), list(found.items()))


@recipes_app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a shipped recipe.")], as_json: Json = False
) -> None:
    """Print a shipped recipe."""
    files = shipped()
    if name not in files:
        raise typer.BadParameter(f"there is no shipped recipe '{name}'. There are: {', '.join(files)}")
    text = files[name].read_text(encoding="utf-8")
    if as_json:
        print_json({"name": name, "summary": summary(text), "text": text})
    else:
        typer.echo(text, nl=False)


@recipes_app.command()
def check(
    recipe: RecipeForm,
    model: Annotated[str | None, typer.Option(metavar="PATH", help="Plan the recipe on this model too.")] = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Say what is wrong with a recipe, if anything.

    Alone, or for a model: then what is chosen for it is said too. Exit status 1 if anything is wrong.
    """
    result: dict[str, Any] = {"recipe": None, "errors": [], "warnings": []}
    with working(as_json, traceback):
        if model is not None:
            checked_source(model, parameter="--model")
        from sparseautomodel.plan import plan
        from sparseautomodel.recipe import RecipeError

        try:
            loaded = load_recipe(recipe)
            result["recipe"] = loaded.to_dict()
            if model is not None:
                made = plan(model, loaded, trust_remote_code=trust_remote_code).to_dict()
                result |= {key: made[key] for key in result}
        except RecipeError as error:
            if traceback or not as_json:
                raise
            result["errors"] = [str(error)]
    ok = not result["errors"]
    if as_json:
        print_json({"ok": ok} | result)
    else:
        lines = [f"{kind}: {text}" for kind in ("warning", "error") for text in result[f"{kind}s"]]
        fits = "is a valid recipe" if model is None else f"{'fits' if ok else 'does not fit'} {model}"
        typer.echo("\n".join([*lines, f"{'the recipe' if chr(10) in recipe else recipe} {fits}"]))
    raise typer.Exit(0 if ok else 1)


if __name__ == "__main__":
    main()
