# What trains every weight writes a whole model.
DROPPED = {
    name
    for name, method in experiment.methods.items()
    if method.trains_everything and experiment.keep_weights == "small"
}


# The checkpoints are no outputs (see pretrain).
rule train:
    input:
        code=code("focus.training"),
        model="<results>/models/{model}.json",
        corpus="<results>/corpora/{corpus}.json",
    output:
        result="<results>/training/{model}/{corpus}/{method}/seed{seed}/result.json",
        steps="<results>/training/{model}/{corpus}/{method}/seed{seed}/log.jsonl",
        weights=directory(
            "<results>/training/{model}/{corpus}/{method}/seed{seed}/weights"
        ),
    log:
        "<results>/logs/training/{model}/{corpus}/{method}/seed{seed}.log",
    wildcard_constraints:
        method=alternatives(set(experiment.methods) - DROPPED),
    priority: headline_first
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=memory("training", train_job, least=5000),
        gpu=gpus("training", train_job),
        runtime=runtime("training", train_job),
    params:
        job=lambda wildcards: train_job(wildcards).model_dump_json(),
        checkpoints=lambda wildcards: in_results(
            "checkpoints/training/{model}/{corpus}/{method}/seed{seed}", wildcards
        ),
    message:
        "train {wildcards.method} on {wildcards.model} ({wildcards.corpus}, seed {wildcards.seed})"
    shell:
        "focus train --job {params.job:q} --model {input.model} --corpus {input.corpus} --weights {output.weights}"
        " --log {output.steps} --checkpoints {params.checkpoints} --output {output.result} 2>&1 | tee {log}"


# The same, whose weights go once every row is evaluated on them: a row added later trains it again, to the same numbers.
if DROPPED:

    use rule train as train_everything with:
        output:
            result="<results>/training/{model}/{corpus}/{method}/seed{seed}/result.json",
            steps="<results>/training/{model}/{corpus}/{method}/seed{seed}/log.jsonl",
            weights=temp(
                directory(
                    "<results>/training/{model}/{corpus}/{method}/seed{seed}/weights"
                )
            ),
        wildcard_constraints:
            method=alternatives(DROPPED),
