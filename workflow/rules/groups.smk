# A table, a figure and a page of what one row's groups hold; none when the scale's `groups` is null, or its model is
# left out of the run.
GROUPS = (
    [("tables", "groups"), ("figures", "groups")]
    if experiment.groups and experiment.groups.model in experiment.models
    else []
)
GROUPS_PAGE = ["<results>/figures/groups.html"] if GROUPS else []


rule fetch_tagger:
    input:
        code=code("focus.taggers"),
    output:
        "<results>/taggers/{tagger}.json",
    log:
        "<results>/logs/fetch/{tagger}.log",
    priority: 2
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=500,
    message:
        "fetch the tagger {wildcards.tagger}"
    shell:
        "focus fetch tagger {wildcards.tagger} --output {output} 2>&1 | tee {log}"


if GROUPS:
    GROUPS_JOB = jobs.groups_job(experiment)
    GROUPS_RESULT = f"<results>/groups/{GROUPS_JOB.model}/{GROUPS_JOB.corpus}/{GROUPS_JOB.method}/seed{GROUPS_JOB.seed}.json"

    rule groups_analysis:
        input:
            code=code("focus.groups"),
            model="<results>/models/{model}.json",
            corpus="<results>/corpora/{corpus}.json",
            tagger="<results>/taggers/en-core-web-sm.json",
            weights="<results>/training/{model}/{corpus}/{method}/seed{seed}/weights",
        output:
            "<results>/groups/{model}/{corpus}/{method}/seed{seed}.json",
        log:
            "<results>/logs/groups/{model}/{corpus}/{method}/seed{seed}.log",
        conda:
            ENVIRONMENT
        threads: 1
        resources:
            mem_mb=memory("groups", lambda wildcards: GROUPS_JOB, least=3000),
            gpu=gpus("groups", lambda wildcards: GROUPS_JOB),
            runtime=runtime("groups", lambda wildcards: GROUPS_JOB),
        params:
            job=lambda wildcards: GROUPS_JOB.model_dump_json(),
        message:
            "what the groups of {wildcards.model}, {wildcards.method} hold ({wildcards.corpus}, seed {wildcards.seed})"
        shell:
            "focus groups analyse --job {params.job:q} --model {input.model} --corpus {input.corpus}"
            " --tagger {input.tagger} --weights {input.weights} --output {output} 2>&1 | tee {log}"

    rule groups_table:
        input:
            code=code("focus.paper.groups"),
            printed="src/focus/paper/printed.yaml",
            result=GROUPS_RESULT,
        output:
            csv="<results>/tables/groups.csv",
            md="<results>/tables/groups.md",
            html=report(
                "<results>/tables/groups.html",
                caption="../report/groups.rst",
                category="Groups",
            ),
            tex="<results>/tables/groups.tex",
        log:
            "<results>/logs/tables/groups.log",
        conda:
            ENVIRONMENT
        threads: 1
        resources:
            mem_mb=500,
        params:
            prefix=lambda wildcards: in_results("tables/groups", wildcards),
        message:
            "table groups"
        shell:
            "focus groups table --result {input.result} --output {params.prefix} 2>&1 | tee {log}"

    rule groups_figure:
        input:
            code=code("focus.paper.groups_figure"),
            printed="src/focus/paper/printed.yaml",
            result=GROUPS_RESULT,
        output:
            pdf="<results>/figures/groups.pdf",
            png=report(
                "<results>/figures/groups.png",
                caption="../report/groups.rst",
                category="Groups",
            ),
        log:
            "<results>/logs/figures/groups.log",
        conda:
            ENVIRONMENT
        threads: 1
        resources:
            mem_mb=500,
        params:
            prefix=lambda wildcards: in_results("figures/groups", wildcards),
        message:
            "figure groups"
        shell:
            "focus groups figure --result {input.result} --output {params.prefix} 2>&1 | tee {log}"

    rule groups_page:
        input:
            code=code("focus.paper.groups_page"),
            result=GROUPS_RESULT,
        output:
            report(
                "<results>/figures/groups.html",
                caption="../report/groups.rst",
                category="Groups",
            ),
        log:
            "<results>/logs/figures/groups-page.log",
        conda:
            ENVIRONMENT
        threads: 1
        resources:
            mem_mb=500,
        message:
            "a passage coloured by group"
        shell:
            "focus groups page --result {input.result} --output {output} 2>&1 | tee {log}"
