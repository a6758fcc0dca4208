# Every table and figure of the run.
MADE = EXHIBITS + SPEED + GROUPS + LEAK + BITS


rule table:
    input:
        code=lambda wildcards: code(
            TABLE_MODULES[experiment.tables[wildcards.table].shows]
        ),
        printed="src/focus/paper/printed.yaml",
        results=lambda wildcards: exhibit_results("tables", wildcards.table),
    output:
        csv="<results>/tables/{table}.csv",
        md="<results>/tables/{table}.md",
        html=report(
            "<results>/tables/{table}.html",
            caption="../report/table.rst",
            category="Tables",
        ),
        tex="<results>/tables/{table}.tex",
    log:
        "<results>/logs/tables/{table}.log",
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=500,
    params:
        scale=lambda wildcards: exhibit_slice(
            "tables", wildcards.table
        ).model_dump_json(),
        results=lambda wildcards: in_results("", wildcards),
        prefix=lambda wildcards: in_results("tables/{table}", wildcards),
    message:
        "table {wildcards.table}"
    shell:
        "focus table {wildcards.table} --scale {params.scale:q} --results {params.results}"
        " --output {params.prefix} 2>&1 | tee {log}"


rule figure:
    input:
        code=lambda wildcards: code(
            FIGURE_MODULES[experiment.figures[wildcards.figure].shows]
        ),
        printed="src/focus/paper/printed.yaml",
        results=lambda wildcards: exhibit_results("figures", wildcards.figure),
    output:
        pdf="<results>/figures/{figure}.pdf",
        png=report(
            "<results>/figures/{figure}.png",
            caption="../report/figure.rst",
            category="Figures",
        ),
    log:
        "<results>/logs/figures/{figure}.log",
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=500,
    params:
        scale=lambda wildcards: exhibit_slice(
            "figures", wildcards.figure
        ).model_dump_json(),
        results=lambda wildcards: in_results("", wildcards),
        prefix=lambda wildcards: in_results("figures/{figure}", wildcards),
    message:
        "figure {wildcards.figure}"
    shell:
        "focus figure {wildcards.figure} --scale {params.scale:q} --results {params.results}"
        " --output {params.prefix} 2>&1 | tee {log}"


rule claims:
    input:
        code=code("focus.paper.claims"),
        printed="src/focus/paper/printed.yaml",
        claims="config/claims.yaml",
        results=sorted(
            {path for kind, name in EXHIBITS for path in exhibit_results(kind, name)}
        ),
        speed=[SPEED_RESULT] if experiment.speed else [],
        groups=[GROUPS_RESULT] if GROUPS else [],
        leak=LEAK_RESULTS + BITS_RESULTS,
    output:
        json="<results>/claims.json",
        md="<results>/claims.md",
        html=report(
            "<results>/claims.html", caption="../report/claims.rst", category="Claims"
        ),
    log:
        "<results>/logs/claims.log",
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=500,
    params:
        scale=lambda wildcards: experiment.model_copy(
            update={"keep_weights": "all"}
        ).model_dump_json(),
        results=lambda wildcards: in_results("", wildcards),
    message:
        "verdicts on the claims"
    shell:
        "focus claims {input.claims} --scale {params.scale:q} --results {params.results}"
        " --output {output.json} --markdown {output.md} 2>&1 | tee {log}"


# Not named report, as `snakemake --report` is.
rule report_page:
    input:
        code=code("focus.paper.report"),
        templates=sorted(map(str, Path("src/focus/paper/templates").iterdir())),
        captions=sorted(map(str, Path("workflow/report").glob("*.rst"))),
        claims="<results>/claims.json",
        exhibits=[exhibit_files(kind, name) for kind, name in MADE],
        groups=GROUPS_PAGE,
    output:
        multiext("<results>/report", ".html", ".md", ".tex"),
    log:
        "<results>/logs/report.log",
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=1000,
    params:
        scale=lambda wildcards: experiment.model_dump_json(),
        results=lambda wildcards: in_results("", wildcards),
        prefix=lambda wildcards: in_results("report", wildcards),
        files=[f"--configfile={path}" for path in config_files()],
    message:
        "everything on one page: {params.prefix}.html"
    shell:
        "focus report {params.results} --scale {params.scale:q} --captions workflow/report {params.files:q}"
        " --output {params.prefix} 2>&1 | tee {log}"


# Runs none of what it counts.
rule cost:
    input:
        code=code("focus.cost_table"),
    log:
        "<results>/logs/cost.log",
    localrule: True
    run:
        show_cost(log[0])


# What the repository keeps of a run: all that is small. Run by hand, since it replaces what is committed.
rule reference:
    input:
        [exhibit_files(kind, name) for kind, name in MADE],
        GROUPS_PAGE,
        rules.claims.output,
        rules.report_page.output,
    output:
        touch("<results>/reference.done"),
    log:
        "<results>/logs/reference.log",
    conda:
        ENVIRONMENT
    threads: 1
    params:
        results=lambda wildcards: in_results("", wildcards),
        reference=f"results/reference/{experiment.scale}",
    message:
        "keep this run's tables, figures, claims and results in {params.reference}"
    shell:
        "focus reference {params.results} {params.reference} 2>&1 | tee {log}"
