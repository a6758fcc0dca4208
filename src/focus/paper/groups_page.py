"""A passage coloured by group, one layer at a time: a single HTML file that needs no network."""

from __future__ import annotations

import html
import json
from pathlib import Path

from focus.paper.formats import sentence
from focus.paper.groups import CATEGORIES, load, token
from focus.provenance import write_atomically

STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #fdfdfb; --line: #ccc; --s: 80%; --l: 74%; }
@media (prefers-color-scheme: dark) { :root { --ink: #eee; --paper: #17181a; --line: #444; --s: 60%; --l: 34%; } }
body { font: 16px/1.9 Georgia, serif; color: var(--ink); background: var(--paper); max-width: 46em; margin: 2em auto;
  padding: 0 1em; }
h1 { font-size: 1.3em; line-height: 1.3; }
label, select, table, .note { font: 14px/1.5 sans-serif; }
#passage { white-space: pre-wrap; border: 1px solid var(--line); padding: 1em; }
.g { background: hsl(var(--h) var(--s) var(--l) / var(--a, 1)); border-radius: 3px; }
td, th { padding: .1em .8em .1em 0; text-align: left; font-weight: normal; }
td:nth-child(2), td:nth-child(3) { text-align: right; font-variant-numeric: tabular-nums; }
""".strip()

SCRIPT = """
const data = JSON.parse(document.getElementById("data").textContent);
const tokens = [...document.querySelectorAll("#passage span")];
const choice = document.getElementById("layer");
const hue = group => Math.round(360 * group / data.count);
function show() {
  const layer = data.layers[choice.value];
  tokens.forEach((token, i) => {
    token.style.setProperty("--h", hue(layer.groups[i]));
    token.style.setProperty("--a", Math.max(layer.confidence[i], 15) / 100);
    token.title = `G${layer.groups[i]}, ${layer.confidence[i]} %, ${data.categories[i]}`;
  });
  const rows = layer.legend.map((cells, group) => {
    const row = document.createElement("tr");
    cells.forEach((text, column) => {
      const cell = document.createElement("td");
      const mark = document.createElement("span");
      mark.textContent = text;
      if (column === 0) { mark.className = "g"; mark.style.setProperty("--h", hue(group)); }
      cell.append(mark);
      row.append(cell);
    });
    return row;
  });
  document.getElementById("legend").replaceChildren(...rows);
}
choice.addEventListener("change", show);
show();
""".strip()


def write(result_path: Path, output: Path) -> None:
    """Write the page. Raises UserError when the result is missing."""
    write_atomically(Path(output), page(load(result_path)))


def page(result: dict) -> str:
    """The whole file: text, script, style and data; the deeper a token's colour, the surer its group."""
    metrics, settings, revisions = result["metrics"], result["settings"], result["provenance"]["revisions"]
    passage, best = metrics["passage"], metrics["best"]["layer"]
    title = f"Groups of {settings['model']}, {settings['method']}"
    options = (_option(number, number == best) for number in range(len(metrics["layers"])))
    spans = (f'<span class="g">{html.escape(piece)}</span>' for piece in passage["pieces"])
    about = (
        f"{sentence(revisions['model']['note'])} {passage['document']}, held out, from token {passage['start']:,}: "
        f"{len(passage['pieces'])} tokens, the first of a window of {metrics['context']}. A colour is a group of the "
        "layer chosen, deeper where the token's probability of it is larger; point at a token for both and its part of "
        "speech. Colours mean nothing across layers."
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(title)}</title>",
            f"<style>\n{STYLE}\n</style>",
            f"<h1>{html.escape(title)}</h1>",
            f'<p class="note">{html.escape(about)}</p>',
            f'<p><label>Layer <select id="layer">{"".join(options)}</select></label></p>',
            f'<div id="passage">{"".join(spans)}</div>',
            "<table><thead><tr><th>Group<th>Share<th>Purity<th>Most frequent category<th>Top tokens</tr></thead>",
            '<tbody id="legend"></tbody></table>',
            f'<script id="data" type="application/json">{_embedded(_data(metrics))}</script>',
            f"<script>\n{SCRIPT}\n</script>",
            "</html>",
        ]
    )


def _option(layer: int, best: bool) -> str:
    """One layer to choose; the table's is chosen first."""
    return f'<option value="{layer}" selected>{layer}, as in the table' if best else f'<option value="{layer}">{layer}'


def _data(metrics: dict) -> dict:
    """What the script reads."""
    passage = metrics["passage"]
    layers = zip(metrics["layers"], passage["groups"], passage["confidence"], strict=True)
    return {
        "count": len(metrics["layers"][0]["groups"]),
        "categories": [CATEGORIES.get(name, name) for name in passage["categories"]],
        "layers": [
            {
                "groups": [int(number) for number in groups.split()],
                "confidence": [int(number) for number in confidence.split()],
                "legend": [_legend(number, group) for number, group in enumerate(layer["groups"])],
            }
            for layer, groups, confidence in layers
        ],
    }


def _legend(number: int, group: dict) -> list[str]:
    """Number, share, purity, category and top tokens of one group, as shown."""
    share = f"{100 * group['share']:.1f} %"
    if not group["top"]:
        return [f"G{number}", share, "-", "empty", ""]
    top = " ".join(token(text) for text, _ in group["top"])
    category = CATEGORIES.get(group["category"], group["category"])
    return [f"G{number}", share, f"{100 * group['purity']:.1f} %", category, top]


def _embedded(data: dict) -> str:
    """JSON that no text inside can end or turn into markup."""
    text = json.dumps(data, separators=(",", ":"), sort_keys=True)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
