# Tables, a figure and a target of what attention alone costs; none when the scale's `speed` is null.
SPEED = (
    [("tables", "table6"), ("tables", "table7speed"), ("figures", "speed")]
    if experiment.speed
    else []
)
SPEED_RESULT = "<results>/speed/attention.json"
METHODS_RESULT = "<results>/speed/methods.json"


# A benchmark takes every core, so that nothing runs beside it: a neighbour slows the side of a ratio that leans more
# on memory and shared cache, and no repetition takes that out again. How many threads are timed is a setting.
rule bench_attention:
    input:
        code=code("focus.benchmark"),
    output:
        SPEED_RESULT,
    log:
        "<results>/logs/speed/attention.log",
    conda:
        ENVIRONMENT
    threads: workflow.resource_settings.cores or 1
    resources:
        mem_mb=memory(
            "attention", lambda wildcards: experiment.speed.attention, least=6000
        ),
        gpu=gpus("attention", lambda wildcards: experiment.speed.attention),
        runtime=hours(12),
    params:
        job=lambda wildcards: experiment.speed.attention.model_dump_json(),
    message:
        "time attention alone, with nothing beside it"
    shell:
        "focus bench attention --job {params.job:q} --output {output} 2>&1 | tee {log}"


rule bench_methods:
    input:
        code=code("focus.benchmark_methods"),
    output:
        METHODS_RESULT,
    log:
        "<results>/logs/speed/methods.log",
    conda:
        ENVIRONMENT
    threads: workflow.resource_settings.cores or 1
    resources:
        mem_mb=memory(
            "methods", lambda wildcards: jobs.methods_job(experiment), least=6000
        ),
        gpu=gpus("methods", lambda wildcards: jobs.methods_job(experiment)),
        runtime=hours(12),
    params:
        job=lambda wildcards: jobs.methods_job(experiment).model_dump_json(),
    message:
        "time every method's attention, with nothing beside it"
    shell:
        "focus bench methods --job {params.job:q} --output {output} 2>&1 | tee {log}"


rule speed_table:
    input:
        code=code("focus.paper.speed"),
        printed="src/focus/paper/printed.yaml",
        result=SPEED_RESULT,
    output:
        csv="<results>/tables/{speed_table}.csv",
        md="<results>/tables/{speed_table}.md",
        html=report(
            "<results>/tables/{speed_table}.html",
            caption="../report/speed.rst",
            category="Speed",
        ),
        tex="<results>/tables/{speed_table}.tex",
    log:
        "<results>/logs/tables/{speed_table}.log",
    wildcard_constraints:
        speed_table=alternatives([name for kind, name in SPEED if kind == "tables"]),
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=500,
    params:
        prefix=lambda wildcards: in_results("tables/{speed_table}", wildcards),
    message:
        "table {wildcards.speed_table}"
    shell:
        "focus bench table {wildcards.speed_table} --result {input.result} --output {params.prefix} 2>&1 | tee {log}"


rule speed_figure:
    input:
        code=code("focus.paper.speed_figure"),
        printed="src/focus/paper/printed.yaml",
        result=SPEED_RESULT,
    output:
        pdf="<results>/figures/speed.pdf",
        png=report(
            "<results>/figures/speed.png",
            caption="../report/speed.rst",
            category="Speed",
        ),
    log:
        "<results>/logs/figures/speed.log",
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=500,
    params:
        prefix=lambda wildcards: in_results("figures/speed", wildcards),
    message:
        "figure speed"
    shell:
        "focus bench figure --result {input.result} --output {params.prefix} 2>&1 | tee {log}"
