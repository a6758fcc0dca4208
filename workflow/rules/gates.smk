# What the soft gate gives to near and far pairs: one result for each soft row of a table or figure that shows gates.
rule gate_values:
    input:
        code=code("focus.gate_values"),
        model="<results>/models/{model}.json",
        corpus="<results>/corpora/{corpus}.json",
        weights=weights_of,
    output:
        "<results>/gates/{model}/{corpus}/{method}/{variant}/seed{seed}.json",
    log:
        "<results>/logs/gates/{model}/{corpus}/{method}/{variant}/seed{seed}.log",
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=memory("gates", gate_values_job, least=3000),
        gpu=gpus("gates", gate_values_job),
        runtime=runtime("gates", gate_values_job),
    params:
        job=lambda wildcards: gate_values_job(wildcards).model_dump_json(),
        weights=lambda wildcards, input: (
            f"--weights {input.weights}" if input.weights else ""
        ),
    message:
        "gate values of {wildcards.model}, {wildcards.method} ({wildcards.corpus}, seed {wildcards.seed})"
    shell:
        "focus gate-values --job {params.job:q} --model {input.model} --corpus {input.corpus} {params.weights}"
        " --output {output} 2>&1 | tee {log}"
