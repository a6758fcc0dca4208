from snakemake.utils import min_version

min_version("9.27")


# Checks the config files itself, so it comes before Snakemake reads them.
include: "workflow/rules/common.smk"


configfile: "config/config.yaml"


report: "workflow/report/workflow.rst"


include: "workflow/rules/models.smk"
include: "workflow/rules/corpora.smk"
include: "workflow/rules/training.smk"
include: "workflow/rules/evaluation.smk"
include: "workflow/rules/gates.smk"
include: "workflow/rules/speed.smk"
include: "workflow/rules/groups.smk"
include: "workflow/rules/leak.smk"
include: "workflow/rules/paper.smk"


# On a cluster these stay where Snakemake runs: downloads, for which compute nodes have no network, and what is made in
# seconds from result files.
localrules:
    fetch_model,
    fetch_corpus,
    fetch_benchmark,
    fetch_tagger,
    table,
    speed_table,
    groups_table,
    leak_table,
    bits_table,
    figure,
    speed_figure,
    groups_figure,
    groups_page,
    bits_figure,
    claims,
    report_page,
    reference,


rule all:
    default_target: True
    input:
        there(
            [
                *sum((exhibit_files(*each) for each in MADE), []),
                *GROUPS_PAGE,
                "<results>/claims.md",
                "<results>/report.html",
            ]
        ),


rule tables:
    input:
        [exhibit_files(kind, name) for kind, name in MADE if kind == "tables"],


rule figures:
    input:
        [exhibit_files(kind, name) for kind, name in MADE if kind == "figures"],
        GROUPS_PAGE,


# A target per table and figure (headline is both; speed, groups, leak and bits are all of their own), and one per model with all of its rows.
for target in sorted({name for _, name in EXHIBITS}):

    rule:
        name:
            target
        input:
            [exhibit_files(kind, name) for kind, name in EXHIBITS if name == target],


if SPEED:

    rule speed:
        input:
            [exhibit_files(kind, name) for kind, name in SPEED],

    rule table6:
        input:
            exhibit_files("tables", "table6"),

    rule table7speed:
        input:
            exhibit_files("tables", "table7speed"),


if GROUPS:

    rule groups:
        input:
            [exhibit_files(kind, name) for kind, name in GROUPS],
            GROUPS_PAGE,


if LEAK:

    rule leak:
        input:
            [exhibit_files(kind, name) for kind, name in LEAK],


if BITS:

    rule bits:
        input:
            [exhibit_files(kind, name) for kind, name in BITS],


for model in experiment.models:

    rule:
        name:
            f"model_{identifier(model)}"
        input:
            [
                path
                for kind, name in EXHIBITS
                for path in row_results(kind, name, [model])
            ],
