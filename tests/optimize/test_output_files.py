"""Output files of a search: valid, self-contained, and written atomically."""

from __future__ import annotations

import asyncio
import errno
import json
import re
import shlex
import shutil
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from ridgeline.config.settings import Settings, settings_from
from ridgeline.config.sources import read_config
from ridgeline.errors import BadInput
from ridgeline.optimize.output import number_format
from ridgeline.optimize.output.config_file import final_settings, ladder_json, ridgeline_toml
from ridgeline.optimize.output.headline import headline
from ridgeline.optimize.output.vllm_command import VllmCommand, serve_command
from ridgeline.optimize.report.page import report
from ridgeline.optimize.result import LadderResult
from ridgeline.report.files import check_writable, write_files
from tests.optimize.simulated_servers import Fake, Physics, Quirks
from tests.optimize.test_search import INT8, only, search_ladder


@pytest.fixture(scope="module")
def result() -> LadderResult:
    """A search with a kept rung, one that broke quality, and one that crashed."""
    fake = Fake(
        Physics(int8_speed=1.6),
        quirks={
            INT8: Quirks(logit_noise=2.0),
            ("enable_chunked_prefill", True): Quirks(open_error=MemoryError("<b>&")),
        },
    )
    rungs = only("continuous-batching", "int8", "chunked-prefill")
    return asyncio.run(search_ladder(fake, rungs=rungs))


def page(result: LadderResult) -> str:
    return report(
        result,
        {
            "ridgeline.toml": VllmCommand(ridgeline_toml(result)),
            "The same for vLLM": serve_command(final_settings(result)),
        },
    )


class Checker(HTMLParser):
    """Balanced tags, and every address that the page would fetch."""

    VOID = {"meta", "br", "hr", "img", "link", "input"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [v for k, v in attrs if k in ("src", "href", "xlink:href") and v]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [v for k, v in attrs if k in ("src", "href", "xlink:href") and v]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.slow
def test_report_is_a_self_contained_page(result: LadderResult) -> None:
    html = page(result)
    checker = Checker()
    checker.feed(html)
    assert not checker.open
    assert not checker.fetched
    assert "url(" not in html
    assert "<script" not in html
    assert len(html) < 500_000


@pytest.mark.slow
def test_the_report_shows_every_rung_and_its_verdict(result: LadderResult) -> None:
    html = page(result)
    assert {"kept", "quality failed", "crashed"} <= {trial.verdict for trial in result.trials}
    for trial in result.trials:
        assert trial.label in html
        assert f">{trial.verdict}</span>" in html
    for name in ("The ladder", "The roofline", "Latency", "Cost", "Before and after"):
        assert f"<h2>{name}" in html
    assert not re.search(r"\b(nan|inf|None)\b", re.sub(r"<style>.*?</style>", "", html))
    assert headline(result) in html


def test_external_text_is_escaped(result: LadderResult) -> None:
    assert "<b>&" not in page(result)
    assert "&lt;b&gt;&amp;" in page(result)


def test_the_configuration_is_one_that_serve_accepts(result: LadderResult, tmp_path: Path) -> None:
    file = tmp_path / "ridgeline.toml"
    file.write_text(ridgeline_toml(result))
    tables = read_config(file)
    assert Settings(**tables.pop("engine")) == final_settings(result)
    assert not tables
    assert tomllib.loads(file.read_text())["provenance"]["workload"] == "chat-and-code"


def test_the_ladder_is_json_that_reads_back(result: LadderResult) -> None:
    text = ladder_json(result)
    assert msgspec.json.decode(text, type=LadderResult) == result
    assert json.loads(text)["trials"][0]["rung"] == result.trials[0].rung


def test_search_without_gain_writes_a_report(result: LadderResult) -> None:
    empty = msgspec.structs.replace(
        result, trials=(), total=None, peaks=None, final=result.baseline
    )
    html = page(empty)
    assert "No rung was tried" in html


def test_vllm_command_uses_vllms_flags_and_lists_missing_ones() -> None:
    settings = Settings(
        model="/models/my llama",
        batching="static",
        quantization="int8",
        max_num_seqs=8,
        enable_prefix_caching=False,
        num_threads=2,
        kv_cache_dtype="int8",
        activations="int16",
    )
    command = serve_command(settings)
    assert command.text == (
        "vllm serve '/models/my llama' --max-num-seqs 8 "
        "--no-enable-prefix-caching --enable-chunked-prefill"
    )
    notes = " ".join(command.notes)
    assert "quantization=int8" in notes and "kv_cache_dtype" in notes and "W8A16" in notes
    narrow = serve_command(Settings(kv_cache_dtype="bfloat16"))
    assert "--kv-cache-dtype bfloat16" in narrow.text
    assert not any("kv_cache_dtype" in note for note in narrow.notes)
    assert "static" in notes
    assert "VLLM_CPU_OMP_THREADS_BIND" in notes


# ---- writing -----------------------------------------------------------------------------------


def test_all_files_are_written_and_older_ones_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    check_writable(folder)
    (folder / "x").write_text("old")
    assert write_files(folder, {"x": "new", "y": "other"}) == (folder / "x", folder / "y")
    assert (folder / "x").read_text() == "new"
    assert sorted(path.name for path in folder.iterdir()) == ["x", "y"]


def test_full_disk_keeps_the_earlier_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path, {"x": "old"})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ridgeline.report.files.os.fsync", full)
    with pytest.raises(BadInput, match="No space left"):
        write_files(tmp_path, {"x": "new", "y": "other"})
    assert (tmp_path / "x").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_nearly_full_disk_is_found_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr("ridgeline.report.files.shutil.disk_usage", lambda folder: usage)
    with pytest.raises(BadInput, match="nearly full"):
        check_writable(tmp_path)


def test_file_in_place_of_the_output_folder_is_rejected(tmp_path: Path) -> None:
    place = tmp_path / "out"
    place.write_text("")
    with pytest.raises(BadInput, match="cannot write"):
        check_writable(place)


def test_speculation_is_translated_and_its_assumption_reported() -> None:
    settings = settings_from({"model": "m", "speculative_config": {"method": "ngram"}})
    command = serve_command(settings)
    words_of = shlex.split(command.text)
    config = json.loads(words_of[words_of.index("--speculative-config") + 1])
    assert config["method"] == "ngram" and config["num_speculative_tokens"] >= 1
    assert any("no depth by itself" in note for note in command.notes)
    line = number_format.settings_line({"max_num_seqs": None, "block_size": 32})
    assert line == "without --max-num-seqs --block-size 32"
    line = number_format.settings_line({"speculative_config": {"method": "ngram"}})
    assert shlex.split(line) == ["--speculative-config", '{"method": "ngram"}']
    for flags in ((("--no-eager", ""), ("--seed", "3")), {"--no-eager": "", "--seed": "3"}):
        line = number_format.settings_line({"max_num_seqs": 8, "server_flags": flags})
        assert line == "--max-num-seqs 8 --no-eager --seed 3"


def test_made_weights_are_named_by_their_original_for_vllm() -> None:
    command = serve_command(Settings(model="/cache/made/demo-int4-gptq"), "/models/llama")
    assert command.text.startswith("vllm serve /models/llama")
    assert "/cache/made/demo-int4-gptq" in command.notes[0]


def test_parallel_sizes_are_translated_for_vllm() -> None:
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "expert_parallel_size": 2}
    text = serve_command(Settings(model="Qwen/Qwen3-30B-A3B", **sizes)).text
    assert "--tensor-parallel-size 2 --pipeline-parallel-size 3 --enable-expert-parallel" in text
    assert "parallel" not in serve_command(Settings(model="Qwen/Qwen3-0.6B")).text
