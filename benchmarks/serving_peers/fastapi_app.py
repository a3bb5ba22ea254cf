"""A `transformers` model behind FastAPI, as the library's own guides serve it: one request, one forward pass.

    MODEL=DIR KIND=sentence|span DTYPE=float32|bfloat16 uvicorn fastapi_app:app

`pipeline("text-classification")` for sentences. The library's 5th version has no pipeline for question answering, so
spans take its model and tokenizer with the few lines that the pipeline used to run. Threads are torch's own default,
all cores.
"""

import os

import torch
from fastapi import FastAPI
from pydantic import BaseModel
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification, AutoTokenizer, pipeline

MODEL, KIND = os.environ["MODEL"], os.environ["KIND"]
MAX_TOKENS, MAX_ANSWER_TOKENS = int(os.environ["MAX_TOKENS"]), 30
DTYPE = getattr(torch, os.environ.get("DTYPE", "float32"))

app = FastAPI()
tokenizer = AutoTokenizer.from_pretrained(MODEL)
auto = {"sentence": AutoModelForSequenceClassification, "span": AutoModelForQuestionAnswering}[KIND]
model = auto.from_pretrained(MODEL, dtype=DTYPE).eval()
classify = pipeline("text-classification", model=model, tokenizer=tokenizer) if KIND == "sentence" else None


class Request(BaseModel):
    TEXT: str = ""
    QUESTION: str = ""
    CONTEXT: str = ""


@app.get("/ready")
def ready() -> bool:
    return True


# a plain function: FastAPI runs it on its pool of threads, so requests overlap where torch lets go of the interpreter
@app.post("/ask")
def ask(request: Request) -> dict[str, str | float]:
    if classify is not None:
        (found,) = classify(request.TEXT, truncation=True, max_length=MAX_TOKENS)
        return {"answer": found["label"], "score": found["score"]}
    batch = tokenizer(
        request.QUESTION,
        request.CONTEXT,
        truncation="only_second",
        max_length=MAX_TOKENS,
        return_offsets_mapping=True,
        return_tensors="pt",
    )
    offsets = batch.pop("offset_mapping")[0]
    inside = torch.tensor([kind == 1 for kind in batch.sequence_ids(0)])
    with torch.inference_mode():
        logits = model(**batch)
    both = (logits.start_logits[0].float(), logits.end_logits[0].float())
    start, end = (values.masked_fill(~inside, -torch.inf) for values in both)
    scores = start[:, None] + end[None, :]
    allowed = torch.ones_like(scores).triu().tril(MAX_ANSWER_TOKENS - 1) > 0
    scores = scores.masked_fill(~allowed, -torch.inf)
    best = int(scores.argmax())
    first, last = divmod(best, scores.shape[1])
    answer = request.CONTEXT[int(offsets[first, 0]) : int(offsets[last, 1])]
    return {"answer": answer, "score": float(scores.flatten()[best])}
