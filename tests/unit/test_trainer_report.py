"""The report of a run, from made-up facts."""

from __future__ import annotations

import io
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from lora_api import layout
from lora_api.run import CheckpointManifest, Control, FileEntry, StartClaim
from lora_api.stores import DirectoryStore
from lora_trainer.data.buckets import Size
from lora_trainer.data.samples import Sample
from lora_trainer.report import Gallery, Report, RunHistory, dataset_facts, page, read_gallery, read_history
from lora_trainer.report.charts import chart, smoothed, thinned, ticks
from lora_trainer.report.pictures import evenly
from lora_trainer.sampling import save_png

FACTS = {
    "job": "team-a/<mascot>",
    "arch": "zimage",
    "steps": 8,
    "completed_at": "2026-01-01T01:00:00Z",
    "base_model": "s3://models/z",
    "base_model_revision": "",
    "base_model_hash": "abc",
    "rank": 4,
    "alpha": 4,
    "trigger_word": "sks",
    "dataset_digest": "def",
    "seed": 42,
    "config_hash": "0123",
    "versions": {"torch": "2.9"},
    "dataset": {"files": 3, "buckets": {"512x512": 2, "768x512": 1}},
    "memory_gib": {"measured_peak": 11.5, "total": 12.25},
}


def line(step: int, loss: float = 1.0, **more) -> dict:
    return {"step": step, "loss": loss, "lr": 1e-4, "grad_norm": 1.0, "seconds": 0.5, "samples": 4 * step, **more}


@pytest.fixture
def store(tmp_path) -> DirectoryStore:
    """A run of two starts: the first one reached step 5, the second one went on from step 3 to step 8."""
    made = DirectoryStore(tmp_path / "run")
    for number in (1, 2):
        claim = StartClaim(start=number, attempt=number, token="t", claimed_at=f"2026-01-01T00:0{number}:00Z", host="n")
        made.put(layout.start_claim(number), claim.model_dump_json(by_alias=True).encode())
    for step, start in ((3, 1), (6, 2)):
        manifest = CheckpointManifest(
            step=step, start=start, attempt=start, uid="u", config_hash="h", committed_at="2026-01-01T00:30:00Z",
            files=(FileEntry(name="a", size_bytes=1_500_000, sha256=""),), save_seconds=1.25,
        )  # fmt: skip
        made.put(layout.checkpoint_manifest(step, start), manifest.model_dump_json(by_alias=True).encode())
    return made


LINES = {
    1: [*(line(step) for step in range(1, 6)), {"step": 5, "skipped": "not finite"}],
    2: [
        *(line(step, loss=2.0) for step in range(4, 9)),
        {"step": 6, "control": Control(generation=2, steps=8, lr=1e-5, save_every=3, max_step_saves=1).model_dump()},
    ],
}


def draw(store: DirectoryStore, folder: Path, step: int, prompts: list[str]) -> None:
    for number, prompt in enumerate(prompts):
        path = save_png(
            Image.new("RGB", (640, 320)), folder / f"{number:02d}.png", {"prompt": prompt, "step": str(step)}
        )
        store.put(layout.samples_folder(step) + path.name, path)


# ---------------------------------------------------------------------- facts
def test_of_a_step_made_twice_the_newest_start_counts(store):
    history = read_history(store, LINES)
    assert [(each["step"], each["loss"]) for each in history.steps] == [
        *((step, 1.0) for step in (1, 2, 3)),
        *((step, 2.0) for step in range(4, 9)),
    ]
    assert [(each.start, each.first_step, each.last_step) for each in history.starts] == [(1, 1, 5), (2, 4, 8)]
    assert [(each.step, each.start) for each in history.checkpoints] == [(6, 2), (3, 1)]
    facts = history.facts()
    assert (facts["seconds_per_step"], facts["samples_per_second"], facts["starts"]) == (0.5, 8.0, 2)
    assert facts["loss_of_last_steps"] == pytest.approx((3 * 1 + 5 * 2) / 8)
    assert facts["changes"] == [{"after_step": 6, "generation": 2, "steps": 8, "lr": 1e-5}]


def test_where_the_stages_of_a_run_began_is_read_once_and_marked_in_the_curves(store):
    began = {"step": 5, "stage": 2, "stages": 2, "batch_size": 1}
    history = read_history(store, {1: [*LINES[1], began], 2: [*LINES[2], began]})
    assert history.stages == ((5, 2),)
    facts = FACTS | {"training": history.facts()}
    html = page(Report(facts, history, Gallery((), {}), ""))
    assert html.count("<title>stage 2 began after step 5</title>") == 2  # loss and rate
    assert "loss, last 8 steps" in html


def test_a_run_without_a_step_has_a_history_too(tmp_path):
    history = read_history(DirectoryStore(tmp_path), {})
    assert history.facts()["seconds_per_step"] is None


def test_data_is_counted_by_file_bucket_and_caption():
    def sample(name: str, caption: str, size: Size, frames: tuple[int, ...] = ()) -> Sample:
        return Sample(Path(name), name, size, caption, "", 0.05, cached=True, frames=frames)

    small, wide = Size(512, 512), Size(768, 512)
    samples = [
        sample("a", "sks on a hill", small),
        sample("a", "sks on a hill", wide),
        sample("b", "", small, (0, 1, 2)),
    ]
    assert dataset_facts(samples, "sks") == {
        "files": 2,
        "samples": 3,
        "buckets": {"512x512": 1, "512x512x3": 1, "768x512": 1},
        "captioned": 2,
        "words_per_caption": 2.0,
        "caption_dropout": [0.05],
        "with_trigger_word": 2,
    }


# ---------------------------------------------------------------------- pictures
def test_samples_stand_by_prompt_and_step_and_the_result_comes_last(store, tmp_path):
    draw(store, tmp_path / "a", 4, ["old", "both"])
    draw(store, tmp_path / "b", 12, ["both"])
    result = save_png(Image.new("RGB", (64, 64)), tmp_path / "c" / "00.png", {"prompt": "both", "step": "16"})
    gallery = read_gallery(store, [result, tmp_path / "c" / "00.webp"])
    assert gallery.rounds == ("step 4", "step 12", "result")
    assert {prompt: list(row) for prompt, row in gallery.rows.items()} == {
        "old": ["step 4"],
        "both": ["step 4", "step 12", "result"],
    }
    assert gallery.rows["both"]["step 12"].link == "../samples/step-000000012/00.png"
    assert gallery.rows["both"]["result"].link == "sample-00.png"


def test_a_picture_that_can_not_be_read_is_left_out(store):
    store.put(layout.samples_folder(4) + "00.png", b"half a pict")
    assert read_gallery(store, []) == Gallery((), {})


def test_of_many_rounds_some_are_shown_the_first_and_the_last_among_them():
    names = [f"{number:03d}" for number in range(100)]
    chosen = evenly(names, 8)
    assert (len(set(chosen)), chosen[0], chosen[-1]) == (8, "000", "099")
    assert evenly(names[:3], 8) == names[:3]


# ---------------------------------------------------------------------- curves
def test_the_moving_average_is_the_weighted_mean_of_what_was_before():
    values, weight = [3.0, 1.0, 4.0, 1.0, 5.0], 0.8
    for number, found in enumerate(smoothed(values, weight)):
        weights = [weight ** (number - at) for at in range(number + 1)]
        expected = sum(w * v for w, v in zip(weights, values, strict=False)) / sum(weights)
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("low", "high", "first", "last"),
    [(0, 97, 0, 100), (0.13, 0.58, 0.1, 0.6), (-2, 3, -2, 3), (1e-5, 1e-4, 0, 1e-4), (4, 4, 2, 6)],
)
def test_ticks_are_round_and_hold_everything(low, high, first, last):
    found = ticks(low, high)
    assert (found[0], found[-1]) == (pytest.approx(first), pytest.approx(last))
    assert found[0] <= low + 1e-12
    assert found[-1] >= high - 1e-12
    assert 3 <= len(found) <= 8


def test_many_points_become_few_of_the_same_mean():
    points = [(float(step), math.sin(step)) for step in range(10_000)]
    few = thinned(points, 100)
    assert len(few) == 100
    assert sum(y for _, y in few) / 100 == pytest.approx(sum(y for _, y in points) / 10_000)


def test_a_curve_stays_inside_of_its_frame_whatever_a_single_step_says():
    points = [(float(step), 1.0) for step in range(1, 400)] + [(400.0, 1e9), (401.0, math.nan)]
    numbers = [
        float(y) for y in re.findall(r",(-?[\d.]+)", re.search(r'points="([^"]*)"', chart("t", points)).group(1))
    ]
    assert all(0 <= y <= 260 for y in numbers)
    assert len(numbers) > 100
    assert chart("t", []) == "<p>No steps were logged.</p>"


# ---------------------------------------------------------------------- the page
class Outline(HTMLParser):
    """Tags that are open at the end, headings, and everything that would be loaded from elsewhere."""

    VOID = ("meta", "img")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.headings: list[str] = []

    def handle_starttag(self, tag, attributes):
        if tag not in self.VOID:
            self.open.append(tag)
        self.loaded += [
            value for name, value in attributes if name in ("src", "xlink:href") and not value.startswith("data:")
        ]
        assert tag not in ("script", "link", "iframe")

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("h1", "h2"):
            self.headings.append(data)


def test_the_page_is_whole_says_everything_and_loads_nothing(store, tmp_path):
    draw(store, tmp_path / "a", 4, ["a <b>prompt</b>"])
    history = read_history(store, LINES)
    report = Report(
        FACTS | {"training": history.facts()}, history, read_gallery(store, []), "train: {steps: 8}\n",
        lost_steps=2, nonfinite_steps=1, stall_seconds=0.25, save_seconds=1.25, files=(("adapter.safetensors", 1234),),
    )  # fmt: skip
    html = page(report)
    outline = Outline()
    outline.feed(html)
    assert (outline.open, outline.loaded) == ([], [])
    assert outline.headings == [
        "team-a/<mascot>", "Loss", "Learning rate", "Samples", "Result", "Data", "Speed and memory", "Starts", "Checkpoints",
        "Made from", "Configuration",
    ]  # fmt: skip
    assert "url(" not in html
    for said in (
        "a &lt;b&gt;prompt&lt;/b&gt;", "2 steps were made twice, 1 were skipped", "start 2 went on from step 3",
        "settings changed after step 6", "11.5", "12.25", "1.5 MB", "1.234 kB", "512x512: 2, 768x512: 1", "s3://models/z",
    ):  # fmt: skip
        assert said in html, said


def test_a_page_without_steps_samples_or_memory_can_be_made_too():
    history = RunHistory((), (), (), ())
    facts = {key: value for key, value in FACTS.items() if key != "memory_gib"} | {"training": history.facts()}
    html = page(Report(facts, history, Gallery((), {}), ""))
    assert "No steps were logged." in html
    assert "<h2>Samples</h2>" not in html


def test_a_sample_says_what_it_was_drawn_of(tmp_path):
    path = save_png(Image.new("RGB", (16, 16)), tmp_path / "00.png", {"prompt": "ein Zug, größer", "step": "9"})
    with Image.open(io.BytesIO(path.read_bytes())) as picture:
        assert (picture.info["prompt"], picture.info["step"]) == ("ein Zug, größer", "9")
