rule fetch_corpus:
    input:
        code=code("focus.corpora"),
    output:
        "<results>/corpora/{corpus}.json",
    log:
        "<results>/logs/fetch/{corpus}.log",
    priority: 2
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=lambda wildcards: (
            1000 + round(prediction.text_memory([wildcards.corpus]))
        ),
    message:
        "fetch the text {wildcards.corpus}"
    shell:
        "focus fetch corpus {wildcards.corpus} --output {output} 2>&1 | tee {log}"


rule fetch_benchmark:
    input:
        code=code("focus.benchmarks"),
    output:
        "<results>/benchmarks/{task}.json",
    log:
        "<results>/logs/fetch/{task}.log",
    priority: 2
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=1000,
    message:
        "fetch the task {wildcards.task}"
    shell:
        "focus fetch benchmark {wildcards.task} --output {output} 2>&1 | tee {log}"
