"""The paper's claims against the results: config/claims.yaml says what decides a claim, this file computes its verdict.

Verdicts: reproduced; within tolerance; contradicted; undecided (the difference is within its error); mixed over seeds,
models or texts; not comparable (a printed value, but other models or text here); not run. The last three and undecided
are never a pass.
"""

from __future__ import annotations

import json
from pathlib import Path

from focus.config import Experiment
from focus.paper import claim_sources, claims_page, evidence, gain, layout, printed, speed
from focus.paper.claim import Claim, load, questions
from focus.paper.evidence import Evidence
from focus.paper.verdicts import agreed
from focus.provenance import write_atomically


def write(
    claims_file: Path,
    experiment: Experiment,
    results_root: Path,
    output_json: Path,
    output_markdown: Path,
    *,
    partial: bool = False,
) -> None:
    """Write the verdicts as JSON, a line a claim, and as a page: Markdown, and HTML beside it.

    Raises UserError when a result that the scale names is missing, unless `partial`.
    """
    known = evidence.gather(experiment, results_root, partial)
    claims = load(claims_file)
    decided = with_sharing([decide(claim, known) for claim in claims])
    asked = json.dumps([each.model_dump() for each in questions(claims_file, claims)], ensure_ascii=False)
    lines = ",\n".join(json.dumps(claim, ensure_ascii=False) for claim in decided)
    about = f'"scale": {json.dumps(experiment.scale)}, "state": {json.dumps(known.state)}'
    content = f'{{{about}, "questions": {asked}, "claims": [\n{lines}\n]}}'
    title, page = f"Claims at scale {experiment.scale}", claims_page.page(decided, known)
    write_atomically(Path(output_json), content + "\n")
    write_atomically(Path(output_markdown), layout.markdown(title, *page))
    write_atomically(Path(output_markdown).with_suffix(".html"), layout.page(title, *page))


def decide(claim: Claim, known: Evidence) -> dict:
    """The claim with its verdict, and the case behind it for each model and corpus."""
    cases = _cases(claim, known)
    run = [case for case in cases if case["verdict"] != "not run"]
    run = [case for case in run if case["verdict"] != "not comparable"] or run
    verdict = agreed(
        [case["verdict"] for case in run], "models" if len({case["model"] for case in run}) > 1 else "texts"
    )
    numbers = {name: printed.number(name) for name in claim.printed}
    decided = claim.model_dump() | {"printed": numbers, "verdict": verdict or "not run", "cases": cases}
    said = {"rule": claims_page.rule, "quantity": claims_page.quantity, "unit": claims_page.unit}
    return decided | {name: words(decided) for name, words in said.items()}


def with_sharing(decided: list[dict]) -> list[dict]:
    """The claims, each with `same_as`: the first whose verdict rests on the same numbers, itself; "" where none does.

    The same numbers are those of one metric, of the same rows or places in files, on the same models, texts and tasks,
    whatever the claim says of them.
    """
    first: dict[str, str] = {}
    keys = [_numbers(claim) for claim in decided]
    return [
        claim | {"same_as": first.setdefault(key, claim["id"]) if key else ""}
        for claim, key in zip(decided, keys, strict=True)
    ]


def _numbers(claim: dict) -> str:
    """What tells the numbers behind a verdict from others; nothing where there are none."""
    measured = [
        (case["model"], case["corpus"], seed, one["name"], one["value"])
        for case in claim["cases"]
        for seed, found in case["seeds"].items()
        for one in found["measured"]
    ]
    told = {key: claim[key] for key in ("metric", "subject", "reference", "source", "against", "percent", "paired")}
    return json.dumps([told, measured], sort_keys=True) if measured else ""


def _cases(claim: Claim, known: Evidence) -> list[dict]:
    if claim.out_of_reach:
        return [evidence.empty_case("", "", claim.out_of_reach)]
    if claim.metric == "arithmetic":
        return evidence.of_arithmetic(claim)
    if claim.metric == "source":
        return claim_sources.cases(claim, known)
    if claim.metric in gain.SHOWN_BY:
        return evidence.of_gains(claim, known)
    return evidence.of_attention(claim, known) if claim.metric in speed.METRICS else evidence.of_rows(claim, known)
