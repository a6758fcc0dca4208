import io
import json
import math
import re
import subprocess
import sys
from statistics import stdev

import pandas
import pytest
from paper_results import REPOSITORY, experiment, write_answers, write_results

from focus import scales
from focus.config import Experiment, Row
from focus.errors import UserError
from focus.paper import layout, printed, rows, tables
from focus.paper.statistics import Flips

SHIFTS = {"focus/soft": -0.02, "focus/hard-k1": 0.3, "full-finetuning/full": -0.15}


def made(root, settings: Experiment, table: str = "table1", **options) -> dict[str, str]:
    tables.write(table, settings.tables[table], settings, root, root / "tables" / table, **options)
    return {suffix: (root / f"tables/{table}.{suffix}").read_text() for suffix in ("csv", "md", "tex")}


def cells(page: str, heading: str) -> dict[str, list[str]]:
    """The rows of the grid under a heading, by their first cell."""
    grid = page.split(f"## {heading}\n")[1].split("\n## ", maxsplit=1)[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in grid.splitlines() if line[:1] == "|"]
    return {line[0]: line[1:] for line in lines}


@pytest.fixture
def results(tmp_path):
    settings = experiment()
    write_results(tmp_path, settings, SHIFTS, lost=1)
    (tmp_path / "models").mkdir()
    (tmp_path / "models/gpt2-mini.json").write_text(json.dumps({"note": "stand-in for GPT-2 124M: a small one"}))
    return tmp_path


def test_each_number_stands_beside_the_papers(results):
    grid = cells(made(results, experiment())["md"], "gpt2-mini (stand-in): perplexity")
    header, soft = grid["Row"], grid["Focus, soft"]
    found = dict(zip(header, soft, strict=True))
    assert float(found["Ratio to pretrained"].split(" ± ")[0]) == pytest.approx(math.exp(-0.02), abs=1e-3)
    assert (found["Paper's perplexity"], found["Paper's ratio"]) == ("36.2", f"{36.2 / 42.8:.3f}")
    assert found["Far pairs kept"] == "100.0 %"
    assert dict(zip(header, grid["Focus, hard k=1"], strict=True))["Far pairs kept"] == "30.0 %"
    assert found["Trained parameters"] == "69,120"


def test_accuracy_shows_flips_and_positions_beyond_the_window(results):
    grid = cells(made(results, experiment())["md"], "smollm2-135m-instruct: accuracy, percent")
    assert grid["Row"][0] == "HellaSwag (n=10)"
    assert grid["Pretrained"][:2] == ["70.0 ± 15.3", "31.1"]
    low, high = 100 * Flips(0, 1, 10).low, 100 * Flips(0, 1, 10).high
    assert grid["Focus, soft"][0] == f"60.0 ± 16.3; change -10.0 [{low:.1f}, {high:+.1f}] (+0 -1), p=1.00"
    assert grid["Positions that see beyond the window"][0] == "3.1 %"
    assert grid["Scored positions that do"][0] == "70.0 %"


def test_written_answers_have_a_grid_of_their_own(results):
    settings = experiment()
    exhibit = settings.tables["headline"].model_copy(update={"generation": True})
    model, corpus = exhibit.models[0], exhibit.corpus
    for row, correct in zip(exhibit.rows, ([1, 1, 0, 0], None, [1, 0, 0, 1], [1, 1, 0, 0]), strict=True):
        write_answers(results, settings, (model, corpus, row.method, row.variant, 0), correct)
    written = made(results, settings.model_copy(update={"tables": {"headline": exhibit}}), "headline")
    grid = cells(written["md"], f"{model}: GSM8K, 8-shot, 4 items, percent")
    assert grid["Pretrained"] == ["50.0 ± 28.9", "-", "50.0 ± 28.9", "12.50"]
    assert grid["Focus, soft"] == ["cannot generate", "-", "-", "-"]
    assert grid["Focus, hard k=1"][0] == "50.0 ± 28.9; change +0.0 [-60.4, +60.4] (+1 -1), p=1.00"
    assert "context of 2048" in written["md"]
    table = pandas.read_csv(io.StringIO(written["csv"]))
    lost = table[(table.metric == "gsm8k_lost") & (table.row == "Focus, hard k=1")]
    assert list(lost.value) == [1]
    assert "gsm8k" not in set(table[table.row == "Focus, soft"].metric)


def test_the_caption_says_what_was_measured(results):
    page = made(results, experiment())["md"]
    phase = experiment().methods["focus"].training.phases[0]
    for said in (
        "Scale `laptop`; text `austen`",
        "On `austen`: context 512, window 64, stride 512; 8 windows, 800 tokens scored, from held-out book0, book1; "
        "float32 on cpu.",
        "Standard errors are over windows (2 held-out documents).",
        f"Focus: {phase.steps} steps of centroids at {phase.learning_rate}, {phase.steps * 512:,} tokens in windows of "
        "512, seed 0",
        "Stand-in for GPT-2 124M: a small one.",
        "One seed, so no spread over seeds.",
    ):
        assert said in page


def test_rows_are_compared_with_the_pretrained_model_on_their_text_and_context(tmp_path):
    settings = experiment()
    shifts = {"pretrained/full-t1024": 0.5, "focus/hard-k2-t1024": 0.7, "focus/hard-k2": 0.1}
    write_results(tmp_path, settings, shifts)
    grid = cells(made(tmp_path, settings, "longcontext")["md"], "smollm2-135m-instruct: perplexity")
    place = grid["Row"].index("Ratio to pretrained")
    for label, change in {"Focus, hard k=2, T=1024": 0.2, "Focus, hard k=2": 0.1}.items():
        assert float(grid[label][place].split(" ± ")[0]) == pytest.approx(math.exp(change), abs=1e-3)
    grid = cells(made(tmp_path, settings, "domains")["md"], "gpt2-mini: perplexity")
    assert grid["Pretrained, wikipedia"][place] == "-"
    assert grid["Full attention, fine-tuned, wikipedia"][place].startswith("1.000")


def test_what_the_paper_prints_over_fine_tuning_is_shown_over_fine_tuning(tmp_path):
    settings = experiment()
    shifts = {"full-finetuning/full": -0.15, "focus-k8-finetuned/soft": -0.05, "scratch-focus/soft": 0.3}
    write_results(tmp_path, settings, shifts)
    written = made(tmp_path, settings, "domains")
    grid = cells(written["md"], "gpt2-mini: perplexity")
    for text, paper in (("", 30.3 / 31.4), (", wikipedia", 21.3 / 21.4)):
        found = dict(zip(grid["Row"], grid[f"Focus K=8, fine-tuned, soft{text}"], strict=True))
        assert ratio(found["Ratio to pretrained"]) == pytest.approx(math.exp(-0.05), abs=1e-3)
        assert ratio(found["Ratio to Full attention, fine-tuned"]) == pytest.approx(math.exp(0.1), abs=1e-3)
        assert found["Paper's ratio"] == f"{paper:.3f}"
    table = pandas.read_csv(io.StringIO(written["csv"]))
    soft = table[table.row == "Focus K=8, fine-tuned, soft, wikipedia"].set_index("metric")
    assert soft.against["perplexity_ratio_to_baseline"] == "Full attention, fine-tuned, wikipedia"
    assert soft.value["perplexity_ratio_to_baseline"] == pytest.approx(math.exp(0.1), abs=1e-3)
    assert soft.paper["perplexity_ratio_to_baseline"] == pytest.approx(21.3 / 21.4)
    assert soft.against["perplexity_ratio"] == "Pretrained, wikipedia"
    assert math.isnan(soft.paper["perplexity_ratio"])
    scratch = cells(made(tmp_path, settings, "scratch")["md"], "gpt2-mini: perplexity")
    assert "Ratio to pretrained" not in scratch["Row"]
    found = dict(zip(scratch["Row"], scratch["Focus from scratch, soft"], strict=True))
    assert ratio(found["Ratio to Full attention from scratch"]) == pytest.approx(math.exp(0.3), abs=1e-3)


def ratio(cell: str) -> float:
    return float(cell.split(" ± ", maxsplit=1)[0])


@pytest.mark.parametrize("scale", ["config", "smoke", "overnight", "paper"])
def test_a_printed_baseline_that_no_row_stands_for_is_the_pretrained_model(scale):
    config = REPOSITORY / "config"
    settings = scales.load([config / name for name in dict.fromkeys(("config.yaml", f"{scale}.yaml"))])
    for exhibit in settings.tables.values():
        shown = {row.paper for row in exhibit.rows}
        for row in exhibit.rows:
            base = printed.against(row.paper) if row.paper else None
            assert base is None or base in shown or "retrained" in printed.row(base)["label"], (exhibit.title, base)


def test_what_could_not_be_compared_is_a_dash(tmp_path):
    settings = experiment()
    write_results(tmp_path, settings)
    for path in tmp_path.glob("perplexity/gpt2-mini/*/full-finetuning/full/seed0.json"):
        path.unlink()
    grid = cells(made(tmp_path, settings, "domains", partial=True)["md"], "gpt2-mini: perplexity")
    found = dict(zip(grid["Row"], grid["Focus K=8, fine-tuned, soft"], strict=True))
    assert found["Ratio to Full attention, fine-tuned"] == "-"
    assert ratio(found["Ratio to pretrained"]) == 1.0


def test_the_caption_names_every_text_and_context_and_the_tokens_of_training(tmp_path):
    settings = experiment()
    write_results(tmp_path, settings)
    page = made(tmp_path, settings, "longcontext")["md"]
    for context in (512, 1024, 2048, 4096):
        assert f"On `austen`: context {context}, window 64, stride 512; " in page
    steps = settings.methods["focus"].training.phases[0].steps
    trained = re.findall(r"Focus: (\d+) steps of centroids at 0\.003, ([\d,]+) tokens in windows of (\d+)", page)
    assert trained == [(str(steps), f"{512 * steps:,}", "512")]
    page = made(tmp_path, settings, "domains")["md"]
    for corpus in ("austen", "wikipedia", "essays"):
        assert f"On `{corpus}`: context 1024, " in page
    assert "texts `austen`; `wikipedia`; `essays`." in page


def test_without_its_result_the_tokens_of_training_are_left_out(tmp_path):
    settings = experiment()
    write_results(tmp_path, settings)
    (tmp_path / "training/smollm2-135m-instruct/austen/focus/seed0/result.json").unlink()
    steps = settings.methods["focus"].training.phases[0].steps
    assert f"Focus: {steps} steps of centroids at 0.003, seed 0." in made(tmp_path, settings, "headline")["md"]


def test_what_the_paper_does_not_give_is_not_said(tmp_path):
    settings = experiment()
    write_results(tmp_path, settings)
    for table in settings.tables:
        assert "None" not in made(tmp_path, settings, table)["md"]


def test_adapters_are_told_by_what_differs(tmp_path):
    settings = experiment()
    write_results(tmp_path, settings)
    page = made(tmp_path, settings, "table8")["md"]
    (line,) = [line for line in page.splitlines() if line.startswith("Adapters: ")]
    common, *others = line.removeprefix("Adapters: ").rstrip(".").split("; ")
    assert common == "K=8, w=128, d_g=16, tau=0.1, gate log_sigmoid, 4 sinks"
    every = settings.methods["collapse-recluster"].adapter.recluster_every
    assert others == [
        "Softmax, nothing: balance softmax",
        "Entropy and balance loss: balance entropy, balance weight 0.01, entropy weight 0.01",
        "Balance loss x5: balance entropy, balance weight 0.05, entropy weight 0.01",
        "Stop-gradient on inputs: balance stop_gradient, balance weight 0.01, entropy weight 0.01",
        "EMA centroids and projection: balance ema, ema momentum 0.95",
        f"Reclustering: balance recluster, recluster every {every}",
        "Sinkhorn: N=10, balance sinkhorn",
        "Potentials (ours): N=10, balance potentials, potential momentum 0.9",
        "A closed, centroids frozen: balance softmax, centroids frozen",
        "B closed, inputs detached: balance softmax, inputs detached",
        "C closed, projection frozen: balance softmax, projection frozen",
    ]
    page = made(tmp_path, settings, "table9")["md"]
    for said in ("K=16: K=16", "w=256: w=256", "tau=0.2: tau=0.2", "N=3: N=3", "K=2, w=16: K=2, w=16"):
        assert f"; {said};" in page


def test_the_largest_group_is_the_probes_where_every_row_has_one(tmp_path):
    settings = experiment()
    write_results(tmp_path, settings)
    page = made(tmp_path, settings, "balance")["md"]
    grid = cells(page, "gpt2-mini: balance of the groups")
    found = dict(zip(grid["Row"], grid["Sinkhorn, centroids only, soft"], strict=True))
    assert (found["Largest group"], found["Stability"], found["Collapsed at step"]) == ("40.0 %", "0.900", "never")
    apart = f"{settings.methods['balance-sinkhorn'].training.probe_every} steps apart"
    for said in ("over the first 4 training windows together", "more than 90.0 % of the tokens", apart):
        assert said in page
    assert "Stability: " in page
    assert "Far pairs kept: " not in page
    page = made(tmp_path, settings, "table9")["md"]
    assert "of each held-out window alone" in page
    assert "Stability: " not in page
    assert "Collapsed at step: " not in page


def test_seeds_that_did_not_collapse_are_counted(tmp_path):
    settings = experiment(seeds=[0, 1, 2])
    write_results(tmp_path, settings)
    steps = {"softmax": [None, 120, None], "entropy": [100, 110, 120], "ema": [None] * 3, "recluster": [30, None, 50]}
    for method, found in steps.items():
        for seed, step in enumerate(found):
            path = tmp_path / f"training/gpt2-mini/austen/collapse-{method}/seed{seed}/result.json"
            result = json.loads(path.read_text())
            result["metrics"]["collapse_step"] = step
            path.write_text(json.dumps(result))
    grid = cells(made(tmp_path, settings, "table8")["md"], "gpt2-mini: balance of the groups")
    place = grid["Row"].index("Collapsed at step")
    labels = [f"{settings.methods[f'collapse-{name}'].label}, soft" for name in steps]
    assert [grid[label][place] for label in labels] == [
        "120 (1 of 3)",
        "110 ± 10 (3 of 3)",
        "never",
        "40 ± 14 (2 of 3)",
    ]


def test_an_ablation_shows_its_largest_group_beside_the_papers(tmp_path):
    settings = experiment()
    write_results(tmp_path, settings)
    grid = cells(made(tmp_path, settings, "table9")["md"], "gpt2-mini: perplexity")
    found = dict(zip(grid["Row"], grid["Focus K=8, soft"], strict=True))
    assert (found["Largest group"], found["Paper's largest group, percent"]) == ("30.0 %", "21")
    assert "Far pairs kept" not in found


def test_no_cell_is_blank_and_the_papers_other_rows_are_not_run(results):
    for table in ("table1", "table2"):
        page = made(results, experiment(), table)["md"]
        assert not re.search(r"\| +\|", page)
    others = cells(made(results, experiment(), "table2")["md"], "The paper's other rows")
    assert others["Mistral 7B, Focus"] == ["11.6", f"{11.6 / 10.8:.3f}", "not run"]


def test_csv_is_tidy_and_in_full_precision(results):
    frame = pandas.read_csv(io.StringIO(made(results, experiment())["csv"]))
    rows_found = frame[(frame.model == "gpt2-mini") & (frame.method == "focus") & (frame.variant == "soft")]
    by_metric = rows_found.set_index("metric")
    path = "perplexity/gpt2-mini/austen/focus/soft/seed0.json"
    loss = json.loads((results / path).read_text())["metrics"]["loss"]
    assert by_metric.value["perplexity"] == pytest.approx(math.exp(loss), rel=1e-12)
    assert by_metric.result["perplexity"] == path
    assert by_metric.paper["perplexity"] == 36.2
    assert by_metric.value["hellaswag_p_value"] == 1.0
    assert by_metric.value["hellaswag_change"] == pytest.approx(-10)
    assert by_metric.value["hellaswag_change_low"] == pytest.approx(100 * Flips(0, 1, 10).low)
    assert by_metric.value["hellaswag_change_high"] == pytest.approx(100 * Flips(0, 1, 10).high)
    assert by_metric.value["documents"] == 2
    assert by_metric.value["layer0_dominance"] == 0.3
    assert not frame.duplicated(["model", "row", "seed", "metric"]).any()


def test_several_seeds_show_their_spread(tmp_path):
    settings = experiment(seeds=[0, 1, 2])
    write_results(tmp_path, settings, {f"focus/soft/{seed}": 0.1 * seed for seed in (0, 1, 2)})
    page = made(tmp_path, settings)["md"]
    grid = cells(page, "gpt2-mini: perplexity")
    found = dict(zip(grid["Row"], grid["Focus, soft"], strict=True))
    assert re.fullmatch(r"± \d\.\d\d \(3\)", found["Over seeds"])
    assert float(found["Ratio to pretrained"].split(" ± ")[0]) == pytest.approx(math.exp(0.1), abs=1e-3)
    spread = stdev(math.exp(0.1 * seed) for seed in (0, 1, 2))
    assert found["Ratio to pretrained"].endswith(f", seeds ± {spread:.3f} (3)")
    assert "seeds 0, 1, 2" in page
    scores = cells(page, "gpt2-mini: accuracy, percent")
    assert scores["Pretrained"][0] == "70.0 ± 15.3"
    assert re.fullmatch(
        r"70\.0 ± 15\.3, seeds ± 0\.0 \(3\); change \+0\.0 \[-27\.8, \+27\.8\] \(\+0 -0\), p=1\.00",
        scores["Focus, soft"][0],
    )


def test_missing_results_stop_or_are_said(results):
    (results / "perplexity/gpt2-mini/austen/focus/hard-k1/seed0.json").unlink()
    with pytest.raises(
        UserError, match=r"focus/hard-k1/seed0.json: expected the result of Focus, hard k=1 on gpt2-mini"
    ):
        made(results, experiment())
    written = made(results, experiment(), partial=True)
    assert cells(written["md"], "gpt2-mini (stand-in): perplexity")["Focus, hard k=1"][0] == "not run"
    assert "not run: no perplexity/gpt2-mini/austen/focus/hard-k1/seed0.json" in written["csv"]


def test_a_row_shows_the_seeds_it_has_and_names_the_others(tmp_path):
    settings = experiment(seeds=[0, 1, 2])
    write_results(tmp_path, settings, {f"focus/soft/{seed}": 0.1 * seed for seed in (0, 1, 2)})
    (tmp_path / "perplexity/gpt2-mini/austen/focus/soft/seed1.json").unlink()
    page = made(tmp_path, settings, partial=True)["md"]
    grid = cells(page, "gpt2-mini: perplexity")
    assert dict(zip(grid["Row"], grid["Focus, soft"], strict=True))["Over seeds"].endswith("(2)")
    assert "Focus, soft: seed 1 of 3 not run yet." in page
    assert "seeds 0, 2" in page


def test_a_model_outside_the_run_is_not_run(results):
    settings = experiment(models=["gpt2-mini"])
    table = settings.tables["headline"]
    (entry, *_) = rows.gather(table, settings, results)
    assert (entry.model, entry.runs, entry.reason) == (
        "smollm2-135m-instruct",
        {},
        "not run: this run leaves the model out",
    )
    assert "not run" in made(results, settings, "headline")["md"]


def test_a_misplaced_result_is_refused(results):
    source = results / "perplexity/gpt2-mini/austen/focus/soft/seed0.json"
    (results / "perplexity/gpt2-mini/austen/window/full/seed0.json").write_text(source.read_text())
    with pytest.raises(UserError, match="expected a result of gpt2-mini, window, seed 0"):
        made(results, experiment())


def test_latex_is_balanced_and_escaped(results):
    text = made(results, experiment())["tex"]
    assert text.count(r"\begin{") == text.count(r"\end{")
    assert not re.search(r"(?<!\\)[%#_]", text)
    assert "±" not in text
    depth = 0
    for character in re.sub(r"\\[{}]", "", text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        assert depth >= 0
    assert depth == 0
    fitted = r"\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{\begin{tabular}"
    assert text.count(fitted) == text.count(r"\end{tabular}}") == text.count(r"\begin{tabular}") > 0
    for tabular in re.findall(r"\\begin\{tabular\}\{(\w+)\}(.*?)\\end\{tabular\}", text, re.DOTALL):
        lines = [line for line in tabular[1].splitlines() if line.endswith(r"\\")]
        assert {line.count(" & ") + 1 for line in lines} == {len(tabular[0])}
    assert layout.escape("50 % of `a_b` & more") == r"50 \% of \texttt{a\_b} \& more"


def test_tables_are_rewritten_with_the_same_bytes(results):
    assert made(results, experiment()) == made(results, experiment())


def test_printed_rows_are_known_or_refused():
    assert printed.number("table7.gpt2_124m.k2.perplexity") == 41.3
    assert printed.baseline("table2.mistral_7b.focus")["perplexity"] == 10.8
    for exhibit in [*experiment().tables.values(), *experiment().figures.values()]:
        for row in exhibit.rows:
            assert row.paper is None or printed.row(row.paper)
    with pytest.raises(UserError, match=r"expected a printed row .* got table1.nothing"):
        rows.printed_value(rows.Entry("m", "c", Row(method="a", paper="table1.nothing"), "", "", ""), "perplexity")
    with pytest.raises(UserError, match=r"expected a printed number, got table1\.focus\.speedup"):
        printed.number("table1.focus.speedup")


def test_tables_figures_and_claims_need_no_model():
    imports = "import sys, focus.paper.tables, focus.paper.figures, focus.paper.dominance, focus.paper.claims"
    check = f"{imports}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_html_holds_the_same_cells_escaped(results):
    written = made(results, experiment())
    page = (results / "tables/table1.html").read_text()
    for row in cells(written["md"], "gpt2-mini (stand-in): perplexity").values():
        assert all(f">{cell.replace(chr(39), '&#x27;')}</" in page for cell in row if "-:" not in cell)
    grid = layout.Grid("a < b", ["Row", "`x`"], [["<script>", "1"]])
    assert "<script>" not in layout.page("t", [grid], [])
    assert "<code>x</code>" in layout.page("t", [grid], [])
