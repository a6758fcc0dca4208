"""What the groups hold, as a table beside the paper's section 5, from the result of `focus groups analyse`."""

from __future__ import annotations

from pathlib import Path

import pandas

from focus.errors import UserError
from focus.paper import layout, printed
from focus.paper.formats import percent, sentence
from focus.paper.layout import Grid
from focus.provenance import read_result, write_atomically

TITLE = "What the groups hold (the paper's section 5)"
CATEGORIES = {
    "ADJ": "adjectives",
    "ADP": "prepositions",
    "ADV": "adverbs",
    "AUX": "auxiliaries",
    "CCONJ": "conjunctions",
    "DET": "determiners",
    "INTJ": "interjections",
    "NOUN": "nouns",
    "NUM": "numerals",
    "PART": "particles",
    "PRON": "pronouns",
    "PROPN": "names",
    "PUNCT": "punctuation",
    "SCONJ": "subordinators",
    "SPACE": "spaces",
    "SYM": "symbols",
    "VERB": "verbs",
    "X": "other",
}
COLUMNS = [
    *("layer", "group", "metric", "value", "text", "paper"),
    *("model", "corpus", "method", "seed", "device", "dtype", "code"),
]
LISTED = 5  # top tokens a row
LEAST_OF_EVEN = 0.5
"""Share of an even group below which a group's purity is not set beside the paper's, whose groups hold at least 0.8."""


def load(path: Path) -> dict:
    """One result. Raises UserError when the file is missing or another kind of result."""
    result = read_result(path)
    if result["experiment"] != "groups":
        raise UserError(f"{path}: expected the result of focus groups analyse, got one of {result['experiment']}")
    return result


def write(result_path: Path, output_prefix: Path) -> None:
    """Write `output_prefix`.csv, .md, .html and .tex."""
    result = load(result_path)
    grids, notes = _grids(result["metrics"]), _notes(result)
    write_atomically(Path(f"{output_prefix}.csv"), frame(result).to_csv(index=False))
    write_atomically(Path(f"{output_prefix}.md"), layout.markdown(TITLE, grids, notes))
    write_atomically(Path(f"{output_prefix}.html"), layout.page(TITLE, grids, notes))
    write_atomically(Path(f"{output_prefix}.tex"), layout.latex("groups", TITLE, grids, notes))


def frame(result: dict) -> pandas.DataFrame:
    """Every layer and group as a tidy frame in full precision, the best layer with its tokens, categories and pairs.

    Printed numbers stand at the best layer; they and all others but information are shares of 0 to 1.
    """
    settings, provenance, metrics = result["settings"], result["provenance"], result["metrics"]
    origin = {name: settings[name] for name in ("model", "corpus", "method", "seed")}
    origin |= {name: provenance[name] for name in ("device", "dtype", "code")}
    lines = []
    for number, layer in enumerate(metrics["layers"]):
        best = number == metrics["best"]["layer"]
        paper = _paper() if best else {}
        known = {name: layer[name] for name in ("confidence", "purity", "information")}
        known |= {"punctuation": punctuation(layer), "smallest_share": shares(layer)[0]}
        known |= {"largest_share": shares(layer)[1]}
        for null in ("shuffled", "by_token"):
            known |= {f"{null}_{name}": value for name, value in layer[null].items()}
        for chosen in ("listed", "strong", "chance"):
            known |= {f"far_{chosen}_{name}": value for name, value in (layer["far"][chosen] or {}).items()}
        lines += [{"layer": number, "metric": name, "value": known[name], "paper": paper.get(name)} for name in known]
        for pair in layer["far"]["pairs"] if best else []:
            text = f"{pair['a']} ({pair['a_position']}) {pair['b']} ({pair['b_position']})"
            lines.append({"layer": number, "metric": "far_pair", "value": pair["affinity"], "text": text})
        for index, group in enumerate(layer["groups"]):
            where = {"layer": number, "group": index}
            for name in ("share", "confidence", "purity"):
                lines.append(where | {"metric": name, "value": group[name], "text": group["category"]})
            details = [("category", *item) for item in group["categories"].items()]
            details += [("token", *item) for item in group["top"]]
            for metric, text, value in details if best else []:
                lines.append(where | {"metric": metric, "value": value, "text": text})
    table = pandas.DataFrame([line | origin for line in lines], columns=COLUMNS)
    return table.astype({"group": "Int64"})


def punctuation(layer: dict) -> float:
    """The largest share of punctuation; see `most`."""
    return most(layer, "PUNCT")


def most(layer: dict, category: str) -> float:
    """The largest share of a category that a group of at least LEAST_OF_EVEN / K of the layer's tokens has."""
    least = LEAST_OF_EVEN / len(layer["groups"])
    return max(group["categories"].get(category, 0.0) for group in layer["groups"] if group["share"] >= least)


def shares(layer: dict) -> tuple[float, float]:
    """Shares of the smallest and of the largest group."""
    found = [group["share"] for group in layer["groups"]]
    return min(found), max(found)


def token(text: str) -> str:
    """A token as a table shows it: spaces alone are named by their escapes."""
    return text if text.strip() else repr(text)


def _paper() -> dict[str, float]:
    """What the paper prints, as shares."""
    return {
        "punctuation": printed.number("groups.g4.purity") / 100,
        "confidence": printed.number("groups.mean_confidence"),
        "smallest_share": printed.number("groups.smallest_share") / 100,
        "largest_share": printed.number("groups.largest_share") / 100,
    }


def _grids(metrics: dict) -> list[Grid]:
    best = metrics["best"]["layer"]
    return [
        _groups(metrics["layers"][best], best, metrics["best"]["rule"]),
        _papers_groups(),
        _against(metrics["layers"][best], metrics["best"]),
        _pairs(metrics["layers"][best]["far"], best, metrics),
        _layers(metrics["layers"]),
    ]


def _groups(layer: dict, number: int, rule: str) -> Grid:
    lines = []
    for index, group in enumerate(layer["groups"]):
        if not group["top"]:
            lines.append([f"G{index}", "-", "empty", percent(0.0), "-", "-"])
            continue
        top = ", ".join(f"{token(text)} {100 * share:.0f} %" for text, share in group["top"][:LISTED])
        line = [f"G{index}", CATEGORIES.get(group["category"], group["category"]), top, percent(group["share"])]
        lines.append([*line, f"{group['confidence']:.2f}", percent(group["purity"])])
    header = ["Group", "Most frequent category", "Top tokens", "Share", "Confidence", "Purity"]
    return Grid(f"Layer {number}", header, lines, [f"Layers count from 0; shown is {rule}."], text=3)


def _papers_groups() -> Grid:
    lines = []
    for row in printed.rows_of("groups").values():
        top = ", ".join(text if share is None else f"{text} {share} %" for text, share in row["top"].items())
        lines.append([row["label"], row["category"], top, f"{row['purity']} %" if "purity" in row else "-"])
    known = printed.printed()["groups"]
    said = f"{known['model']} on {known['corpus']}. Group numbers have no meaning across models or layers."
    return Grid("The paper's groups", ["Group", "Category", "Top tokens", "Purity"], lines, [said], text=3)


def _against(layer: dict, best: dict) -> Grid:
    paper, (smallest, largest) = _paper(), shares(layer)
    shuffled, by_token = layer["shuffled"], layer["by_token"]
    p_values = best["p_values"]
    lines = [
        ["Purity of all groups", percent(layer["purity"]), "-"],
        ["Purity of shuffled groups", f"{percent(shuffled['purity'])} ± {100 * shuffled['spread']:.1f}", "-"],
        ["p-value against shuffled groups", p_value(p_values["shuffled"]), "-"],
        ["Purity of groups drawn by token", f"{percent(by_token['purity'])} ± {100 * by_token['spread']:.1f}", "-"],
        ["p-value against groups drawn by token", p_value(p_values["by_token"]), "-"],
        ["Information on the category, bits", f"{layer['information']:.2f}", "-"],
        ["Information, shuffled groups", f"{shuffled['information']:.2f}", "-"],
        ["Information, groups drawn by token", f"{by_token['information']:.2f}", "-"],
        ["Largest share of punctuation in a group", percent(punctuation(layer)), percent(paper["punctuation"])],
        ["Mean confidence", f"{layer['confidence']:.2f}", f"{paper['confidence']:.2f}"],
        ["Smallest group", percent(smallest), percent(paper["smallest_share"])],
        ["Largest group", percent(largest), percent(paper["largest_share"])],
    ]
    said = (
        "Purity: share of the tokens that are in their group's most frequent category. Shuffled: the groups dealt anew "
        "to the tokens. Drawn by token: each token of the vocabulary sent to one group at random; such groups know no "
        "grammar, yet are purer than shuffled ones, since most tokens have one category and stay whole. Both p-values "
        "count that this layer was chosen among all. Punctuation: of the groups with at least half an even group's "
        "tokens."
    )
    return Grid("Beside chance and the paper", ["Measure", "Here", "Paper"], lines, [said])


def _pairs(far: dict, number: int, metrics: dict) -> Grid:
    def line(pair: dict, source: str) -> list[str]:
        places = [pair["a_position"], pair["b_position"]]
        cells = [source, token(pair["a"]), token(pair["b"]), *map(str, places), str(places[1] - places[0])]
        return [*cells, f"{pair['affinity']:.3f}"]

    lines = [line(pair, "here") for pair in far["pairs"]]
    lines += [line(pair, "paper") for pair in printed.printed()["groups"]["pairs"]]
    passage = metrics["passage"]
    said = [
        f"Layer {number}, one window of {metrics['context']} tokens: {passage['document']}, from token "
        f"{passage['start']:,}; far is a distance above {metrics['window']}."
    ]
    if far["chance"]:
        said.append(
            "The same word twice: "
            + ", ".join(f"{percent(far[name]['same_word'])} of {what}" for name, what in STRENGTHS.items())
            + ". Of one category: "
            + ", ".join(f"{percent(far[name]['same_category'])} of {what}" for name, what in STRENGTHS.items())
            + "."
        )
    header = ["Where", "Earlier", "Later", "Position", "Position of later", "Distance", "Affinity"]
    return Grid("The strongest far pairs", header, lines, said, text=3)


STRENGTHS = {"listed": "the pairs listed", "strong": "the strongest hundredth", "chance": "all far pairs"}


def _layers(layers: list[dict]) -> Grid:
    lines = []
    for number, layer in enumerate(layers):
        shuffled, by_token, far = layer["shuffled"], layer["by_token"], layer["far"]
        smallest, largest = shares(layer)
        line = [str(number), percent(layer["purity"]), percent(shuffled["purity"]), p_value(shuffled["p_value"])]
        line += [percent(by_token["purity"]), p_value(by_token["p_value"]), percent(punctuation(layer))]
        line += [f"{layer['confidence']:.2f}", percent(smallest), percent(largest)]
        lines.append([*line, *(percent(far[name]["same_word"]) if far[name] else "-" for name in ("strong", "chance"))])
    header = ["Layer", "Purity", "Shuffled", "p", "By token", "p", "Most punctuation", "Confidence"]
    header += ["Smallest", "Largest", "Same word, strong pairs", "Same word, far pairs"]
    return Grid("Layer by layer", header, lines, ["p-values of a layer alone, not corrected for their number."], text=0)


def p_value(value: float) -> str:
    """Three decimals, or as small as it is."""
    return f"{value:.3f}" if value >= 0.001 else f"{value:.1g}"


def _notes(result: dict) -> list[str]:
    settings, provenance, metrics = result["settings"], result["provenance"], result["metrics"]
    adapter, model, revisions = settings["settings"]["adapter"], settings["model_settings"], provenance["revisions"]
    phases = [phase for phase in settings["settings"]["training"]["phases"] if phase["steps"]]
    trained = " then ".join(f"{phase['steps']} steps of {phase['trains']}" for phase in phases) or "not trained"
    tagger = revisions["tagger"]
    return [
        f"`{settings['model']}`: {sentence(revisions['model']['note'])} `{settings['corpus']}`: "
        f"{sentence(revisions['corpus']['note'])}",
        f"Method `{settings['method']}`: K={adapter['groups']}, w={model['window']}, tau={adapter['temperature']:g}, "
        f"balance {adapter['balance']}, {trained}, seed {settings['seed']}; read with {settings['attention']} "
        f"attention in {provenance['dtype']}.",
        f"{metrics['tokens']:,} tokens of {len(metrics['windows'])} held-out windows of {metrics['context']}; a token "
        "belongs to its likeliest group, and confidence is that group's probability.",
        f"Categories: universal parts of speech by {tagger['note']} (spaCy {tagger['spacy']}, {tagger['licence']}); a "
        "token has that of the word which covers its first character that is no space.",
        f"{settings['groups']['shuffles']:,} draws of each baseline; tokens of one text are not independent, so the "
        "p-values against shuffled groups are too small.",
    ]
