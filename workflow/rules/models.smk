PRETRAINED_HERE = {
    model: settings.pretraining
    for model, settings in experiment.model_settings.items()
    if settings.pretraining
}


rule fetch_model:
    input:
        code=code("focus.models"),
    output:
        "<results>/models/{model}.json",
    log:
        "<results>/logs/fetch/{model}.log",
    wildcard_constraints:
        model=alternatives(set(experiment.model_settings) - set(PRETRAINED_HERE)),
    priority: 2
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=3000,
    message:
        "fetch {wildcards.model}"
    shell:
        "focus fetch model {wildcards.model} --output {output} 2>&1 | tee {log}"


# The checkpoints, beside which the log grows, are no outputs, because Snakemake deletes a job's outputs before it
# starts or when it fails: a run that was killed resumes from them.
rule pretrain:
    input:
        code=code("focus.pretraining"),
        corpora=lambda wildcards: [
            f"<results>/corpora/{corpus}.json"
            for corpus in PRETRAINED_HERE[wildcards.model].corpora
        ],
    output:
        manifest="<results>/models/{model}.json",
        result="<results>/models/{model}.result.json",
        steps="<results>/models/{model}.log.jsonl",
        weights=directory("<results>/models/{model}"),
    log:
        "<results>/logs/pretrain/{model}.log",
    wildcard_constraints:
        model=alternatives(PRETRAINED_HERE),
    priority: 2
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=memory("pretraining", pretrain_job, least=4000),
        gpu=gpus("pretraining", pretrain_job),
        runtime=runtime("pretraining", pretrain_job),
    params:
        job=lambda wildcards: pretrain_job(wildcards).model_dump_json(),
        checkpoints=lambda wildcards: in_results(
            "checkpoints/models/{model}", wildcards
        ),
    message:
        "pretrain {wildcards.model} from scratch"
    shell:
        "focus pretrain {input.corpora:q} --job {params.job:q} --weights {output.weights}"
        " --log {output.steps} --checkpoints {params.checkpoints}"
        " --output {output.manifest} --result {output.result} 2>&1 | tee {log}"
