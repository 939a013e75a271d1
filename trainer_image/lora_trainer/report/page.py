"""The report of a run as one HTML page that needs nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from lora_trainer.report.charts import Point, chart, smoothed
from lora_trainer.report.facts import RunHistory
from lora_trainer.report.pictures import Gallery

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --faint: #667; --line: #8884; --raw: #7aa2d6; --curve: #1f5fa8; --mark: #c2701b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --faint: #9aa3ad; --raw: #48698f; --curve: #8fc0ff; --mark: #e8a25a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0; } h2 { margin-top: 2.2rem; border-bottom: 1px solid var(--line); } .faint { color: var(--faint); }
table { border-collapse: collapse; } th, td { text-align: left; padding: .2rem .9rem .2rem 0; vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; } .wide { overflow-x: auto; }
.key { display: flex; flex-wrap: wrap; gap: .6rem 2.2rem; margin: 1.2rem 0; padding: 0; list-style: none; } .key b { display: block; font-size: 1.35rem; }
svg { width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: var(--faint); } svg .grid { stroke: var(--line); }
svg polyline { fill: none; stroke-linejoin: round; } svg .raw { stroke: var(--raw); opacity: .6; } svg .smooth { stroke: var(--curve); stroke-width: 2; }
svg .mark { stroke: var(--mark); stroke-dasharray: 4 3; } img { display: block; max-width: 256px; height: auto; border-radius: 4px; }
pre { overflow-x: auto; font-size: 13px; line-height: 1.35; } summary { cursor: pointer; }
"""


@dataclass(frozen=True)
class Report:
    """All that the page shows.

    Args:
        facts: Of the run, as in `metadata.yaml`.
        history: Of all its starts.
        gallery: Its samples.
        config_text: The configuration in force at the end, as YAML.
        lost_steps: Steps that were made twice.
        nonfinite_steps: Steps that were skipped in this start.
        stall_seconds: That training stood still for saving, in this start.
        save_seconds: Longest save of this start.
        files: Name and size in bytes of the result's files.
    """

    facts: Mapping[str, Any]
    history: RunHistory
    gallery: Gallery
    config_text: str
    lost_steps: int = 0
    nonfinite_steps: int = 0
    stall_seconds: float = 0.0
    save_seconds: float | None = None
    files: tuple[tuple[str, int], ...] = ()


def page(report: Report) -> str:
    """The page."""
    facts = report.facts
    title = f"{facts['job']}: {facts['arch']}, {facts['steps']} steps"
    sections = (
        ("Loss", _loss(report)),
        ("Learning rate", _rate(report)),
        ("Samples", _samples(report.gallery)),
        ("Result", _table(("file", "size"), [(_link(name, name), _bytes(size)) for name, size in report.files])),
        ("Data", _rows(_flat(facts["dataset"]))),
        ("Speed and memory", _rows(_speed(report))),
        ("Starts", _starts(report)),
        ("Checkpoints", _checkpoints(report)),
        ("Made from", _rows(_made_from(facts))),
        (
            "Configuration",
            f"<details open><summary>in force at the end</summary><pre>{escape(report.config_text)}</pre></details>",
        ),
    )
    body = "".join(f"<section><h2>{name}</h2>{content}</section>" for name, content in sections if content)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    when = f"{facts['training']['started_at']} to {facts['completed_at']}"
    return (
        f'<!doctype html><html lang="en"><head>{head}<style>{_STYLE}</style></head><body><h1>{escape(facts["job"])}</h1>'
        f'<p class="faint">{escape(when)}</p>{_key_numbers(report)}{body}</body></html>\n'
    )


def _key_numbers(report: Report) -> str:
    facts, training = report.facts, report.facts["training"]
    memory = facts.get("memory_gib") or {}
    numbers = {
        "steps": facts["steps"],
        f"loss, last {min(100, len(report.history.steps))} steps": _number(training["loss_of_last_steps"]),
        "s/step": _number(training["seconds_per_step"]),
        "samples/s": _number(training["samples_per_second"]),
        "GiB at the peak": _number(memory.get("measured_peak")),
        "restarts": max(0, training["starts"] - 1),
    }
    return '<ul class="key">' + "".join(f"<li><b>{value}</b>{name}</li>" for name, value in numbers.items()) + "</ul>"


def _marks(report: Report) -> list[tuple[float, str]]:
    resumed = [
        (each.first_step - 1, f"start {each.start} went on from step {each.first_step - 1}")
        for each in report.history.starts[1:]
        if each.first_step
    ]
    changed = [(each.step, f"settings changed after step {each.step}") for each in report.history.changes]
    staged = [(step, f"stage {number} began after step {step}") for step, number in report.history.stages]
    return sorted((float(step), text) for step, text in (*resumed, *changed, *staged))


def _points(report: Report, name: str) -> list[Point]:
    return [(float(line["step"]), float(line[name])) for line in report.history.steps]


def _loss(report: Report) -> str:
    raw = _points(report, "loss")
    weight = 0.98 if len(raw) > 200 else 0.9
    line = [(step, mean) for (step, _), mean in zip(raw, smoothed([y for _, y in raw], weight), strict=True)]
    text = f"Faint: as logged. Strong: moving average with weight {weight}."
    marks = _marks(report)
    told = "".join(f"<li>{escape(what)}</li>" for _, what in marks)
    return f'{chart("Loss over steps", raw, line, marks=marks)}<p class="faint">{text}</p>' + (
        f"<ul>{told}</ul>" if told else ""
    )


def _rate(report: Report) -> str:
    return chart("Learning rate over steps", _points(report, "lr"), marks=_marks(report))


def _samples(gallery: Gallery) -> str:
    rows = []
    for prompt, by_round in gallery.rows.items():
        cells: list[str] = [f"<th>{escape(prompt)}</th>"]
        for title in gallery.rounds:
            found = by_round.get(title)
            picture = f'<img src="{found.data}" alt="{escape(prompt)}, {title}">' if found else ""
            cells.append(f'<td><a href="{escape(found.link)}">{picture}</a></td>' if found else "<td></td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    if not rows:
        return ""
    head = "".join(f"<th>{escape(title)}</th>" for title in ("prompt", *gallery.rounds))
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _speed(report: Report) -> dict[str, str]:
    training, memory = report.facts["training"], report.facts.get("memory_gib") or {}
    found = {
        "seconds per step, median": _number(training["seconds_per_step"]),
        "samples per second": _number(training["samples_per_second"]),
        "longest save": f"{report.save_seconds:.2f} s, in the background" if report.save_seconds else "-",
        "training stood still for saving": f"{report.stall_seconds:.2f} s in the last start",
    }
    names = {
        "measured_peak": "memory at the peak, GiB",
        "measured_on": "measured on",
        "total": "memory as estimated, GiB",
        "error": "estimate may be off by, GiB",
    }
    for key, value in memory.items():
        found[names.get(key, f"estimated for {key.replace('_', ' ')}, GiB")] = str(value)
    return found


def _starts(report: Report) -> str:
    rows = [
        (
            str(each.start),
            str(each.attempt),
            escape(each.claimed_at),
            f"{each.first_step or '-'} to {each.last_step or '-'}",
            escape(each.host),
        )
        for each in report.history.starts
    ]
    text = f"{report.lost_steps} steps were made twice, {report.nonfinite_steps} were skipped because they were not finite."
    return _table(("start", "attempt", "began", "steps", "host"), rows) + f"<p>{text}</p>"


def _checkpoints(report: Report) -> str:
    rows = [
        (
            str(each.step),
            str(each.start),
            escape(each.committed_at),
            _bytes(each.size_bytes),
            f"{each.save_seconds:.2f} s",
        )
        for each in report.history.checkpoints
    ]
    return _table(("step", "start", "committed", "size", "saved in"), rows) if rows else "<p>None is kept.</p>"


def _made_from(facts: Mapping[str, Any]) -> dict[str, str]:
    shown = (
        "base_model",
        "base_model_revision",
        "base_model_hash",
        "arch",
        "rank",
        "alpha",
        "trigger_word",
        "dataset_digest",
        "seed",
        "dtype",
        "device",
        "config_hash",
    )
    found = {name.replace("_", " "): str(facts[name]) for name in shown if facts.get(name) not in ("", None)}
    return found | {f"version of {name}": text for name, text in facts["versions"].items() if text}


def _flat(facts: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for key, value in facts.items():
        if isinstance(value, Mapping):
            found[key.replace("_", " ")] = ", ".join(f"{name}: {count}" for name, count in value.items())
        else:
            found[key.replace("_", " ")] = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return found


def _rows(facts: Mapping[str, str]) -> str:
    return (
        "<table>"
        + "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts.items())
        + "</table>"
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    first = "".join(f"<th>{name}</th>" for name in head)
    rest = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{first}</tr>{rest}</table></div>'


def _link(target: str, text: str) -> str:
    return f'<a href="{escape(target)}">{escape(text)}</a>'


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _bytes(size: int) -> str:
    power = min(3, max(0, (len(str(size)) - 1) // 3))
    return f"{size / 1000**power:.4g} {('B', 'kB', 'MB', 'GB')[power]}"
