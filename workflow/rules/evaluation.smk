rule perplexity:
    input:
        code=code("focus.evaluation.perplexity"),
        model="<results>/models/{model}.json",
        corpus="<results>/corpora/{corpus}.json",
        weights=weights_of,
    output:
        "<results>/perplexity/{model}/{corpus}/{method}/{variant}/seed{seed}.json",
    log:
        "<results>/logs/perplexity/{model}/{corpus}/{method}/{variant}/seed{seed}.log",
    priority: headline_first
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=memory("perplexity", perplexity_job, least=3000),
        gpu=gpus("perplexity", perplexity_job),
        runtime=runtime("perplexity", perplexity_job),
    params:
        job=lambda wildcards: perplexity_job(wildcards).model_dump_json(),
        weights=lambda wildcards, input: (
            f"--weights {input.weights}" if input.weights else ""
        ),
    message:
        "perplexity of {wildcards.model}, {wildcards.method}, {wildcards.variant} ({wildcards.corpus}, seed {wildcards.seed})"
    shell:
        "focus perplexity --job {params.job:q} --model {input.model} --corpus {input.corpus} {params.weights}"
        " --output {output} 2>&1 | tee {log}"


rule downstream:
    input:
        code=code("focus.evaluation.downstream"),
        model="<results>/models/{model}.json",
        benchmarks=lambda wildcards: [
            f"<results>/benchmarks/{task}.json"
            for task in experiment.tasks_of(
                wildcards.model, wildcards.corpus, wildcards.method, wildcards.variant
            )
        ],
        weights=weights_of,
    output:
        "<results>/downstream/{model}/{corpus}/{method}/{variant}/seed{seed}.json",
    log:
        "<results>/logs/downstream/{model}/{corpus}/{method}/{variant}/seed{seed}.log",
    priority: headline_first
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=memory("downstream", downstream_job, least=3000),
        gpu=gpus("downstream", downstream_job),
        runtime=runtime("downstream", downstream_job),
    params:
        job=lambda wildcards: downstream_job(wildcards).model_dump_json(),
        weights=lambda wildcards, input: (
            f"--weights {input.weights}" if input.weights else ""
        ),
    message:
        "tasks of {wildcards.model}, {wildcards.method}, {wildcards.variant} ({wildcards.corpus}, seed {wildcards.seed})"
    shell:
        "focus downstream {input.benchmarks} --job {params.job:q} --model {input.model} {params.weights}"
        " --output {output} 2>&1 | tee {log}"


rule generation:
    input:
        code=code("focus.evaluation.generation"),
        model="<results>/models/{model}.json",
        benchmark=f"<results>/benchmarks/{experiment.evaluation.generation.task}.json",
        weights=weights_of,
    output:
        "<results>/generation/{model}/{corpus}/{method}/{variant}/seed{seed}.json",
    log:
        "<results>/logs/generation/{model}/{corpus}/{method}/{variant}/seed{seed}.log",
    priority: headline_first
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=memory("generation", generation_job, least=3000),
        gpu=gpus("generation", generation_job),
        runtime=runtime("generation", generation_job),
    params:
        job=lambda wildcards: generation_job(wildcards).model_dump_json(),
        weights=lambda wildcards, input: (
            f"--weights {input.weights}" if input.weights else ""
        ),
    message:
        "answers of {wildcards.model}, {wildcards.method}, {wildcards.variant} ({wildcards.corpus}, seed {wildcards.seed})"
    shell:
        "focus generate {input.benchmark} --job {params.job:q} --model {input.model} {params.weights}"
        " --output {output} 2>&1 | tee {log}"


rule long_inputs:
    input:
        code=code("focus.evaluation.long_inputs"),
        model="<results>/models/{model}.json",
        corpus="<results>/corpora/{corpus}.json",
        benchmarks=[
            f"<results>/benchmarks/{task}.json"
            for task in experiment.evaluation.long_inputs.tasks
        ],
        weights=weights_of,
    output:
        "<results>/long_inputs/{model}/{corpus}/{method}/{variant}/seed{seed}.json",
    log:
        "<results>/logs/long_inputs/{model}/{corpus}/{method}/{variant}/seed{seed}.log",
    priority: headline_first
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=memory("long_inputs", long_inputs_job, least=4000),
        gpu=gpus("long_inputs", long_inputs_job),
        runtime=runtime("long_inputs", long_inputs_job),
    params:
        job=lambda wildcards: long_inputs_job(wildcards).model_dump_json(),
        weights=lambda wildcards, input: (
            f"--weights {input.weights}" if input.weights else ""
        ),
    message:
        "tasks behind other tokens of {wildcards.model}, {wildcards.method}, {wildcards.variant} ({wildcards.corpus}, seed {wildcards.seed})"
    shell:
        "focus long-inputs {input.benchmarks} --job {params.job:q} --model {input.model} --corpus {input.corpus}"
        " {params.weights} --output {output} 2>&1 | tee {log}"


rule recall_tests:
    input:
        code=code("focus.evaluation.recall"),
        model="<results>/models/{model}.json",
        corpus="<results>/corpora/{corpus}.json",
        weights=weights_of,
    output:
        "<results>/recall/{model}/{corpus}/{method}/{variant}/seed{seed}.json",
    log:
        "<results>/logs/recall/{model}/{corpus}/{method}/{variant}/seed{seed}.log",
    priority: headline_first
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=memory("recall", recall_job, least=4000),
        gpu=gpus("recall", recall_job),
        runtime=runtime("recall", recall_job),
    params:
        job=lambda wildcards: recall_job(wildcards).model_dump_json(),
        weights=lambda wildcards, input: (
            f"--weights {input.weights}" if input.weights else ""
        ),
    message:
        "recall of {wildcards.model}, {wildcards.method}, {wildcards.variant} ({wildcards.corpus}, seed {wildcards.seed})"
    shell:
        "focus recall --job {params.job:q} --model {input.model} --corpus {input.corpus} {params.weights}"
        " --output {output} 2>&1 | tee {log}"
