# Whether groups see the future (PAPER.md 4.1): a table of trained centroids, none when the scale's `leak` is null or all
# its models are left out of the run; a table and a figure of models that learn random bits, none when `bits` is null.
LEAK_ROWS = [
    row
    for row in (experiment.leak.rows if experiment.leak else [])
    if row.model in experiment.models
]
LEAK_RESULTS = [
    f"<results>/leak/{row.model}/{row.corpus}/{row.method}/seed{seed}.json"
    for row in LEAK_ROWS
    for seed in experiment.seeds_of(row.model, row.method)
]
BITS_RESULTS = (
    [
        f"<results>/bits/{balance}/t{length}/{trains}/seed{seed}.json"
        for balance in experiment.bits.balances
        for length in experiment.bits.lengths
        for trains in experiment.bits.trains
        for seed in experiment.bits.seeds or experiment.seeds
    ]
    if experiment.bits
    else []
)
LEAK = [("tables", "leak")] if LEAK_RESULTS else []
BITS = [("tables", "bits"), ("figures", "bits")] if BITS_RESULTS else []


if LEAK:

    rule leak_measure:
        input:
            code=code("focus.leak"),
            model="<results>/models/{model}.json",
            corpus="<results>/corpora/{corpus}.json",
            others=[
                f"<results>/corpora/{name}.json" for name in experiment.leak.corpora
            ],
            weights="<results>/training/{model}/{corpus}/{method}/seed{seed}/weights",
        output:
            "<results>/leak/{model}/{corpus}/{method}/seed{seed}.json",
        log:
            "<results>/logs/leak/{model}/{corpus}/{method}/seed{seed}.log",
        conda:
            ENVIRONMENT
        threads: 1
        resources:
            mem_mb=memory("leak", leak_job, least=3500),
            gpu=gpus("leak", leak_job),
            runtime=runtime("leak", leak_job),
        params:
            job=lambda wildcards: leak_job(wildcards).model_dump_json(),
        message:
            "whether the groups of {wildcards.model}, {wildcards.method} see the future ({wildcards.corpus}, seed {wildcards.seed})"
        shell:
            "focus leak measure {input.others} --job {params.job:q} --model {input.model} --corpus {input.corpus}"
            " --weights {input.weights} --output {output} 2>&1 | tee {log}"

    rule leak_table:
        input:
            code=code("focus.paper.leak"),
            results=LEAK_RESULTS,
        output:
            csv="<results>/tables/leak.csv",
            md="<results>/tables/leak.md",
            html=report(
                "<results>/tables/leak.html",
                caption="../report/leak.rst",
                category="The leak",
            ),
            tex="<results>/tables/leak.tex",
        log:
            "<results>/logs/tables/leak.log",
        conda:
            ENVIRONMENT
        threads: 1
        resources:
            mem_mb=500,
        params:
            prefix=lambda wildcards: in_results("tables/leak", wildcards),
        message:
            "table leak"
        shell:
            "focus leak table {input.results} --output {params.prefix} 2>&1 | tee {log}"


if BITS:

    rule bits_train:
        input:
            code=code("focus.random_bits"),
        output:
            "<results>/bits/{balance}/t{length}/{trains}/seed{seed}.json",
        log:
            "<results>/logs/bits/{balance}/t{length}/{trains}/seed{seed}.log",
        wildcard_constraints:
            length=r"\d+",
        conda:
            ENVIRONMENT
        threads: 1
        resources:
            mem_mb=2000,
            runtime=hours(1),
        params:
            job=lambda wildcards: jobs.bits_job(
                experiment,
                **(
                    dict(wildcards)
                    | {"length": int(wildcards.length), "seed": int(wildcards.seed)}
                ),
            ).model_dump_json(),
        message:
            "learn random bits: {wildcards.balance}, T={wildcards.length}, {wildcards.trains} (seed {wildcards.seed})"
        shell:
            "focus bits train --job {params.job:q} --output {output} 2>&1 | tee {log}"

    rule bits_table:
        input:
            code=code("focus.paper.bits"),
            results=BITS_RESULTS,
        output:
            csv="<results>/tables/bits.csv",
            md="<results>/tables/bits.md",
            html=report(
                "<results>/tables/bits.html",
                caption="../report/bits.rst",
                category="The leak",
            ),
            tex="<results>/tables/bits.tex",
        log:
            "<results>/logs/tables/bits.log",
        conda:
            ENVIRONMENT
        threads: 1
        resources:
            mem_mb=500,
        params:
            prefix=lambda wildcards: in_results("tables/bits", wildcards),
        message:
            "table bits"
        shell:
            "focus bits table {input.results} --output {params.prefix} 2>&1 | tee {log}"

    rule bits_figure:
        input:
            code=code("focus.paper.bits_figure"),
            results=BITS_RESULTS,
        output:
            pdf="<results>/figures/bits.pdf",
            png=report(
                "<results>/figures/bits.png",
                caption="../report/bits.rst",
                category="The leak",
            ),
        log:
            "<results>/logs/figures/bits.log",
        conda:
            ENVIRONMENT
        threads: 1
        resources:
            mem_mb=500,
        params:
            prefix=lambda wildcards: in_results("figures/bits", wildcards),
        message:
            "figure bits"
        shell:
            "focus bits figure {input.results} --output {params.prefix} 2>&1 | tee {log}"
