"""GSM8K written by rows: the task is lm-eval's, answers are those of step-by-step scoring, caches change nothing."""

import json

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from tiny import (
    WINDOW,
    byte_tokenizer,
    focus_method,
    make_world,
    manifest_of,
    row_settings,
    tiny_model,
    write_json,
)

from focus import switch
from focus.cache import describe
from focus.config import Generation
from focus.errors import UserError
from focus.evaluation import generation
from focus.evaluation.downstream import load_task
from focus.evaluation.rows import EvaluatedRow
from focus.jobs import GenerationJob
from focus.method_config import make_method
from focus.methods import METHODS
from focus.provenance import read_result

CONTEXT, NEW = 120, 24
ITEMS = [
    {"question": "A cat has 9 lives and lost 2. How many are left?", "answer": "9 - 2 = <<9-2=7>>7 lives.\n#### 7"},
    {"question": "A mat costs $18. How much are 100 mats?", "answer": "100 mats cost 18 * 100.\n#### 1,800"},
    {"question": "How many tails have 3 cats?", "answer": "3 * 1 = 3 tails.\n#### 3"},
]
PRETRAINED = make_method(kind="pretrained", label="pretrained")


def job_of(settings, *, attention="full", top_k=None, **changes):
    values = {"items": 3, "context": CONTEXT, "max_new_tokens": NEW} | changes
    row = {"attention": attention, "top_k": top_k, "generation": Generation(**values)}
    return GenerationJob.model_validate(row_settings(settings) | row)


def row_of(settings, attention="full", top_k=None):
    method = METHODS[settings.kind]
    model = tiny_model()
    with torch.no_grad():
        for parameter in model.transformer.h.parameters():
            parameter.mul_(20)  # so that what is written depends on what is attended
    method.attach(model, settings, window=WINDOW, seed=0)
    method.choose(model, attention, top_k)
    return EvaluatedRow(model.eval(), byte_tokenizer(), method, 0)


def answer(settings, attention="full", top_k=None, **changes):
    row = row_of(settings, attention, top_k)
    job = job_of(settings, attention=attention, top_k=top_k, **changes)
    return generation.answers(row, job, ITEMS, torch.float32), row


def prompts():
    task = load_task("gsm8k", ITEMS, shots=8)
    task.build_all_requests()
    return [instance.args[0] for instance in task.instances]


@torch.no_grad()
def by_scoring(model, prompt):
    """The text and number of tokens that taking the likeliest next token gives, each from a forward over all tokens."""
    tokenizer = byte_tokenizer()
    ids = tokenizer(prompt)["input_ids"][-(CONTEXT - NEW) :]
    start = len(ids)
    while len(ids) < start + NEW:
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] == tokenizer.eos_token_id or "Q:" in tokenizer.decode(ids[start:]):
            break
    return tokenizer.decode(ids[start:], skip_special_tokens=True).split("Q:")[0], len(ids) - start


def test_the_prompt_is_eight_worked_examples_and_the_question():
    for prompt, item in zip(prompts(), ITEMS, strict=True):
        assert prompt.count("Q: ") == 9
        assert prompt.count("The answer is") == 8
        assert prompt.endswith(f"\n\nQ: {item['question']}\nA:")


@pytest.mark.parametrize("attention", ["full", "soft", "hard"])
def test_greedy_answers_are_those_of_step_by_step_scoring(attention):
    settings = PRETRAINED if attention == "full" else focus_method([], {"balance": "potentials"})
    measured, row = answer(settings, attention, 1 if attention == "hard" else None)
    expected = [by_scoring(row.model, prompt) for prompt in prompts()]
    assert [each["text"] for each in measured["answers"]] == [text for text, _ in expected]
    assert measured["new_tokens"] == sum(count for _, count in expected)
    assert len({text for text, _ in expected}) > 1


def test_a_hard_row_writes_the_same_with_and_without_the_cache():
    measured, row = answer(focus_method([], {"balance": "potentials"}), "hard", 1)
    assert "grouped" in row.method.backend(row.model)
    language_model = generation.WritingLM(row, context=CONTEXT, dtype=torch.float32)
    ids, mask = language_model.tok_batch_encode(prompts()[:1], left_truncate_len=CONTEXT - NEW)

    def write(**settings):
        greedy = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": mask, "pad_token_id": 256}
        return row.model.generate(ids, **greedy, **settings)

    cached = write(use_cache=True)
    assert torch.equal(cached, write(use_cache=False))
    text = byte_tokenizer().decode(cached[0, ids.shape[1] :], skip_special_tokens=True)
    assert measured["answers"][0]["text"] == text.split("Q:")[0]
    switch(row.model, "full")
    assert not torch.equal(cached, write(use_cache=True))


def test_both_filters_score_item_by_item(monkeypatch):
    texts = [" 9 - 2 = 7. The answer is 7.\n\nQ: What", " It is $1,800 for 100 mats.", " The answer is 4. Or 3"]

    def write(self, context, max_length, stop, **settings):
        prompt = self.tok_decode(context[0].tolist())
        text = next(text for text, item in zip(texts, ITEMS, strict=True) if item["question"][-20:] in prompt)
        return torch.cat([context, torch.tensor([self.tok_encode(text)])], dim=1)

    monkeypatch.setattr(HFLM, "_model_generate", write)
    measured, _ = answer(PRETRAINED)
    assert measured["correct"] == [1, 0, 0]
    assert measured["correct_flexible"] == [1, 0, 1]
    assert measured["accuracy"] == pytest.approx(1 / 3)
    assert [each["strict"] for each in measured["answers"]] == ["7", "[invalid]", "4."]
    assert [each["flexible"] for each in measured["answers"]] == ["7.", "100", "3"]
    assert [each["target"] for each in measured["answers"]] == ["7", "1,800", "3"]
    assert measured["answers"][0]["text"] == " 9 - 2 = 7. The answer is 7.\n\n"


def test_positions_beyond_the_window_and_cut_prompts_are_counted():
    measured, _ = answer(PRETRAINED)
    assert measured["prompts_cut"] == 3
    assert measured["context"] == CONTEXT
    read = 3 * (CONTEXT - NEW - 1) + measured["new_tokens"]
    assert measured["positions"] == read
    assert measured["beyond_window"] == pytest.approx((read - 3 * (WINDOW + 1)) / read)
    assert measured["tokens_per_second"] == pytest.approx(measured["new_tokens"] / measured["seconds"])


def test_the_context_is_at_most_the_models():
    assert answer(PRETRAINED, context=4096)[0]["context"] == 256
    with pytest.raises(UserError, match="expected less than the 256 tokens of tiny-gpt2, got 300"):
        answer(PRETRAINED, context=4096, max_new_tokens=300)


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setenv("FOCUS_CACHE", str(tmp_path / "cache"))
    world = make_world(tmp_path)
    folder = tmp_path / "cache/benchmarks/gsm8k"
    folder.mkdir(parents=True)
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    values = {"folder": "benchmarks/gsm8k", "files": describe(folder), "kind": "benchmark", "name": "gsm8k"}
    write_json(tmp_path / "gsm8k.json", manifest_of(values))
    return world


def result_of(world, job, weights=None):
    output = world.folder / "result.json"
    generation.run(job, model=world.model, benchmark=world.folder / "gsm8k.json", weights=weights, output=output)
    return read_result(output)


def test_a_job_keeps_its_answers_and_where_they_come_from(world):
    result = result_of(world, job_of(PRETRAINED, items=2))
    metrics = result["metrics"]
    assert metrics["items"] == len(metrics["answers"]) == len(metrics["correct"]) == 2
    assert metrics["shots"] == 8
    assert result["provenance"]["revisions"]["gsm8k"]["revision"] == "sha256:0"
    assert result["provenance"]["dtype"] == "float32"


def test_a_row_that_cannot_decode_says_so_in_its_result(world):
    job = job_of(focus_method([], {"balance": "sinkhorn"}), attention="hard", top_k=1)
    assert result_of(world, job)["metrics"].keys() == {"reason"}
