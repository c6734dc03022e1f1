"""Report: the questions' JSON files as a table in Markdown, growth curves, and an executed notebook.

    load(directory) → the questions     table(questions) → Markdown     draw(questions) → a figure of growth
`report(directory)` writes `table.md` and executes `benchmarks/benchmarks.ipynb` beside it. Not here: measuring.
"""

from __future__ import annotations

import io
import json
import math
import os
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import Figure, unmeasured
from benchmarks.reference import VERSION

NOTEBOOK = Path(__file__).with_name("benchmarks.ipynb")
HEAD = "| what | median | 95 % interval | target | reached |\n|---|---:|---|---|---|\n"
REACHED = (
    "*Reached*: **yes** where the whole interval satisfies the target, **no** where none of it does, *within its "
    "interval* where the target lies inside it, so that this run does not tell; what the median alone says stands "
    "beside it. A figure without an interval was measured once. Small numbers refer to the notes below a table.\n"
)
COMPARED = (
    f"*The reference* is NeMo Gym {VERSION}, whose contract of token capture Workbench keeps, run beside it in a "
    "process of its own. A ratio is the median of the ratios of neighbouring samples, so it need not equal the "
    "quotient of the two medians below it.\n"
)

Question = dict[str, Any]


def load(directory: Path | str) -> dict[str, Question]:
    """The measured questions of a directory, by name, in the order in which they are asked."""
    from benchmarks.__main__ import QUESTIONS

    paths = {name: Path(directory) / f"{name}.json" for name in QUESTIONS}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def machine(question: Question) -> str:
    """One sentence on what a question was measured on."""
    about = question["machine"]
    return (
        f"{about['cores']} cores of {about['processor']}, {about['memory_gib']} GiB, Python {about['python']}, SHA-256 "
        f"{about['sha256_gb_s']} GB/s, load average at the start {about['load_at_start']}, commit {about['commit']}"
    )


def measured_on(questions: dict[str, Question]) -> str:
    """A Markdown list: the machine of each question, and what is to be kept in mind about it."""
    from benchmarks.__main__ import QUESTIONS

    lines = [f"- **{name}**: {machine(question)}\n" for name, question in questions.items()]
    busy = [name for name, q in questions.items() if q["machine"]["load_at_start"] > q["machine"]["cores"] + 1]
    if busy:
        lines.append(
            f"- **Measured while other programs kept the machine busy: {', '.join(busy)}.** The caches were not theirs "
            "alone; what is limited by memory (verifier, capture core, frames) suffers more from that than what is "
            "limited by Python, so ratios to the reference can be too low. Measure again on a quiet machine.\n"
        )
    missing = [name for name in QUESTIONS if name not in questions]
    if missing:
        lines.append(f"- Not measured here: {', '.join(missing)} (`python -m benchmarks {' '.join(missing)}`).\n")
    return "".join(lines)


def table(questions: Iterable[Question]) -> str:
    """The figures of some questions as one Markdown table, and their notes below it, numbered."""
    notes: dict[str, int] = {}
    rows = [_row(one, notes) for question in questions for one in _figures(question)]
    below = "".join(f"{number}. {note}\n" for note, number in notes.items())
    return HEAD + "".join(f"{row}\n" for row in rows) + (f"\n{below}" if below else "")


def growth_table(questions: Iterable[Question]) -> str:
    """The growth curves of some questions as one Markdown table."""
    rows = [
        f"| {one['name']} | {one['of']} | {_span(one['sizes'])} | {_amount(one, 0)} to {_amount(one, -1)} | "
        f"{one['exponent']:.2f} | {one['note']} |\n"
        for question in questions
        for one in _growths(question)
    ]
    head = "| what | size: number of | sizes | takes | fitted exponent | why |\n|---|---|---|---|---:|---|\n"
    return head + "".join(rows)


def draw(questions: Iterable[Question]) -> Any:
    """A picture: one panel a growth curve, both axes logarithmic, with the fitted line.

    Every panel shows at least a factor of ten upwards, so that what is flat looks flat.
    """
    from IPython.display import Image
    from matplotlib.figure import Figure as Picture
    from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullLocator

    curves = [one for question in questions for one in _growths(question)]
    across = 3
    picture = Picture(figsize=(10, 2.9 * math.ceil(len(curves) / across)), layout="constrained")
    for place, one in enumerate(curves):
        axes = picture.add_subplot(math.ceil(len(curves) / across), across, place + 1)
        sizes, seconds = one["sizes"], one["seconds"]
        middle = math.exp(sum(map(math.log, sizes)) / len(sizes)), math.exp(sum(map(math.log, seconds)) / len(seconds))
        fitted = [middle[1] * (size / middle[0]) ** one["exponent"] for size in sizes]
        scale, unit = (1e3, "ms") if one.get("unit", "s") == "s" else (1, one["unit"])
        axes.loglog(sizes, [scale * value for value in fitted], color="0.7", linewidth=1)
        axes.loglog(sizes, [scale * value for value in seconds], "o", color="#1f5fa8", markersize=5)
        title = textwrap.fill(f"{one['name']}: exponent {one['exponent']:.2f}", 42)
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_xlabel(one["of"], fontsize=8)
        axes.set_ylabel(unit, fontsize=8)
        axes.set_xticks(sizes)
        axes.xaxis.set_major_formatter(EngFormatter(sep="", places=None))
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_minor_locator(NullLocator())
        axes.tick_params(labelsize=7)
        reach = max(max(seconds) / min(seconds), 10.0) ** 0.5 * 1.3
        centre = scale * (max(seconds) * min(seconds)) ** 0.5
        axes.set_ylim(centre / reach, centre * reach)
    drawn = io.BytesIO()
    picture.savefig(drawn, format="png", dpi=110)
    return Image(data=drawn.getvalue(), format="png")


def report(directory: Path) -> None:
    """Write the table and the executed notebook of what was measured into `directory`."""
    import papermill

    from workbench.campaign.report.kernel import KERNEL_NAME, OwnKernel
    from workbench.campaign.report.notebook_file import Outcome, set_outcome

    questions = load(directory)
    text = (
        "# Benchmarks\n\nWritten by `make bench`; the notebook beside this file says what each figure means.\n\n"
        f"{COMPARED}\n{REACHED}\n{table(questions.values())}\n## Growth\n\n{growth_table(questions.values())}\n"
        f"## Measured on\n\n{measured_on(questions)}"
    )
    (directory / "table.md").write_text(text)
    executed = directory / NOTEBOOK.name
    kernel = OwnKernel()
    try:
        papermill.execute_notebook(
            os.path.relpath(NOTEBOOK),  # relative: what is executed is committed, and says where it came from
            str(executed),
            parameters={"directory": str(directory)},
            progress_bar=False,
            kernel_name=KERNEL_NAME,
            km=kernel.manager,
        )
    finally:
        kernel.end()
    set_outcome(executed, Outcome("done"))


def _growths(question: Question) -> Iterator[dict[str, Any]]:
    return (one for one in question["results"] if one["kind"] == "growth")


def _figures(question: Question) -> Iterator[Figure]:
    if "failed" in question:
        yield unmeasured(question["question"], "", question["failed"])
    for one in question["results"]:
        if one["kind"] == "figure":
            yield Figure(**one)


def _row(one: Figure, notes: dict[str, int]) -> str:
    """A line of the table; its note goes to `notes`, note → number."""
    name, unit = one.name, "×" if one.unit == "×" else f" {one.unit}"
    if note := " ".join(one.note.split()):
        name += f" <sup>{notes.setdefault(note, len(notes) + 1)}</sup>"
    value = "not measured" if one.value is None else f"{_number(one.value)}{unit}"
    interval = "" if one.low is None or one.high is None else f"{_number(one.low)} – {_number(one.high)}"
    target = (
        f"≥ {one.at_least:g}" if one.at_least is not None else f"≤ {one.at_most:g}" if one.at_most is not None else ""
    )
    return f"| {name} | {value} | {interval} | {target} | {_reached(one)} |"


def _reached(one: Figure) -> str:
    match one.reached:
        case "no":
            return "**no**"
        case "within its interval":
            return f"within its interval (median: {'yes' if one.median_fits else 'no'})"
        case verdict:
            return verdict or ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"


def _amount(growth: dict[str, Any], place: int) -> str:
    value, unit = growth["seconds"][place], growth.get("unit", "s")
    return _duration(value) if unit == "s" else f"{_number(value)} {unit}"


def _duration(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def _span(sizes: list[float]) -> str:
    return ", ".join(f"{size:,.0f}" for size in sizes)
